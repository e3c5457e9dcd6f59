"""The whole road on one machine: Hub -> bundle -> rsync -> verify -> prepare -> train -> a model that answers.

Called by scripts/demo inside the checkout's .venv. Everything is written below one folder:

    FOLDER/hub/       what the embedded Hub serves
    FOLDER/laptop/    manifest, lock and bundle, as on a laptop
    FOLDER/cluster/   the bundle after rsync, the run file and the run folder, as on a cluster without internet

Each command is printed before it runs, as a person would type it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from scripts.lib.demo_repositories import DATASET, MODEL, make_repositories
from scripts.lib.loopback_hub import LoopbackHub

ROOT = Path(__file__).resolve().parents[2]
MARKER = ".airlift-demo"
PARTS = ("hub", "laptop", "cluster")
SENTENCES = (
    "The value of [MASK] expression is returned.",
    "If the name is not found, an exception [MASK] raised.",
)


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Shell:
    """Prints commands as a person would type them, runs them, and remembers how long each took."""

    times: list[tuple[str, float]] = field(default_factory=list)
    cwd: Path = ROOT
    settings: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        *command: str,
        cwd: Path,
        wall: tuple[str, ...] = (),
        wall_name: str = "offline",
        shown: str | None = None,
        output: Path | None = None,
    ) -> None:
        """Runs a command, behind a `wall` (see `network_wall`) that takes the network away if one is given.

        Args:
            wall_name: what stands for the wall where the command is printed.
            shown: the command as a person would type it, where that is not `command` itself.
            output: a file that takes what the command prints to stdout.

        Raises:
            DemoError: it did not exit with 0.
        """
        print()
        if cwd != self.cwd:
            self.cwd = cwd
            print(f"$ cd {shlex.quote(str(cwd))}")
        to = f" > {shlex.quote(output.name)}" if output else ""
        print(f"$ {f'{wall_name} ' if wall else ''}{shown or shlex.join(command)}{to}", flush=True)
        began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLURM_"))}
        environment["AIRLIFT_STORE"] = "none"  # the demo leaves nothing outside its folder
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment |= self.settings
        with open(output, "wb") if output else nullcontext() as sink:
            code = subprocess.run([*wall, *command], cwd=cwd, env=environment, stdout=sink).returncode
        name = " ".join((shown or shlex.join(command)).rpartition("&& ")[2].split()[:2])
        self.times.append((name, time.monotonic() - began))
        if code != 0:
            raise DemoError(f"`{shlex.join(command)}` ended with {code} (in {cwd})")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def prepare_folder(folder: Path) -> None:
    """Makes the folder, or empties what an earlier demo left in it.

    Raises:
        DemoError: it holds something that is not a demo's.
    """
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file. Name another folder: scripts/demo FOLDER")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise DemoError(f"{folder} is not empty and not a demo's: left alone. Name another folder: scripts/demo FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("scripts/demo writes here and empties hub/, laptop/ and cluster/ when run again.\n")
    for part in PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir()


def network_wall() -> tuple[str, ...]:
    """A prefix that runs a command where only loopback exists; says what it is, or that there is none."""
    for flags, who in (("-n", "as root"), ("-rn", "as an ordinary user")):
        enter = ("unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
        try:
            done = subprocess.run([*enter, "true"], capture_output=True)
        except FileNotFoundError:
            break
        if done.returncode == 0:
            say(f"On the cluster, in a network namespace of its own, {who}: nothing but loopback exists there")
            print(f'\n$ offline() {{ {shlex.join(enter)} "$@"; }}')
            return enter
    say("On the cluster, WITH the network in reach: unshare (util-linux) or ip (iproute2) is missing or not allowed")
    return ()


def travel(folder: Path, shell: Shell) -> dict[Path, str]:
    """Goes the whole road; returns what is worth a look."""
    laptop, cluster = folder / "laptop", folder / "cluster"
    say("On the laptop: stage from a Hub")
    for name, place in (("manifests", laptop), ("runs", cluster)):
        shutil.copy(ROOT / name / "demo.yaml", place / "demo.yaml")
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        print(f"embedded Hub at {hub.endpoint} (files from {hub.cdn_endpoint}), serving {MODEL} and {DATASET}")
        shell.run("stage", "fetch", "demo.yaml", "-o", "bundle", "--endpoint", hub.endpoint, cwd=laptop)
        answered = hub.log.find()
        print(f"\nthe Hub answered {len(answered)} requests with {sum(e.sent for e in answered) / 1e6:.1f} MB")
    shell.run("stage", "show", "bundle", cwd=laptop)

    say("Carry it over (the Hub is gone now)")
    shell.run("rsync", "-a", "--partial", "laptop/bundle/", "cluster/bundle/", cwd=folder)

    wall = network_wall()
    shell.run("stage", "verify", "bundle", cwd=cluster, wall=wall)
    shell.run("runner", "prepare", "demo.yaml", "--bundle", "bundle", cwd=cluster, wall=wall)
    shell.run("runner", "train", "demo.yaml", "--bundle", "bundle", "--processes", "2", cwd=cluster, wall=wall)
    run_folder = cluster / "output" / str(yaml.safe_load((cluster / "demo.yaml").read_text())["name"])
    script = str(ROOT / "scripts" / "lib" / "fill_mask.py")
    shell.run("python", script, str(run_folder / "model"), *SENTENCES, cwd=cluster, wall=wall)
    return {
        laptop / "bundle": "what stage made, beside its manifest and lock",
        cluster / "bundle": "the same after the journey",
        run_folder: "metrics.jsonl, tensorboard/, logs/, checkpoints/",
        run_folder / "model": "the trained model: from_pretrained loads it",
    }


def conduct(folder: Path, road: Callable[[Path, Shell], dict[Path, str]]) -> int:
    """Goes a road in a folder of its own, then says where everything lies; returns the exit code.

    Args:
        road: what to do; returns what is worth a look, path -> in words.
    """
    shell = Shell()
    try:
        prepare_folder(folder)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        places = road(folder, shell)
    except DemoError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    say("Where everything lies")
    for path, what in places.items():
        print(f"{path}\n    {what}")
    print("\n" + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in shell.times))
    return 0


def read_folder(prog: str, description: str | None, default: str) -> Path:
    """The one argument of a demo: its folder."""
    parser = argparse.ArgumentParser(prog=prog, description=(description or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "output" / default, metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    return folder.resolve()


def main() -> int:
    return conduct(read_folder("scripts/demo", __doc__, "scripts-demo"), travel)


if __name__ == "__main__":
    sys.exit(main())
