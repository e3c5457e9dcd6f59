"""The golden of words: what people read of the demo's run, and how often Slurm is asked for it.

`stage verify`, `runner check` and `runner train --dry-run` run on the demo's bundle. What belongs
to this machine (paths, names, ages, memory, kinds of disks) is replaced or left out, and so is the
bundle's id, which the format of the lock decides. The programs of Slurm are stand-ins that write
down each call.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
from click.testing import CliRunner

from runner.cli import main as runner
from scripts.lib.demo.repositories import make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.cli import main as stage
from tests.first_job.harness import programs
from tests.support.staging import run_as

ROOT = Path(__file__).resolve().parents[2]
RUN = ("demo.yaml", "--bundle", "bundle")
BARE: dict[str, str] = {}
BODIES = {
    "sinfo": 'echo "cpu*|8|64000|(null)|1-00:00:00"',
    "squeue": 'case "$*" in *--jobs=17*%T*) echo RUNNING ;; esac',
    "sbatch": 'case "$*" in *--test-only*) echo "Job 17 to start" >&2 ;; *) echo 17 ;; esac',
    "scontrol": "exit 1",
    "sacct": "exit 1",
    "scancel": "exit 1",
    "srun": "exit 1",
}
IN_A_JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
}
# Of this machine: the kinds of its disks, and how many remarks on them there are.
LEFT_OUT = re.compile(
    r"warning: .* is on (a disk of this node|this node's memory) .*\n( *-> .*\n)*"
)
REPLACED = (
    (r", except \d+ warnings? above", ""),
    (r"CPU, [\d.]+ [kMGT]B per rank", "CPU, <memory> per rank"),
    (r"(verified|found it) \d+ (s|min) ago on [^\s,)]+", r"\1 <age> ago on <host>"),
    (r"receipts/[0-9a-f]{32}\.", "receipts/<bundle>."),
    (r"bundle id [0-9a-f]{64}", "bundle id <id>"),
    (r"bundle [0-9a-f]{12}\b", "bundle <id>"),
    (r"(<environment>|/\S*)/bin/python\S*", "<python>"),
)


def record(folder: Path) -> str:
    """The words of each command, and the questions to Slurm."""
    _fetch(folder)
    empty, calls = folder / "empty", folder / "calls"
    empty.mkdir()
    bodies = {name: f'echo {name} >>"{calls}"; {body}' for name, body in BODIES.items()}
    cluster = programs(folder / "bin", **bodies)
    told = [
        _told(folder, site, command, PATH=where)
        for site, where, command in (
            ("no Slurm", str(empty), f"runner check {' '.join(RUN)} --processes 2"),
            ("sound", str(empty), "stage verify bundle"),
            ("sound", str(empty), f"runner train {' '.join(RUN)} --processes 2 --dry-run"),
            ("Slurm", cluster, f"runner check {' '.join(RUN)}"),
        )
    ]
    questions = ["questions to Slurm\n", *_questions(folder, cluster, calls)]
    _damage(folder / "bundle")
    commands = ("stage verify bundle", "stage verify bundle --fast", "stage verify bundle -q")
    told += [_told(folder, "damaged", command, PATH=str(empty)) for command in commands]
    command = f"runner check {' '.join(RUN)} --processes 2"
    told.append(_told(folder, "damaged", command, PATH=str(empty)))
    return "\n".join([*told, "".join(questions)])


def _questions(folder: Path, cluster: str, calls: Path) -> Iterator[str]:
    """A line for each command: how often it asks each program."""
    run = " ".join(RUN)
    for command, variables in (
        (f"runner check {run}", BARE),
        (f"runner submit {run} --print", BARE),
        (f"runner submit {run}", BARE),
        ("runner status", BARE),
        ("runner status output/demo", BARE),
        ("runner logs output/demo", BARE),
        (f"runner train {run} --dry-run", BARE),
        (f"runner train {run} --dry-run", IN_A_JOB),
    ):
        calls.write_text("")
        code, out, err = _run(folder, command, PATH=cluster, **variables)
        assert "Traceback" not in out + err, err
        asked = Counter(calls.read_text().split())
        counts = ", ".join(f"{name} {asked[name]}" for name in sorted(asked)) or "none"
        yield f"  {command}{' (in a job)' * bool(variables)}: exit {code}; {counts}\n"


def _fetch(folder: Path) -> None:
    """The demo's bundle and run file."""
    shutil.copy(ROOT / "manifests/demo.yaml", folder)
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        options = ("--no-offline-check", "-q", "--endpoint", hub.endpoint)
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "AIRLIFT_STORE": "none"}
        done = run_as(("fetch", "demo.yaml", "-o", "bundle", *options), folder, environment)
    assert done.returncode == 0, done.stderr
    shutil.copy(ROOT / "runs/demo.yaml", folder)


def _damage(bundle: Path) -> None:
    """A changed file, a missing one, and one that nobody asked for."""
    vocabulary = bundle / "data/models/minilm/vocab.txt"
    vocabulary.write_bytes(vocabulary.read_bytes().replace(b"the", b"teh", 1))
    (bundle / "data/models/minilm/tokenizer.json").unlink()
    (bundle / "data/models/minilm/notes.txt").write_text("mine\n")


def _run(folder: Path, command: str, **variables: str) -> tuple[int, str, str]:
    """A command in this process, in that folder, with no other variables."""
    program, *arguments = command.split()
    main: click.Command = {"stage": stage, "runner": runner}[program]
    own = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "LANG": "C.UTF-8"}
    before = Path.cwd()
    with mock.patch.dict(os.environ, {**own, **variables}, clear=True):
        os.chdir(folder)
        try:
            done = CliRunner().invoke(main, arguments, prog_name=program)
        finally:
            os.chdir(before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def _told(folder: Path, where: str, command: str, **variables: str) -> str:
    """The command, its exit code, and what it says."""
    code, out, err = _run(folder, command, **variables)
    lines = [f"$ {command}    # {where}, exit {code}"]
    for name, text in (("", out), ("stderr: ", err)):
        lines += [f"{name}{line}".rstrip() for line in _general(text, folder).splitlines()]
    return "\n".join(lines) + "\n"


def _general(text: str, folder: Path) -> str:
    """The text without what belongs to this machine."""
    text = LEFT_OUT.sub("", text)
    for path, name in ((str(folder), "<folder>"), (sys.prefix, "<environment>")):
        text = text.replace(path, name)
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return text
