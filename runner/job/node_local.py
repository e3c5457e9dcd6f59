"""The environment on each node's own disk, before the ranks start.

A thousand ranks that import torch from one network disk overload it: `import transformers,
datasets` looks up 12,654 names and opens 5,618 files. So one process per node unpacks the
environment's image to the node's own disk (`node-local.sh` beside the image), and the ranks run its
Python. Later jobs find it there.

`preview` describes this before a job is queued. In the job, `decide` chooses and gives the reason,
`unpack_on_nodes` does it with srun and returns the prefix, and `arrange` calls both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from runner.disks import NETWORK_DISKS, disk_type
from runner.from_stage import (
    IncompleteError,
    StageError,
    UsageError,
    human_count,
    human_size,
    quoted,
)
from runner.inputs import EnvironmentInput, running_tree, unreadable
from runner.slurm.environment import SlurmJobEnvironment, srun_command

ROOT_VARIABLE = "AIRLIFT_NODE_ROOT"
SCRIPT = "node-local.sh"
MEMORY_DISKS = frozenset({"tmpfs", "ramfs"})
MOUNTED_FILES = frozenset({"squashfs", "fuse.squashfuse", "fuse.squashfuse_ll"})
"""The mounted file may be on a network disk; lookups and opens inside it stay on this node."""


def decide_node_local(
    wanted: bool | Literal["auto"],
    environment: EnvironmentInput,
    environ: Mapping[str, str],
    mounts: str,
    prefix: Path = Path(sys.prefix),
) -> tuple[Path | None, str]:
    """Decides from this node; assumes that the others are alike.

    Pure, except that it looks at existing files. Whether there is room, node-local.sh finds out.

    Args:
        mounts: the text of `/proc/self/mounts`.
        prefix: the prefix of the environment that runs this.

    Returns:
        The folder on the nodes' own disks, or None; and the reason.
    """
    root = node_root(environ)
    if wanted != "auto":
        return (root if wanted else None), f"node_local: {str(wanted).lower()}"
    disk, local = disk_type(prefix, mounts), disk_type(root, mounts)
    is_shared = disk in NETWORK_DISKS
    if not is_shared and running_tree(prefix) == environment.tree:
        where = "one mounted file" if disk in MOUNTED_FILES else "on a disk of this node already"
        return None, f"{prefix} is {where} ({disk})"
    if local in NETWORK_DISKS:
        return (
            None,
            f"{root} is a network disk too ({local}); set {ROOT_VARIABLE} to a disk of the nodes",
        )
    if local in MEMORY_DISKS and ROOT_VARIABLE not in environ:
        return (
            None,
            f"{root} is in memory ({local}), which the job needs; set {ROOT_VARIABLE} to use it",
        )
    why = f"on a network disk ({disk})" if is_shared else "another environment"
    return root, f"{prefix} is {why}; {root} is a disk of the node's own ({local})"


def prefix_below(root: Path, tree: str) -> Path:
    """The prefix to which node-local.sh unpacks an environment."""
    return root / f"airlift-{os.getuid()}" / tree[:16]


def node_root(environ: Mapping[str, str]) -> Path:
    """The folder on the nodes' own disks: AIRLIFT_NODE_ROOT, else `/tmp`.

    Not `SLURM_TMPDIR`, and not a `TMPDIR` below it: sites remove them with the job, so the next job
    would find nothing there.
    """
    return Path(environ.get(ROOT_VARIABLE) or "/tmp")


def check_running(environment: EnvironmentInput, prefix: Path = Path(sys.prefix)) -> None:
    """Checks that this Python belongs to the environment that the run file names.

    Raises:
        UsageError: it does not.
    """
    tree = running_tree(prefix)
    if tree != environment.tree:
        what = f"environment {tree[:16]}" if tree else "not from a bundle"
        raise UsageError(
            f"this is the python of {prefix} ({what}), and the run file asks for "
            f"`{environment.asset}` ({environment.tree[:16]}).",
            f"Create it once: sh {quoted(environment.path / 'bootstrap.sh')} PREFIX; then: . "
            "PREFIX/activate",
        )


def preview(
    wanted: bool | Literal["auto"], environment: EnvironmentInput, prefix: Path = Path(sys.prefix)
) -> str:
    """Describes, before a job is queued, where the ranks' environment will come from.

    Returns:
        One line for people.

    Raises:
        UsageError: the job would refuse to run from the environment that runs this.
        DamageError: the environment cannot be unpacked.
    """
    setting = f"node_local: {str(wanted).lower()}"
    if wanted is False:
        check_running(environment, prefix)
        where = str(prefix)
    elif running_tree(prefix) == environment.tree:
        where = f"{prefix}, or each node's own disk ({setting})"
    else:
        where = f"each node's own disk ({setting}; {prefix} is another environment)"
    if wanted is not False:
        for name in (SCRIPT, "bootstrap.sh", "image.tar.gz"):
            if not (environment.path / name).is_file():
                raise unreadable(environment.path / name, "it is missing")
    files = human_count(environment.files, "file")
    return f"environment {environment.asset}: {where}; {files}, {human_size(environment.size)}"


def unpack_on_nodes(
    environment: EnvironmentInput,
    root: Path,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    words: Sequence[str] = (),
) -> Path:
    """Unpacks the environment on each node of this job that does not have it yet.

    Args:
        words: of the run file for every srun.

    Returns:
        Its prefix, the same on all nodes.

    Raises:
        UsageError: this is not a job, or srun is not on PATH.
        IncompleteError: a node failed; its own message is printed above.
    """
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        raise UsageError(
            "environment.node_local: true, and this is not inside a Slurm job.", "Submit it."
        )
    program = ("sh", str(environment.path / SCRIPT), str(root))
    argv = srun_command(job, environ, 1, (*words, *program))
    say(" ".join(argv))
    variables = {name: value for name, value in environ.items() if name != "SLURM_EXPORT_ENV"}
    try:
        done = subprocess.run(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            "srun is not on PATH inside this job.", "Load the site's Slurm module in slurm.setup."
        ) from None
    prefixes = done.stdout.splitlines()
    if done.returncode != 0 or len(prefixes) != job.num_nodes or len(set(prefixes)) != 1:
        arrived = (
            f"{len(prefixes)} of {job.num_nodes} nodes have it"
            if len(set(prefixes)) < 2
            else " and ".join(prefixes)
        )
        raise IncompleteError(
            f"environment `{environment.asset}` could not be unpacked on the nodes' own disks: "
            f"{arrived}; see above.",
            "Fix that, or set environment.node_local: false, which uses the shared disk.",
        )
    return Path(prefixes[0])


def arrange(
    wanted: bool | Literal["auto"],
    environment: EnvironmentInput,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    words: Sequence[str] = (),
    prefix: Path = Path(sys.prefix),
    mounts: Path = Path("/proc/self/mounts"),
) -> Path | None:
    """Decides, prints the decision with its reason, and unpacks.

    Returns:
        The prefix on the nodes' own disks. None: the ranks use the environment that runs this.

    Raises:
        StageError: `wanted` is True and unpacking failed, or the ranks would run another
            environment than the run file names.
    """
    root, reason = decide_node_local(
        wanted, environment, environ, os.fsdecode(mounts.read_bytes()), prefix
    )
    if root is None:
        say(f"environment {environment.asset}: {prefix} for all ranks ({reason})")
    else:
        say(f"environment {environment.asset}: to each node's own disk ({reason})")
        try:
            return unpack_on_nodes(environment, root, environ, say, words)
        except StageError as error:
            if wanted is True:
                raise
            say(
                f"environment {environment.asset}: {error.message} "
                "Using the shared disk instead (node_local: auto)."
            )
    check_running(environment, prefix)
    return None
