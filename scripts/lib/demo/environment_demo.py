"""`scripts/demo --environment`: an environment with torch travels to a cluster and trains.

environment.yml -> lock -> bundle -> rsync -> `bootstrap.sh` as an ordinary user, without network,
with an empty PATH -> `runner submit` -> two nodes. The cluster is scripts/slurm-site; where that
cannot run (it needs root), it is this machine without its network, and that is printed.

    FOLDER/laptop/     channel, environment.yml, profile, lock and bundle
    FOLDER/cluster/    the run folders, copied back from the cluster
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.lib.demo.cluster import SITE, Cluster, cluster_of, follow_job
from scripts.lib.demo.demo import ROOT, SENTENCES, DemoError, Shell, conduct, read_folder, say
from scripts.lib.demo.environment_materials import (
    MaterialError,
    Wheels,
    environment_yml,
    make_channel,
    pip_requirements,
)
from scripts.lib.demo.repositories import make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.digests import sha256_of_bytes
from stage.files import human_size

ASSET = "train-env"
CACHE = ROOT / "output" / "scripts-demo-cache"
NODE_DISK = "/dev/shm"
"""The only local disk of a node of the site. It is in memory."""

NEEDED = {"the demo's folder": 3 * 2**30, "/tmp, for the cluster": 5 * 2**30}
MEMORY_OF_RANKS = 3 * 2**30
STEPS, STEPS_NODE_LOCAL = 40, 6


@dataclass
class Shown:
    """The claims of the demo, and whether each holds."""

    lines: list[tuple[str, bool]] = field(default_factory=list)

    def that(self, text: str, holds: bool) -> None:
        self.lines.append((text, holds))

    def summary(self) -> str:
        return "\n".join(f"{'yes' if holds else 'NO '}  {text}" for text, holds in self.lines)


def travel(folder: Path, shell: Shell) -> dict[Path, str]:
    """Runs all steps; returns interesting paths, each with a description.

    Raises:
        DemoError: a command failed, or a claim does not hold.
    """
    check_space(folder)
    laptop, shown = folder / "laptop", Shown()
    with cluster_of(folder, shell) as cluster:
        _probe(cluster, laptop, shell)
        tree = _pack(folder, shell)
        _carry(laptop, cluster, shell)
        _create(cluster, shell, shown, tree)
        if cluster.has_slurm:
            _train_on_slurm(cluster, shell, shown, tree)
        else:
            _train_here(cluster, shell, shown, tree)
        _ask(cluster, shell)
        _bring_home(cluster, folder, shell)
    say("What this showed")
    print(shown.summary())
    if not all(holds for _, holds in shown.lines):
        raise DemoError("not everything held")
    asset, runs = laptop / "bundle" / "data" / "envs" / ASSET, folder / "cluster" / "output"
    return {
        asset: "the asset: image, bootstrap.sh",
        laptop / "conda-lock.yml": "the lock",
        runs: "the runs: logs/, metrics.jsonl, environment.json, demo/model",
        CACHE: "wheels for the next run; you may delete it",
    }


def check_space(folder: Path) -> None:
    """Checks that the disks have enough space.

    Raises:
        DemoError: with the space that is needed.
    """
    needed: dict[int, int] = {}
    for path, size in zip((folder, Path("/tmp")), NEEDED.values(), strict=True):
        device = path.stat().st_dev
        needed[device] = needed.get(device, 0) + size
        free = shutil.disk_usage(path).free
        if free < needed[device]:
            sizes = " and ".join(f"{human_size(size)} in {what}" for what, size in NEEDED.items())
            raise DemoError(f"{sizes} are needed, and {human_size(free)} are free at {path}")


def _probe(cluster: Cluster, laptop: Path, shell: Shell) -> None:
    """Writes the profile on a node of the cluster, as a user does before the first lock."""
    say("The profile of the cluster, written on a compute node")
    script = cluster.home / "env-probe.sh"
    shell.run("stage", "env", "probe", "--script", cwd=laptop, output=script)
    script.chmod(0o644)
    node = ("srun",) if cluster.has_slurm else ()
    profile = laptop / "cluster.yml"
    cluster.run(shell, *node, "sh", "env-probe.sh", output=profile)
    print(profile.read_text(), end="")


def _pack(folder: Path, shell: Shell) -> str:
    """On the laptop: materials -> lock -> bundle. Returns the environment's tree digest."""
    laptop = folder / "laptop"
    say("On the laptop: Python from a conda channel, torch and deepspeed from PyPI")
    wanted, wheels = pip_requirements(), Wheels(CACHE / "wheels")
    try:
        wheels.fill(wanted, lambda *command: shell.run(*command, cwd=ROOT), print)
        channel = make_channel(laptop / "channel", print)
    except MaterialError as error:
        raise DemoError(str(error)) from None
    (laptop / "environment.yml").write_text(environment_yml(channel, wheels.folder, wanted))
    manifest = (ROOT / "manifests" / "demo.yaml").read_text()
    entry = f"  {ASSET}:\n    environment: environment.yml\n    profile: cluster.yml\n"
    (laptop / "demo.yaml").write_text(f"{manifest}{entry}")
    shell.run("cat", "environment.yml", cwd=laptop)
    shell.run("stage", "env", "lock", "environment.yml", "--profile", "cluster.yml", cwd=laptop)
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        fetch = ("stage", "fetch", "demo.yaml", "-o", "bundle")
        shell.run(*fetch, "--endpoint", hub.endpoint, cwd=laptop)
    shell.run("stage", "show", "bundle", cwd=laptop)
    lock = json.loads((laptop / "bundle" / "stage.lock").read_text())
    return str(lock["assets"][ASSET]["environment"]["tree"])


def _carry(laptop: Path, cluster: Cluster, shell: Shell) -> None:
    say("Carry it over (Hub, channel and index are gone now)")
    owner = cluster.home.stat()
    text = (ROOT / "runs" / "demo.yaml").read_text()
    (laptop / "run.yaml").write_text(run_file(text, slurm=cluster.has_slurm))
    shutil.copy(ROOT / "scripts" / "lib" / "demo" / "fill_mask.py", laptop)
    as_user = (f"--chown={owner.st_uid}:{owner.st_gid}",) if os.geteuid() == 0 else ()
    what = ("bundle", "run.yaml", "fill_mask.py")
    shell.run("rsync", "-a", "--partial", *as_user, *what, f"{cluster.home}/", cwd=laptop)


def run_file(text: str, *, slurm: bool) -> str:
    """The demo's run file with fewer steps, the environment, and two nodes on a cluster."""
    document: dict[str, Any] = yaml.safe_load(text)
    document |= {"steps": STEPS, "checkpoint": {"every": STEPS // 2, "keep": 2}}
    document["environment"] = {"asset": ASSET, "node_local": "auto"}
    if slurm:
        setup = ["export OMP_NUM_THREADS=1"]
        document["slurm"] = {"nodes": 2, "tasks_per_node": 1, "time": "00:30:00", "setup": setup}
    else:
        document["environment"]["node_local"] = False  # only jobs use a node's local disk
    return str(yaml.safe_dump(document, sort_keys=False))


def _create(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    """Creates the environment with sh only; all further commands are from the environment."""
    say("On the cluster: an ordinary user, no network at all, an empty PATH")
    isolated = shlex.join([*cluster.isolated, "/usr/bin/env", "-i", "PATH=", "/bin/sh", "-c"])
    print(f'\n$ isolated() {{ {isolated} "$1"; }}')
    cluster.run(shell, "mkdir", "-p", "envs")
    script = f"/bin/sh bundle/data/envs/{ASSET}/bootstrap.sh"
    cluster.run_bare(shell, f"{script} --check {cluster.prefix}")
    cluster.run_bare(shell, f"{script} {cluster.prefix}")
    cluster.run_bare(shell, ". envs/train/activate && stage verify bundle")
    owner = cluster.prefix.stat().st_uid
    if cluster.has_slurm:
        shown.that(f"the environment was made by user {owner}, not by root", owner != 0)
    made = sha256_of_bytes((cluster.prefix / ".airlift" / "tree.txt").read_bytes())
    both = f"tree {made[:16]} in stage.lock and at {cluster.prefix}"
    shown.that(f"each of its files is the one that was locked: {both}", made == tree)


def _train_on_slurm(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    say("Train on two nodes, in that environment")
    log, run = _job(cluster, shell, "demo")
    shown.that(
        f"two ranks trained {STEPS} steps under Slurm from {cluster.prefix} (node_local: auto)",
        _ended(run, STEPS),
    )
    is_recorded = run_tree(run) == tree and f"{cluster.prefix} for all ranks" in log
    shown.that("the run records its environment", is_recorded)
    _train_node_local(cluster, shell, shown, tree)
    environment = {**os.environ, **shell.settings}
    command = [str(SITE), "leaks"]
    leaks = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(f"\n$ scripts/slurm-site leaks\n{leaks.stdout}", end="")
    is_tight = leaks.returncode == 0 and not leaks.stdout
    shown.that("no process of the cluster tried to reach the network outside", is_tight)


def _train_node_local(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    size = sum(path.lstat().st_size for path in cluster.prefix.rglob("*") if path.is_file())
    needed, free = 2 * size + MEMORY_OF_RANKS, _available_memory()
    if free < needed:
        space = f"{human_size(needed)} needed, {human_size(free)} free"
        say(f"SKIPPED: each node's local disk. It is in memory here: {space}")
        return
    say("Once more, from each node's local disk")
    sets = {
        "environment.node_local": "true",
        "steps": str(STEPS_NODE_LOCAL),
        "slurm.setup": f'["export OMP_NUM_THREADS=1 AIRLIFT_NODE_ROOT={NODE_DISK}"]',
    }
    log, run = _job(cluster, shell, "node-local", sets)
    line = rf"^node-local: n[12]: unpacked \d+ files to {NODE_DISK}/"
    unpacked = len(re.findall(line, log, re.MULTILINE))
    shown.that(
        "each of two nodes unpacked it to its local disk, and the ranks ran from there",
        unpacked == 2 and _ended(run, STEPS_NODE_LOCAL) and run_tree(run) == tree,
    )


def _available_memory() -> int:
    """Bytes that programs could get on this machine."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _job(
    cluster: Cluster, shell: Shell, name: str, sets: Mapping[str, str] | None = None
) -> tuple[str, Path]:
    """Submits a job, follows its log until it ends; returns log and run folder.

    Raises:
        DemoError: it did not complete.
    """
    command = ["runner", "submit", "run.yaml", "--bundle", "bundle", "--output", f"output/{name}"]
    for key, value in (sets or {}).items():
        command += ["--set", f"{key}={value}"]
    answer = cluster.home / "submitted.txt"
    cluster.run_inside(shell, shlex.join(command), answer)
    print(answer.read_text(), end="")
    match = re.search(r"\bjob (\d+)|^(\d+)$", answer.read_text(), re.MULTILINE)
    if match is None:
        raise DemoError("runner submit named no job")
    run = cluster.home / "output" / name
    return follow_job(cluster, shell, match[1] or match[2], run / "logs"), run


def _train_here(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    say("Train, two processes on this machine, in that environment")
    command = "runner train run.yaml --bundle bundle --output output/demo --processes 2"
    cluster.run_inside(shell, command)
    run = cluster.home / "output" / "demo"
    shown.that(f"two ranks trained {STEPS} steps in it, with loopback only", _ended(run, STEPS))
    shown.that("the run records its environment", run_tree(run) == tree)


def _ask(cluster: Cluster, shell: Shell) -> None:
    say("Ask the trained model, with the same environment's python")
    command = ["python", "fill_mask.py", "output/demo/model", *SENTENCES]
    cluster.run_inside(shell, shlex.join(command))


def _bring_home(cluster: Cluster, folder: Path, shell: Shell) -> None:
    if cluster.has_slurm:
        say("Bring the results home, before the cluster goes")
        shell.run("rsync", "-a", f"{cluster.home}/output", "cluster/", cwd=folder)


def _ended(run: Path, steps: int) -> bool:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return bool(max(line["step"] for line in lines if "loss" in line) == steps)


def run_tree(run: Path) -> str:
    """The tree digest in a run folder's `environment.json`."""
    facts = json.loads((run / "environment.json").read_text())
    return str(facts["environment_tree"])


if __name__ == "__main__":
    FOLDER = read_folder("scripts/demo --environment", __doc__, "scripts-demo-environment")
    sys.exit(conduct(FOLDER, travel))
