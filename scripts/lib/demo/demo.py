"""The whole road on one machine: from a Hub to a cluster without internet, and results back.

Called by scripts/demo inside the checkout's .venv. Where a Slurm and an sshd can be started (root
on Debian), it is `runner submit --to` and `runner pull`; else the same steps by hand, with rsync
and two ranks here. Everything is written below one folder:

    FOLDER/hub/       what the embedded Hub serves
    FOLDER/laptop/    manifest, run file, lock and bundle, as on a laptop; and the results
    FOLDER/cluster/   what travelled, and the run folder, as on a cluster

Each command is printed before it runs, as a user would type it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from scripts.lib.demo.repositories import DATASET, MODEL, make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub
from scripts.lib.site import control, home_of, lacking, running_site, ssh_to

ROOT = Path(__file__).resolve().parents[3]
MARKER = ".airlift-demo"
PARTS = ("hub", "laptop", "cluster")
SENTENCES = (
    "I do [MASK] know what you mean.",
    "I have [MASK] seen him before.",
)
SLURM = 'slurm: {nodes: 2, tasks_per_node: 1, time: "00:10:00"}\n'


class DemoError(Exception):
    """The demo cannot continue; the message gives the reason."""


@dataclass
class Shell:
    """Prints commands as a user would type them, runs them, and records how long each took."""

    times: list[tuple[str, float]] = field(default_factory=list)
    cwd: Path = ROOT
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(self, *command: str, cwd: Path, sandbox: tuple[str, ...] = ()) -> None:
        """Runs a command.

        Args:
            sandbox: a prefix that takes the network away, see `network_sandbox`.

        Raises:
            DemoError: it did not exit with 0.
        """
        print()
        if cwd != self.cwd:
            self.cwd = cwd
            print(f"$ cd {shlex.quote(str(cwd))}")
        print(f"$ {'offline ' if sandbox else ''}{shlex.join(command)}", flush=True)
        began = time.monotonic()
        foreign = ("HF_", "SLURM_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        environment["AIRLIFT_STORE"] = "none"  # the demo writes nothing outside its folder
        environment |= {"PATH": self.path, **self.settings}
        process = subprocess.Popen([*sandbox, *command], cwd=cwd, env=environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C reached it too; a run saves a checkpoint first
            raise
        name = " ".join(Path(word).name for word in command[:2])
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
    laptop = folder / "laptop"
    say("On the laptop: stage from a Hub")
    for name in ("manifests", "runs"):
        (laptop / name).mkdir()
        shutil.copy(ROOT / name / "demo.yaml", laptop / name)
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        print(f"embedded Hub at {hub.endpoint} (files from {hub.cdn_endpoint})")
        print(f"it serves {MODEL} and {DATASET}")
        fetch = ("stage", "fetch", "manifests/demo.yaml", "-o", "bundle")
        shell.run(*fetch, "--endpoint", hub.endpoint, cwd=laptop)
        answered = hub.log.find()
        sent = sum(exchange.sent for exchange in answered) / 1e6
        print(f"\nthe Hub answered {len(answered)} requests with {sent:.1f} MB; it is gone now")
    with ExitStack() as stack:
        lacks = lacking("sshd", "ssh", "ssh-keygen")
        if not lacks:
            say("A cluster starts here: Slurm, two nodes, a login node with sshd; no internet")
            try:
                site = stack.enter_context(running_site(expose=folder))
                print(f"it is in {site}, and ends with this demo")
                return by_one_command(folder, shell, site, stack.enter_context(ssh_to(site)))
            except subprocess.CalledProcessError as error:
                lacks = f"what that needs: {str(error.stderr).strip()}"
        say(f"By hand: for `--to`, the way to a real Slurm, this machine lacks {lacks}")
        return by_hand(folder, shell)


def by_one_command(folder: Path, shell: Shell, site: Path, keys: Path) -> dict[Path, str]:
    """The road of the README: submit, status, logs, pull."""
    laptop, cluster = folder / "laptop", folder / "cluster"
    owner = home_of(site).stat()
    os.chown(cluster, owner.st_uid, owner.st_gid)
    entry = {
        "host": "cluster",
        "folder": str(cluster),
        "setup": [f"export PATH={Path(sys.executable).parent}:$PATH", "export OMP_NUM_THREADS=1"],
    }
    clusters = yaml.safe_dump({"cluster": entry}, sort_keys=False, width=1000)
    (laptop / "runs/clusters.yaml").write_text(clusters)
    print(f"runs/clusters.yaml names it (`stage env probe --to` writes this file):\n\n{clusters}")
    with open(laptop / "runs/demo.yaml", "a") as run_file:
        run_file.write(SLURM)
    print(f"and the run file asks for its nodes:\n\n{SLURM}")
    print("A real environment would travel in the bundle; here the cluster uses this checkout's.")
    shell.settings |= {"PATH": f"{keys}/bin:{shell.path}", "XDG_RUNTIME_DIR": str(keys)}
    to = ("runs/demo.yaml", "--to", "cluster")
    shell.run("runner", "submit", *to, cwd=laptop)
    shell.run("runner", "status", "--to", "cluster", cwd=laptop)
    shell.run("runner", "logs", *to, "-f", cwd=laptop)
    shell.run("runner", "pull", *to, cwd=laptop)
    left = control(site, "leaks", check=False).stdout.count("\n")
    print(f"\npackets that tried to leave the cluster: {left}")
    results = laptop / "output" / "demo"
    fill_mask(results, shell, laptop)
    return {
        laptop / "bundle": "the bundle of stage",
        cluster: "what travelled, and the run folder with logs and checkpoints (its user's files)",
        results / "report.html": "what came back: curves of this run",
        results / "model": "the trained model: from_pretrained loads it",
    }


def by_hand(folder: Path, shell: Shell) -> dict[Path, str]:
    """The steps that `--to` walks, with rsync; the training on this machine, by two ranks."""
    cluster = folder / "cluster"
    shell.run("rsync", "-a", "--partial", "laptop/bundle", "laptop/runs", "cluster/", cwd=folder)
    sandbox, inputs = network_sandbox(), ("runs/demo.yaml", "--bundle", "bundle")
    shell.run("stage", "verify", "bundle", cwd=cluster, sandbox=sandbox)
    shell.run("runner", "prepare", *inputs, cwd=cluster, sandbox=sandbox)
    shell.run("runner", "train", *inputs, "--processes", "2", cwd=cluster, sandbox=sandbox)
    results = cluster / "output" / "demo"
    shell.run("runner", "report", "output/demo", cwd=cluster, sandbox=sandbox)
    fill_mask(results, shell, cluster, sandbox)
    return {
        folder / "laptop/bundle": "the bundle of stage",
        cluster / "bundle": "the same after the journey",
        results: "metrics.jsonl, report.html, tensorboard/, logs/, checkpoints/",
        results / "model": "the trained model: from_pretrained loads it",
    }


def fill_mask(results: Path, shell: Shell, cwd: Path, sandbox: tuple[str, ...] = ()) -> None:
    """The model fills in a word, with plain transformers."""
    script = str(ROOT / "scripts" / "lib" / "demo" / "fill_mask.py")
    shell.run("python", script, str(results / "model"), *SENTENCES, cwd=cwd, sandbox=sandbox)


def main() -> int:
    """Runs the steps in a folder, then prints the paths of the results; returns the exit code."""
    folder, shell = Path(sys.argv[1]).resolve(), Shell()
    try:
        prepare_folder(folder)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        results = travel(folder, shell)
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


if __name__ == "__main__":
    sys.exit(main())
