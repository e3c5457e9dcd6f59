"""Runs the demo's commands in a real terminal, and records what they print as an asciicast."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.demo.demo import ROOT, network_sandbox
from scripts.lib.demo.repositories import make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub

COLUMNS, ROWS = 76, 40


@dataclass(frozen=True)
class Command:
    """What a user types, on which machine, and what is different here.

    Attributes:
        hidden: arguments that a user does not need: the Hub's address, a short training.
    """

    machine: str
    line: str
    hidden: tuple[str, ...] = ()


def commands(endpoint: str) -> tuple[Command, ...]:
    """The commands of the recording."""
    train = "runner train demo.yaml --bundle bundle --processes 2"
    return (
        Command("laptop", "stage fetch demo.yaml -o bundle", ("--endpoint", endpoint)),
        Command("laptop", "rsync -a --partial bundle/ ../cluster/bundle/"),
        Command("cluster", "stage verify bundle"),
        Command("cluster", train, ("--set", "steps=12", "--set", "checkpoint.every=12")),
    )


def record(folder: Path, cast: Path) -> None:
    """Runs the commands below an empty folder, and writes the recording."""
    laptop, cluster = folder / "laptop", folder / "cluster"
    for name, target in (("manifests", laptop), ("runs", cluster)):
        target.mkdir()
        shutil.copy(ROOT / name / "demo.yaml", target / "demo.yaml")
    events: list[tuple[float, str]] = []
    began = time.monotonic()
    offline = network_sandbox()
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        for command in commands(hub.endpoint):
            where = laptop if command.machine == "laptop" else cluster
            before = offline if command.machine == "cluster" else ()
            now = time.monotonic() - began
            events.append((now, f"\x1b[1m{command.machine}$\x1b[0m {command.line}\r\n"))
            argv = [*before, *command.line.split(), *command.hidden]
            for moment, text in _run(argv, where, _environment(folder)):
                events.append((moment - began, text.replace(str(folder), "~")))
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "scripts/demo"}
    lines = [json.dumps(header), *(json.dumps([round(t, 2), "o", text]) for t, text in events)]
    cast.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    foreign = ("HF_", "SLURM_", "AIRLIFT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    own = {"PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "HOME": str(folder)}
    return {**kept, **own, "AIRLIFT_STORE": "none", "XDG_STATE_HOME": str(folder / "state")}


def _run(argv: list[str], folder: Path, environment: Mapping[str, str]) -> list[tuple[float, str]]:
    """Runs a command in a terminal; returns what it printed and when.

    Raises:
        RuntimeError: it did not exit with 0.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        argv, cwd=folder, env=dict(environment), stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    events: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            more = os.read(ours, 2**16)
        except OSError:  # Linux: the other end is closed
            break
        if not more:
            break
        whole, rest = _whole_characters(rest + more)
        events.append((time.monotonic(), whole))
    os.close(ours)
    if process.wait() != 0:
        raise RuntimeError(f"{argv} ended with {process.returncode}: {events[-5:]}")
    return events


def _whole_characters(text: bytes) -> tuple[str, bytes]:
    for cut in range(4):
        try:
            return text[: len(text) - cut].decode(), text[len(text) - cut :]
        except UnicodeDecodeError:
            continue
    return text.decode("utf-8", "replace"), b""
