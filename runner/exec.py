"""`runner exec`: someone's own script, unmodified, on a machine without network, with the names it already uses.

Two things stand in for the Hub (adr/0038): a cache of links into the bundle, which `from_pretrained` and
`snapshot_download` read without copying, and `stage serve` on loopback, which answers what a cache cannot (what files
are there, which splits a dataset has). Then this process *becomes* the script: exit code, signals and streams are the
script's own. `runner.keeper` ends the server when the script is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.errors import StageError, UsageError
from runner.hub_cache import write_hub_cache
from runner.inputs import hub_repositories
from runner.keeper import read_line, stage_command, start_server
from runner.slurm import SlurmJobEnvironment

SPREADS = frozenset({"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "pdsh", "clush"})
"""Commands that start processes on other nodes, where this node's loopback cannot be reached."""

FORGOTTEN = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_CACHE")
"""Variables that would keep libraries from asking the server, or point older ones away from the cache."""

NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
NEVER_CLEANED = "exec.unlocked"
"""Beside the caches: some script works with them without a lock."""


def run(command: Sequence[str], bundle: Path, environ: Mapping[str, str]) -> NoReturn:
    """Becomes `command`, for which the bundle is the Hub. Does not return.

    Raises:
        UsageError: no such program, a command that would leave this node, a folder that is not ours.
        DamageError: the bundle is damaged.
        StageError: the server did not start; it has said why.
    """
    program = _program(command, environ)
    _refuse_other_nodes(command, environ)
    bundle_id, repositories = hub_repositories(bundle)
    base = _own_folder(offline.set_cache_folders(dict(environ)))
    lock = _in_use(base)
    folder = base / "exec" / bundle_id[:12]
    server = stage_command("serve", str(bundle.resolve()), "--port", "0")
    reader = start_server(server, _cleaner(base, lock, environ))
    # While the server starts.
    write_hub_cache(repositories, folder / "hub")
    address = _address(read_line(reader))
    variables = environment(environ, address, folder)
    if environ.get("SLURM_PROCID", "0") == "0":
        num_models = sum(repository.kind == "models" for repository in repositories)
        print(
            f"runner exec: bundle {bundle_id[:12]} is the Hub at {address} ({num_models} names of models, "
            f"{len(repositories) - num_models} of datasets); caches: {folder}",
            file=sys.stderr,
            flush=True,
        )
    os.execve(program, list(command), variables)


def environment(environ: Mapping[str, str], address: str, folder: Path) -> dict[str, str]:
    """What the script is given: all of ours, with the bundle as the Hub and caches on this node's disk. Pure.

    Args:
        address: of the server.
        folder: of this bundle's caches. A HF_DATASETS_CACHE that is set keeps its place and gets a folder of this
            bundle's: Arrow copies are as large as the data, and a node's own disk may be small.
    """
    variables = {name: value for name, value in environ.items() if name not in FORGOTTEN}
    offline.set_cache_folders(variables)
    theirs = environ.get("HF_DATASETS_CACHE")
    datasets = Path(theirs) / f"airlift-{folder.name}" if theirs else folder / "datasets"
    quiet = {name: value for name, value in offline.VARIABLES.items() if not name.endswith("_OFFLINE")}
    direct = {name: _with_loopback(environ.get(name, "")) for name in ("no_proxy", "NO_PROXY")}
    return {
        **variables,
        **quiet,
        **direct,
        "HF_ENDPOINT": address,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(folder / "hub"),  # its name before huggingface_hub 0.17
        "HF_DATASETS_CACHE": str(datasets),
        "HF_MODULES_CACHE": environ.get("HF_MODULES_CACHE") or str(folder / "modules"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # else `load_dataset("csv", ...)` asks a host on the internet first
    }


def _with_loopback(hosts: str) -> str:
    """A proxy of the site's would be asked for the server on loopback, too."""
    have = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*have, *(host for host in ("127.0.0.1", "localhost") if host not in have)])


def _program(command: Sequence[str], environ: Mapping[str, str]) -> str:
    found = shutil.which(command[0], path=environ.get("PATH"))
    if found is None:
        raise UsageError(
            f"{command[0]}: no such program on PATH.", "runner exec --bundle B -- python their_script.py ..."
        )
    return found


def _refuse_other_nodes(command: Sequence[str], environ: Mapping[str, str]) -> None:
    job = SlurmJobEnvironment.from_environ(environ)
    name = Path(command[0]).name
    if job is not None and job.num_nodes > 1 and name in SPREADS:
        raise UsageError(
            f"`{name}` starts processes on {job.num_nodes} nodes; the bundle would be served on this one alone.",
            f"The other way round, so that each node serves itself: {name} ... runner exec --bundle B -- python ...",
        )


def _own_folder(folder: Path) -> Path:
    """Makes a folder that nobody else can write: its name can be guessed, and /tmp is everybody's.

    Raises:
        UsageError: somebody else was faster.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder}: not a folder that only you can write.", "Set TMPDIR to a folder of yours on this node's disk."
        )
    return folder


def _in_use(base: Path) -> int:
    """Says that the caches are in use, for as long as the descriptor is open anywhere.

    Where the disk takes no locks (Lustre mounted without flock, NFS without lockd), it cannot be told who uses them: a
    note beside them says so, and they stay.
    """
    descriptor = os.open(base / "exec.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        note = base / NEVER_CLEANED
        if not note.exists():
            note.touch()
            print(
                f"runner exec: {base} takes no locks ({error.strerror}), so its caches stay there after the job; "
                "TMPDIR on the node's own disk would have them cleaned",
                file=sys.stderr,
                flush=True,
            )
    return descriptor


def _cleaner(base: Path, lock: int, environ: Mapping[str, str]) -> Callable[[], None]:
    """For the end: a job's caches go with its last script on this node; outside of jobs they stay for the next."""

    def clean() -> None:
        if "SLURM_JOB_ID" not in environ:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another script of this job works with them
            return
        if not (base / NEVER_CLEANED).exists():
            shutil.rmtree(base / "exec", ignore_errors=True)

    return clean


def _address(line: str) -> str:
    match = re.search(r"\bat (http://\S+?),", line)
    if match:
        return match[1]
    ended = re.fullmatch(r"exit (\d+)", line)
    raise StageError(
        "the bundle cannot be served (see above).",
        "stage verify BUNDLE",
        exit_code=int(ended[1]) if ended else 1,
    )
