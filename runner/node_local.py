"""The environment on each node's own disk, before the ranks start.

A thousand ranks that import torch from one network disk bring it down: `import transformers, datasets` looks up 12,654
names and opens 5,618 files. So one process a node unpacks the environment's image to the node's own disk
(`node-local.sh` beside the image; later jobs find it there), and the ranks run its python.

`foresee` says what to expect, before a job is queued; in the job, `decide` says whether, and why, `bring` does it with
srun and returns the prefix, and `arrange` is both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.batch import cpus_per_task, tasks_per_node
from runner.errors import DamageError, IncompleteError, StageError, UsageError, human_count, human_size
from runner.inputs import EnvironmentInput
from runner.slurm import SlurmJobEnvironment

ROOT_VARIABLE = "AIRLIFT_NODE_ROOT"
SCRIPT = "node-local.sh"
NETWORK_DISKS = frozenset({
    "lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "panfs", "wekafs", "cifs", "smb3", "9p", "afs", "orangefs",
    "pvfs2", "glusterfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs",
})  # fmt: skip
MEMORY_DISKS = frozenset({"tmpfs", "ramfs"})
MOUNTED_FILES = frozenset({"squashfs", "fuse.squashfuse", "fuse.squashfuse_ll"})
"""The file may lie on a network disk; looking names up and opening files asks nobody but this node."""


@dataclass(frozen=True)
class Decision:
    """Whether to use the nodes' own disks, under which folder, and why."""

    root: Path | None
    reason: str


def decide(
    wanted: bool | Literal["auto"],
    environment: EnvironmentInput,
    environ: Mapping[str, str],
    mounts: str,
    prefix: Path = Path(sys.prefix),
) -> Decision:
    """Looks at this node, taking the others to be like it. Pure, but for asking what is there and how much is free.

    Args:
        mounts: the text of `/proc/self/mounts`.
        prefix: of the environment that runs this.
    """
    if wanted is False:
        return Decision(None, "node_local: false")
    root = node_root(environ)
    if wanted is True:
        return Decision(root, "node_local: true")
    disk = disk_type(prefix, mounts)
    if disk not in NETWORK_DISKS and running_tree(prefix) == environment.tree:
        where = "one mounted file" if disk in MOUNTED_FILES else "on a disk of this node already"
        return Decision(None, f"{prefix} is {where} ({disk})")
    local = disk_type(root, mounts)
    if local in NETWORK_DISKS:
        return Decision(None, f"{root} is a network disk too ({local}); set {ROOT_VARIABLE} to one of the nodes' own")
    if local in MEMORY_DISKS and ROOT_VARIABLE not in environ:
        return Decision(
            None, f"{root} is in memory ({local}), which the job needs; set {ROOT_VARIABLE} to have it there"
        )
    # Path.exists() would raise where the folder is another user's.
    there = os.path.exists(_prefix_below(root, environment.tree) / "bin" / "python")  # noqa: PTH110
    free = _free(root)
    if not there and free is not None and free < environment.size:
        needed = human_size(environment.size)
        return Decision(
            None, f"{root} has {human_size(free)} free of the {needed} needed; set {ROOT_VARIABLE} to a disk"
        )
    why = f"{prefix} is on a network disk ({disk})" if disk in NETWORK_DISKS else f"{prefix} is another environment"
    has_it = " and has it already" if there else ""
    return Decision(root, f"{why}; {root} is a disk of the node's own ({local}){has_it}")


def _prefix_below(root: Path, tree: str) -> Path:
    """Where node-local.sh puts an environment."""
    return root / f"airlift-{os.getuid()}" / tree[:16]


def node_root(environ: Mapping[str, str]) -> Path:
    """The folder on the nodes' own disks: as said, else the node's temporary folder.

    Not `SLURM_TMPDIR` and not a `TMPDIR` below it, which sites remove with the job: the next one finds nothing there.
    """
    return Path(environ.get(ROOT_VARIABLE) or "/tmp")


def disk_type(path: Path, mounts: str) -> str:
    """The type of the file system a path is on, by the mount that is nearest above it and was made last."""
    best = ("", "unknown")
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The kernel writes blanks, tabs, newlines and backslashes in octal, and all else as it is.
        at = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best[0]):
            best = (at, fields[2])
    return best[1]


def running_tree(prefix: Path = Path(sys.prefix)) -> str | None:
    """The tree digest of the environment with this prefix; None: it is not one out of a bundle."""
    try:
        return str(json.loads((prefix / ".airlift" / "env.json").read_text(encoding="utf-8"))["tree"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_running(environment: EnvironmentInput, prefix: Path = Path(sys.prefix)) -> None:
    """Refuses to run in another environment than the run file names.

    Raises:
        UsageError: this python is not of that environment.
    """
    tree = running_tree(prefix)
    if tree != environment.tree:
        what = f"environment {tree[:16]}" if tree else "none out of a bundle"
        raise UsageError(
            f"this is the python of {prefix} ({what}), and the run file asks for `{environment.asset}` "
            f"({environment.tree[:16]}).",
            f"Create it once: sh {environment.path}/bootstrap.sh PREFIX; then: . PREFIX/activate",
        )


def foresee(wanted: bool | Literal["auto"], environment: EnvironmentInput, prefix: Path = Path(sys.prefix)) -> str:
    """What can be known before a job is queued: a line on where the ranks' environment will come from.

    Raises:
        UsageError: the job would refuse to run from the environment that runs this.
        DamageError: the environment cannot be unpacked.
    """
    if wanted is False or running_tree(prefix) == environment.tree:
        require_running(environment, prefix)
        where = prefix if wanted is False else f"{prefix}, or each node's own disk (node_local: {_spelled(wanted)})"
    else:
        where = f"each node's own disk (node_local: {_spelled(wanted)}; {prefix} is another environment)"
    if wanted is not False:
        for name in (SCRIPT, "bootstrap.sh", "image.tar.gz"):
            if not (environment.path / name).is_file():
                raise DamageError(f"{environment.path / name} is missing.", "stage verify the bundle.")
    files = human_count(environment.files, "file")
    return f"environment {environment.asset}: {where}; {files}, {human_size(environment.size)}"


def command(job: SlurmJobEnvironment, environ: Mapping[str, str], script: Path, root: Path) -> list[str]:
    """The srun that runs node-local.sh once on each node, with all CPUs that the job has there. Pure."""
    return [
        "srun",
        f"--nodes={job.num_nodes}",
        f"--ntasks={job.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_task(job, environ) * tasks_per_node(job)}",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "sh",
        str(script),
        str(root),
    ]


def bring(environment: EnvironmentInput, root: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Unpacks the environment on every node of this job, where it is not there yet.

    Returns:
        Its prefix, the same on all nodes.

    Raises:
        UsageError: not in a job, or no srun.
        IncompleteError: some node could not; its words are above.
    """
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        raise UsageError("environment.node_local: true, and this is not inside a Slurm job.", "Submit it.")
    argv = command(job, environ, environment.path / SCRIPT, root)
    say(" ".join(argv))
    variables = {name: value for name, value in environ.items() if name != "SLURM_EXPORT_ENV"}
    try:
        done = subprocess.run(
            argv, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError("srun is not on PATH inside this job.", "Load the site's Slurm module in setup.") from None
    prefixes = done.stdout.splitlines()
    if done.returncode != 0 or len(prefixes) != job.num_nodes or len(set(prefixes)) != 1:
        arrived = (
            f"{len(prefixes)} of {job.num_nodes} nodes have it" if len(set(prefixes)) < 2 else " and ".join(prefixes)
        )
        raise IncompleteError(
            f"environment `{environment.asset}` could not be brought to the nodes' own disks: {arrived}; see above.",
            "Mend that, or set environment.node_local: false, which takes it from the shared disk.",
        )
    return Path(prefixes[0])


def arrange(
    wanted: bool | Literal["auto"],
    environment: EnvironmentInput,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    prefix: Path = Path(sys.prefix),
    mounts: Path = Path("/proc/self/mounts"),
) -> Path | None:
    """Decides and does it, saying what and why; None: the ranks run the environment that runs this, at `prefix`.

    Raises:
        StageError: it was asked for and cannot be, or the ranks would run another environment than was asked for.
    """
    decision = decide(wanted, environment, environ, os.fsdecode(mounts.read_bytes()), prefix)
    if decision.root is not None:
        say(f"environment {environment.asset}: to each node's own disk ({decision.reason})")
        try:
            return bring(environment, decision.root, environ, say)
        except StageError as error:
            if wanted is True:
                raise
            say(f"environment {environment.asset}: {error.message} Going on from the shared disk (node_local: auto).")
    else:
        say(f"environment {environment.asset}: {prefix} for all ranks ({decision.reason})")
    require_running(environment, prefix)
    return None


def _spelled(wanted: bool | str) -> str:
    return str(wanted).lower()


def _free(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
