"""All steps on one machine: Hub -> bundle -> rsync -> verify -> prepare -> train -> model.

Called by scripts/demo inside the checkout's .venv. Everything is written below one folder:

    FOLDER/hub/       what the embedded Hub serves
    FOLDER/laptop/    manifest, lock and bundle, as on a laptop
    FOLDER/cluster/   the bundle after rsync, run file and run folder, as on a cluster without
    internet

Each command is printed before it runs, as a user would type it.
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

from scripts.lib.demo.repositories import DATASET, MODEL, make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub

ROOT = Path(__file__).resolve().parents[3]
MARKER = ".airlift-demo"
PARTS = ("hub", "laptop", "cluster")
SENTENCES = (
    "I do [MASK] know what you mean.",
    "I have [MASK] seen him before.",
)


class DemoError(Exception):
    """The demo cannot continue; the message gives the reason."""


@dataclass
class Shell:
    """Prints commands as a user would type them, runs them, and records how long each took."""

    times: list[tuple[str, float]] = field(default_factory=list)
    cwd: Path = ROOT
    settings: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        *command: str,
        cwd: Path,
        sandbox: tuple[str, ...] = (),
        sandbox_name: str = "offline",
        shown: str | None = None,
        output: Path | None = None,
    ) -> None:
        """Runs a command.

        Args:
            sandbox: a prefix that takes the network away, see `network_sandbox`.
            sandbox_name: the short name of `sandbox` for the printed command.
            shown: the printed command, if it is not `command`.
            output: a file for the command's stdout.

        Raises:
            DemoError: it did not exit with 0.
        """
        print()
        if cwd != self.cwd:
            self.cwd = cwd
            print(f"$ cd {shlex.quote(str(cwd))}")
        to = f" > {shlex.quote(output.name)}" if output else ""
        line = shown or shlex.join(command)
        print(f"$ {f'{sandbox_name} ' if sandbox else ''}{line}{to}", flush=True)
        began = time.monotonic()
        foreign = ("HF_", "SLURM_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        environment["AIRLIFT_STORE"] = "none"  # the demo writes nothing outside its folder
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment |= self.settings
        full = [*sandbox, *command]
        with open(output, "wb") if output else nullcontext() as sink:
            process = subprocess.Popen(full, cwd=cwd, env=environment, stdout=sink)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.wait()  # Ctrl-C reached it too; a run saves a checkpoint first
                raise
        name = " ".join(line.rpartition("&& ")[2].split()[:2])
        self.times.append((name, time.monotonic() - began))
        if code != 0:
            raise DemoError(f"`{shlex.join(command)}` ended with {code} (in {cwd})")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def prepare_folder(folder: Path) -> None:
    """Makes the folder, or empties that of an earlier demo.

    Raises:
        DemoError: it has other files.
    """
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file. Name another folder: scripts/demo FOLDER")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise DemoError(
            f"{folder} is not empty and not a demo's: left alone. Name another folder: "
            "scripts/demo FOLDER"
        )
    if (folder / MARKER).is_file():
        print(f"what the last demo made in {folder} is removed (to keep it: scripts/demo FOLDER)")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("scripts/demo empties hub/, laptop/ and cluster/ when it runs.\n")
    for part in PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir()


def network_sandbox() -> tuple[str, ...]:
    """A prefix that runs a command with loopback only, printed; empty where none is possible."""
    for flags, who in (("-n", "as root"), ("-rn", "as an ordinary user")):
        enter = ("unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
        try:
            done = subprocess.run([*enter, "true"], capture_output=True)
        except FileNotFoundError:
            break
        if done.returncode == 0:
            say(f"On the cluster, in a network namespace, {who}: only loopback exists there")
            print(f'\n$ offline() {{ {shlex.join(enter)} "$@"; }}')
            return enter
    say(
        "On the cluster, WITH the network: unshare (util-linux) or ip (iproute2) is missing or not "
        "allowed"
    )
    return ()


def travel(folder: Path, shell: Shell) -> dict[Path, str]:
    """Runs all steps; returns interesting paths, each with a description."""
    laptop, cluster = folder / "laptop", folder / "cluster"
    say("On the laptop: stage from a Hub")
    for name, target in (("manifests", laptop), ("runs", cluster)):
        shutil.copy(ROOT / name / "demo.yaml", target / "demo.yaml")
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        print(f"embedded Hub at {hub.endpoint} (files from {hub.cdn_endpoint})")
        print(f"it serves {MODEL} and {DATASET}")
        fetch = ("stage", "fetch", "demo.yaml", "-o", "bundle")
        shell.run(*fetch, "--endpoint", hub.endpoint, cwd=laptop)
        answered = hub.log.find()
        sent = sum(exchange.sent for exchange in answered) / 1e6
        print(f"\nthe Hub answered {len(answered)} requests with {sent:.1f} MB")
    shell.run("stage", "show", "bundle", cwd=laptop)

    say("Carry it over (the Hub is gone now)")
    shell.run("rsync", "-a", "--partial", "laptop/bundle/", "cluster/bundle/", cwd=folder)

    sandbox, inputs = network_sandbox(), ("demo.yaml", "--bundle", "bundle")
    shell.run("stage", "verify", "bundle", cwd=cluster, sandbox=sandbox)
    shell.run("runner", "prepare", *inputs, cwd=cluster, sandbox=sandbox)
    shell.run("runner", "train", *inputs, "--processes", "2", cwd=cluster, sandbox=sandbox)
    name = str(yaml.safe_load((cluster / "demo.yaml").read_text())["name"])
    run_folder = cluster / "output" / name
    script = str(ROOT / "scripts" / "lib" / "demo" / "fill_mask.py")
    model = str(run_folder / "model")
    shell.run("python", script, model, *SENTENCES, cwd=cluster, sandbox=sandbox)
    return {
        laptop / "bundle": "the bundle of stage, beside its manifest and lock",
        cluster / "bundle": "the same after the journey",
        run_folder: "metrics.jsonl, tensorboard/, logs/, checkpoints/",
        run_folder / "model": "the trained model: from_pretrained loads it",
    }


def conduct(folder: Path, road: Callable[[Path, Shell], dict[Path, str]]) -> int:
    """Runs the steps of a demo in a folder, then prints the paths of its results.

    Args:
        road: runs the steps; returns interesting paths, each with a description.

    Returns:
        the exit code.
    """
    shell = Shell()
    try:
        prepare_folder(folder)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        results = road(folder, shell)
    except DemoError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "scripts/demo starts again from the beginning, and removes it"
        print(f"\ninterrupted; what was made is in {folder}; {again}", file=sys.stderr)
        return 130
    say("The results")
    for path, description in results.items():
        print(f"{path}\n    {description}")
    print("\n" + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in shell.times))
    print(f"next: . {ROOT}/.venv/bin/activate    (for `stage` and `runner`), then the README")
    return 0


def read_folder(prog: str, description: str | None, default: str) -> Path:
    """The one argument of a demo: its folder."""
    parser = argparse.ArgumentParser(prog=prog, description=(description or "").partition("\n")[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=ROOT / "output" / default, metavar="FOLDER"
    )
    folder: Path = parser.parse_args().folder
    return folder.resolve()


def main() -> int:
    return conduct(read_folder("scripts/demo", __doc__, "scripts-demo"), travel)


if __name__ == "__main__":
    sys.exit(main())
