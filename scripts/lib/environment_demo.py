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
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.lib.demo import ROOT, SENTENCES, DemoError, Shell, conduct, network_wall, read_folder, say
from scripts.lib.demo_repositories import make_repositories
from scripts.lib.environment_materials import MaterialError, Wheels, environment_yml, make_channel, pip_requirements
from scripts.lib.loopback_hub import LoopbackHub
from stage.digest import sha256_of_bytes
from stage.disk import human_size

ASSET, USER = "train-env", "alice"
CACHE = ROOT / "output" / "scripts-demo-cache"
SITE = ROOT / "scripts" / "slurm-site"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv", "pgrep")
NODE_DISK = "/dev/shm"
"""The only disk that a node of the site has to itself."""

NEEDED = {"the demo's folder": 3 * 2**30, "/tmp, for the cluster": 4 * 2**30}
STEPS, STEPS_NODE_LOCAL = 40, 6
JOB_S = 1800.0


@dataclass(frozen=True)
class Cluster:
    """Where the bundle arrives.

    Attributes:
        home: the user's folder there.
        user: prefix of a command that this user runs.
        isolated: the same, where there is no network, not even loopback.
        has_slurm: whether `sbatch` is there.
    """

    home: Path
    user: tuple[str, ...]
    isolated: tuple[str, ...]
    has_slurm: bool

    @property
    def prefix(self) -> Path:
        """Where the environment is made."""
        return self.home / "envs" / "train"


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
    with _cluster(folder, shell) as cluster:
        _probe(cluster, laptop, shell)
        tree = _pack(folder, shell)
        _carry(laptop, cluster, shell)
        _create(cluster, shell, shown, tree)
        if cluster.has_slurm:
            _train_on_slurm(cluster, shell, shown, tree)
        else:
            _train_here(cluster, shell)
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


@contextmanager
def _cluster(folder: Path, shell: Shell) -> Iterator[Cluster]:
    """A Slurm site, or why there is none and this machine without its network."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if os.geteuid() != 0 or missing:
        why = f"{', '.join(missing)} not found" if missing else "only root can make one"
        say(f"No cluster ({why}): SKIPPED are Slurm, several nodes and their own disks; the rest goes on here")
        yield _this_machine(folder)
        return
    say("A cluster on this machine: real Slurm, a login node, two compute nodes, no way out")
    site = Path(tempfile.mkdtemp(prefix="airlift-site-", dir="/tmp"))  # short: it holds sockets
    shell.settings["SLURM_SITE"] = str(site)
    print(f"$ export SLURM_SITE={site}")
    # Nothing of this machine's Python is exposed: all that the user runs there is what the bundle brought.
    try:
        shell.run(str(SITE), "up", "--nodes", "2", "--cpus", "2", "--user", USER, cwd=folder)
        yield _on_site(site)
    finally:
        shell.run(str(SITE), "down", cwd=folder)
        shutil.rmtree(site, ignore_errors=True)


def _on_site(site: Path) -> Cluster:
    home = site / "home" / USER
    owner = home.stat()
    as_user = ("setpriv", f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups")
    return Cluster(
        home=home,
        user=(str(SITE), "exec", "-u", USER),
        isolated=(str(SITE), "exec", "unshare", "-n", *as_user),
        has_slurm=True,
    )


def _this_machine(folder: Path) -> Cluster:
    wall = network_wall()
    alone = ("unshare", "-n" if os.geteuid() == 0 else "-rn") if wall else ()
    return Cluster(home=folder / "cluster", user=wall, isolated=alone, has_slurm=False)


def _probe(cluster: Cluster, laptop: Path, shell: Shell) -> None:
    """The profile, asked on a node of the cluster, as a person would before the first lock."""
    say("What does the cluster offer? Its own answer, on a compute node")
    script = cluster.home / "env-probe.sh"
    shell.run("stage", "env", "probe", "--script", cwd=laptop, output=script)
    script.chmod(0o644)
    node = ("srun",) if cluster.has_slurm else ()
    profile = laptop / "cluster.yml"
    _as_user(cluster, shell, *node, "sh", "env-probe.sh", output=profile)
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
    print(f'\n$ isolated() {{ {shlex.join(cluster.isolated)} /usr/bin/env -i PATH= "$@"; }}')
    _as_user(cluster, shell, "mkdir", "-p", "envs")
    bare = (*cluster.isolated, "/usr/bin/env", "-i", "PATH=")
    script = f"bundle/data/envs/{ASSET}/bootstrap.sh"
    for option in ((), ("--check",))[::-1]:
        command = ("/bin/sh", script, *option, str(cluster.prefix))
        shell.run(*command, cwd=cluster.home, wall=bare, wall_name="isolated")
    shell.run(
        "/bin/sh", "-c", ". envs/train/activate && stage verify bundle",
        cwd=cluster.home, wall=bare, wall_name="isolated",
    )  # fmt: skip
    owner = cluster.prefix.stat().st_uid
    shown.that(f"the environment was made by user {owner}, not by root", owner != 0 or not cluster.has_slurm)
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
    say("Once more, from each node's own disk")
    sets = {
        "environment.node_local": "true",
        "steps": str(STEPS_NODE_LOCAL),
        "slurm.setup": f'["export OMP_NUM_THREADS=1 AIRLIFT_NODE_ROOT={NODE_DISK}"]',
    }
    log, run = _job(cluster, shell, "node-local", sets)
    unpacked = len(re.findall(rf"^node-local: n[12]: unpacked \d+ files to {NODE_DISK}/", log, re.MULTILINE))
    shown.that("each of two nodes unpacked it to its own disk, and the ranks ran from there",
               unpacked == 2 and _ended(run, STEPS_NODE_LOCAL) and run_tree(run) == tree)  # fmt: skip
    leaks = subprocess.run([str(SITE), "leaks"], env={**os.environ, **shell.settings}, capture_output=True, text=True)
    print(f"\n$ scripts/slurm-site leaks\n{leaks.stdout}", end="")
    shown.that("nothing in the cluster tried to reach anything outside", leaks.returncode == 0 and not leaks.stdout)


def _job(cluster: Cluster, shell: Shell, name: str, sets: Mapping[str, str] | None = None) -> tuple[str, Path]:
    """Submits, follows the log until the job has ended; returns log and run folder.

    Raises:
        DemoError: it did not complete.
    """
    run = cluster.home / "output" / name
    words = ["runner", "submit", "run.yaml", "--bundle", "bundle", "--output", f"output/{name}"]
    for key, value in (sets or {}).items():
        words += ["--set", f"{key}={value}"]
    answer = cluster.home / "submitted.txt"
    _as_user(cluster, shell, "sh", "-c", f". envs/train/activate && {shlex.join(words)}", output=answer)
    print(answer.read_text(), end="")
    match = re.search(r"\bjob (\d+)|^(\d+)$", answer.read_text(), re.MULTILINE)
    if match is None:
        raise DemoError("runner submit named no job")
    number, began, said = match[1] or match[2], time.monotonic(), 0
    print(f"\n$ tail -f output/{name}/logs/slurm-{number}.out", flush=True)
    while True:
        state = _job_state(cluster, shell, number)
        text = "".join(path.read_text(errors="replace") for path in sorted((run / "logs").glob("slurm-*.out")))
        print(text[said:], end="", flush=True)
        said = len(text)
        if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            break
        if time.monotonic() - began > JOB_S:
            raise DemoError(f"job {number} is still {state} after {JOB_S:.0f} s")
        time.sleep(1)
    shell.times.append((f"job {name}", time.monotonic() - began))
    if state != "COMPLETED":
        raise DemoError(f"job {number} ended as {state}")
    return text, run


def _job_state(cluster: Cluster, shell: Shell, number: str) -> str:
    command = [*cluster.user, "scontrol", "show", "job", number, "--oneliner"]
    environment = {**os.environ, **shell.settings}
    done = subprocess.run(command, cwd=cluster.home, env=environment, capture_output=True, text=True)
    match = re.search(r"\bJobState=(\w+)", done.stdout)
    if match is None:
        raise DemoError(f"Slurm does not know job {number}: {done.stderr.strip()}")
    return match[1]


def _train_here(cluster: Cluster, shell: Shell) -> None:
    say("Train, two processes on this machine, in that environment")
    command = "runner train run.yaml --bundle bundle --output output/demo --processes 2"
    _as_user(
        cluster,
        shell,
        "/usr/bin/env",
        "-i",
        "OMP_NUM_THREADS=1",
        "/bin/sh",
        "-c",
        f". envs/train/activate && {command}",
    )


def _ask(cluster: Cluster, shell: Shell) -> None:
    say("Ask the trained model, with the same environment's python")
    asked = shlex.join(["python", "fill_mask.py", "output/demo/model", *SENTENCES])
    _as_user(cluster, shell, "sh", "-c", f". envs/train/activate && {asked}")


def _bring_home(cluster: Cluster, folder: Path, shell: Shell) -> None:
    if cluster.has_slurm:
        say("Bring the results home, before the cluster goes")
        shell.run("rsync", "-a", f"{cluster.home}/output", "cluster/", cwd=folder)


def _as_user(cluster: Cluster, shell: Shell, *command: str, output: Path | None = None) -> None:
    name = f"{USER}@login:" if cluster.has_slurm else "offline"
    shell.run(*command, cwd=cluster.home, wall=cluster.user, wall_name=name, output=output)


def _ended(run: Path, steps: int) -> bool:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return bool(max(line["step"] for line in lines if "loss" in line) == steps)


def run_tree(run: Path) -> str:
    """The tree digest in a run folder's `environment.json`."""
    facts = json.loads((run / "environment.json").read_text())
    return str(facts["environment_tree"])


if __name__ == "__main__":
    sys.exit(conduct(read_folder("scripts/demo --environment", __doc__, "scripts-demo-environment"), travel))
