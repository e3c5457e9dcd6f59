"""`scripts/demo --environment`: a real environment, torch and deepspeed in it, arrives whole and trains on a cluster.

environment.yml -> lock -> bundle -> rsync -> `bootstrap.sh` as an ordinary user, without network, with an empty PATH ->
`runner submit` -> two nodes. The cluster is scripts/slurm-site; where that cannot run (it needs root), this machine
without its network, which is said.

    FOLDER/laptop/     channel, environment.yml, profile, lock and bundle
    FOLDER/cluster/    what came home from the cluster: the run folders
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

from scripts.lib.demo import ROOT, SENTENCES, DemoError, Shell, conduct, read_folder, say
from scripts.lib.demo_cluster import SITE, Cluster, cluster_of, follow_job
from scripts.lib.demo_repositories import make_repositories
from scripts.lib.environment_materials import MaterialError, Wheels, environment_yml, make_channel, pip_requirements
from scripts.lib.loopback_hub import LoopbackHub
from stage.digest import sha256_of_bytes
from stage.disk import human_size

ASSET = "train-env"
CACHE = ROOT / "output" / "scripts-demo-cache"
NODE_DISK = "/dev/shm"
"""The only disk that a node of the site has to itself. It is in memory."""

NEEDED = {"the demo's folder": 3 * 2**30, "/tmp, for the cluster": 5 * 2**30}
MEMORY_OF_RANKS = 3 * 2**30
STEPS, STEPS_NODE_LOCAL = 40, 6


@dataclass
class Shown:
    """What the demo set out to show, and whether it did."""

    lines: list[tuple[str, bool]] = field(default_factory=list)

    def that(self, text: str, holds: bool) -> None:
        self.lines.append((text, holds))

    def summary(self) -> str:
        return "\n".join(f"{'yes' if holds else 'NO '}  {text}" for text, holds in self.lines)


def travel(folder: Path, shell: Shell) -> dict[Path, str]:
    """Goes the whole road; returns what is worth a look.

    Raises:
        DemoError: a command failed, or what was to be shown did not hold.
    """
    check_room(folder)
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
    return {
        laptop / "bundle" / "data" / "envs" / ASSET: "what travelled: packages, image, bootstrap.sh",
        laptop / "conda-lock.yml": "the lock",
        folder / "cluster" / "output": "the runs: logs/, metrics.jsonl, environment.json, demo/model",
        CACHE: "wheels for the next run; delete it at will",
    }


def check_room(folder: Path) -> None:
    """Refuses to begin on a disk that will be full before the end.

    Raises:
        DemoError: with what is needed.
    """
    needed: dict[int, int] = {}
    for place, size in zip((folder, Path("/tmp")), NEEDED.values(), strict=True):
        device = place.stat().st_dev
        needed[device] = needed.get(device, 0) + size
        free = shutil.disk_usage(place).free
        if free < needed[device]:
            words = " and ".join(f"{human_size(size)} in {what}" for what, size in NEEDED.items())
            raise DemoError(f"{words} are needed, and {human_size(free)} are free at {place}")


def _probe(cluster: Cluster, laptop: Path, shell: Shell) -> None:
    """The profile, asked on a node of the cluster, as a person would before the first lock."""
    say("What does the cluster offer? Its own answer, on a compute node")
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
    (laptop / "demo.yaml").write_text(
        f"{manifest}  {ASSET}:\n    environment: environment.yml\n    profile: cluster.yml\n"
    )
    shell.run("cat", "environment.yml", cwd=laptop)
    shell.run("stage", "env", "lock", "environment.yml", "--profile", "cluster.yml", cwd=laptop)
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        shell.run("stage", "fetch", "demo.yaml", "-o", "bundle", "--endpoint", hub.endpoint, cwd=laptop)
    shell.run("stage", "show", "bundle", cwd=laptop)
    lock = json.loads((laptop / "bundle" / "stage.lock").read_text())
    return str(lock["assets"][ASSET]["environment"]["tree"])


def _carry(laptop: Path, cluster: Cluster, shell: Shell) -> None:
    say("Carry it over (Hub, channel and index are gone now)")
    owner = cluster.home.stat()
    (laptop / "run.yaml").write_text(run_file((ROOT / "runs" / "demo.yaml").read_text(), slurm=cluster.has_slurm))
    shutil.copy(ROOT / "scripts" / "lib" / "fill_mask.py", laptop)
    as_user = (f"--chown={owner.st_uid}:{owner.st_gid}",) if os.geteuid() == 0 else ()
    what = ("bundle", "run.yaml", "fill_mask.py")
    shell.run("rsync", "-a", "--partial", *as_user, *what, f"{cluster.home}/", cwd=laptop)


def run_file(text: str, *, slurm: bool) -> str:
    """The demo's run file for this road: fewer steps, the environment, and two nodes where there are any."""
    document: dict[str, Any] = yaml.safe_load(text)
    document |= {"steps": STEPS, "checkpoint": {"every": STEPS // 2, "keep": 2}}
    document["environment"] = {"asset": ASSET, "node_local": "auto"}
    if slurm:
        setup = ["export OMP_NUM_THREADS=1"]
        document["slurm"] = {"nodes": 2, "tasks_per_node": 1, "time": "00:30:00", "setup": setup}
    else:
        document["environment"]["node_local"] = False  # a node's own disk is for jobs
    return str(yaml.safe_dump(document, sort_keys=False))


def _create(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    """The environment, from sh alone; then everything else is done with what it brought."""
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
    shown.that(
        f"every file of it is the one that was locked: tree {made[:16]} in stage.lock and at {cluster.prefix}",
        made == tree,
    )


def _train_on_slurm(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    say("Train on two nodes, in that environment")
    log, run = _job(cluster, shell, "demo")
    shown.that(
        f"two ranks trained {STEPS} steps under Slurm from {cluster.prefix} (node_local: auto)", _ended(run, STEPS)
    )
    shown.that(
        "the run says which environment it ran in", run_tree(run) == tree and f"{cluster.prefix} for all ranks" in log
    )
    _train_node_local(cluster, shell, shown, tree)
    leaks = subprocess.run([str(SITE), "leaks"], env={**os.environ, **shell.settings}, capture_output=True, text=True)
    print(f"\n$ scripts/slurm-site leaks\n{leaks.stdout}", end="")
    shown.that("nothing in the cluster tried to reach anything outside", leaks.returncode == 0 and not leaks.stdout)


def _train_node_local(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    size = sum(path.lstat().st_size for path in cluster.prefix.rglob("*") if path.is_file())
    needed, free = 2 * size + MEMORY_OF_RANKS, _available_memory()
    if free < needed:
        say(
            f"SKIPPED: each node's own disk. It is in memory here: {human_size(needed)} needed, {human_size(free)} free"
        )
        return
    say("Once more, from each node's own disk")
    sets = {
        "environment.node_local": "true",
        "steps": str(STEPS_NODE_LOCAL),
        "slurm.setup": f'["export OMP_NUM_THREADS=1 AIRLIFT_NODE_ROOT={NODE_DISK}"]',
    }
    log, run = _job(cluster, shell, "node-local", sets)
    unpacked = len(re.findall(rf"^node-local: n[12]: unpacked \d+ files to {NODE_DISK}/", log, re.MULTILINE))
    shown.that(
        "each of two nodes unpacked it to its own disk, and the ranks ran from there",
        unpacked == 2 and _ended(run, STEPS_NODE_LOCAL) and run_tree(run) == tree,
    )


def _available_memory() -> int:
    """Bytes that this machine could give to programs."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _job(cluster: Cluster, shell: Shell, name: str, sets: Mapping[str, str] | None = None) -> tuple[str, Path]:
    """Submits, follows the log until the job has ended; returns log and run folder.

    Raises:
        DemoError: it did not complete.
    """
    words = ["runner", "submit", "run.yaml", "--bundle", "bundle", "--output", f"output/{name}"]
    for key, value in (sets or {}).items():
        words += ["--set", f"{key}={value}"]
    answer = cluster.home / "submitted.txt"
    cluster.run_inside(shell, shlex.join(words), answer)
    print(answer.read_text(), end="")
    match = re.search(r"\bjob (\d+)|^(\d+)$", answer.read_text(), re.MULTILINE)
    if match is None:
        raise DemoError("runner submit named no job")
    run = cluster.home / "output" / name
    return follow_job(cluster, shell, match[1] or match[2], run / "logs"), run


def _train_here(cluster: Cluster, shell: Shell, shown: Shown, tree: str) -> None:
    say("Train, two processes on this machine, in that environment")
    cluster.run_inside(shell, "runner train run.yaml --bundle bundle --output output/demo --processes 2")
    run = cluster.home / "output" / "demo"
    shown.that(f"two ranks trained {STEPS} steps in it, with nothing but loopback", _ended(run, STEPS))
    shown.that("the run says which environment it ran in", run_tree(run) == tree)


def _ask(cluster: Cluster, shell: Shell) -> None:
    say("Ask the trained model, with the same environment's python")
    cluster.run_inside(shell, shlex.join(["python", "fill_mask.py", "output/demo/model", *SENTENCES]))


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
    sys.exit(conduct(read_folder("scripts/demo --environment", __doc__, "scripts-demo-environment"), travel))
