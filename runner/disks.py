"""Which disk a folder is on, and the folders of compiler caches on this node's own disk.

The file locks of these caches fail on NFS and Lustre, and hundreds of ranks would wait for one
server. Nothing is written to the home folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from runner.from_stage import UsageError

NETWORK_DISKS = frozenset({
    "lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "panfs", "wekafs", "cifs", "smb3", "9p",
    "afs", "orangefs", "pvfs2", "glusterfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs",
    "fuse.sshfs",
})  # fmt: skip

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Variables of the folders to which Triton, torch.compile and DeepSpeed compile."""

LAST_RESORT = Path("/tmp")  # on each node, and rarely on a network disk
_MOUNTS = Path("/proc/self/mounts")


def read_mounts() -> str:
    """The mounts of this process (proc(5)); empty where the system does not list them."""
    try:
        return os.fsdecode(_MOUNTS.read_bytes())
    except OSError:
        return ""


def disk_type(path: Path, mounts: str) -> str:
    """The type of a path's file system: that of the nearest mount above it, the latest if several.

    Args:
        mounts: the text of `/proc/self/mounts` (proc(5), fstab(5)).

    Returns:
        Such as `lustre`; `unknown` if no mount matches.
    """
    best = ("", "unknown")
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The kernel writes blanks, tabs, newlines and backslashes in octal.
        at = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best[0]):
            best = (at, fields[2])
    return best[1]


def write_fault(folder: Path) -> OSError | None:
    """Writes a file without a name to a folder, to learn why a disk refuses; None: it does not."""
    try:
        with tempfile.TemporaryFile(prefix=".airlift-check-", dir=folder) as file:
            file.write(os.urandom(2**20))  # random, for disks that compress
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def what_is_used_up(folder: Path, error: OSError) -> tuple[str, str] | None:
    """Says whether quota, inodes or space made a disk refuse, and what shows and frees it.

    Args:
        folder: on that disk.
        error: of the disk. Libraries hide its number; then a file is written to learn it.

    Returns:
        The cause, unless the error's own message has it, and the remedy; None: none of these.
    """
    number = error.errno
    if number is None:
        fault = write_fault(folder)
        number = fault.errno if fault else None
    if number == errno.EDQUOT:
        return (
            "your quota is used up, of bytes or of files (the disk itself may have room)",
            f"Free space or quota there: quota -s, or lfs quota -h -u $USER {folder}, shows which "
            "(older runs, checkpoints)",
        )
    if number == errno.EFBIG:
        return "", "`ulimit -f` shows how large a file may be in this shell: raise it there"
    if number != errno.ENOSPC:
        return None
    try:
        status = os.statvfs(folder)
        no_inodes = bool(status.f_files and not status.f_favail)
    except OSError:
        no_inodes = False
    if no_inodes:
        return (
            "no inode is left: not the space is used up but the number of files (df -i)",
            "Free space or quota there: remove many small files (du --inodes -s * | sort -n)",
        )
    cause = "" if error.errno else "the disk is full"  # its own message says so
    return cause, "Free space or quota there (older runs, checkpoints)"


def job_folder(environ: Mapping[str, str]) -> Path:
    """The folder of this job for temporary files, where the site or the user wants them."""
    base = Path(environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or LAST_RESORT)
    return base / f"airlift-{os.getuid()}-{environ.get('SLURM_JOB_ID', 'local')}"


def local_folder(environ: Mapping[str, str], mounts: str) -> tuple[Path, str]:
    """The folder of this job on this node's own disk.

    Args:
        mounts: as for `disk_type`.

    Returns:
        The folder, and a line if the wanted one is on a network disk; empty: it is not.
    """
    folder = job_folder(environ)
    kind = disk_type(folder, mounts)
    if kind not in NETWORK_DISKS:
        return folder, ""
    other = LAST_RESORT / folder.name
    return other, f"compiler caches are in {other}: {folder.parent} is a network disk ({kind})"


def cache_variables(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables of compiler caches that are not set yet, with folders in `folder`. Pure."""
    names = [name for name in CACHES if not environ.get(name)]
    return {name: str(folder / _folder_name(name)) for name in names}


def user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """A name for a user who has none on this node: torch asks for one, for a folder of its own.

    Some containers have no passwd entry for the user, and nodes lose theirs with the site's LDAP.
    """
    if any(environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        return {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return {"LOGNAME": f"uid{os.getuid()}"}
    return {}


def use_local_caches(environ: MutableMapping[str, str]) -> list[str]:
    """Sets the variables of compiler caches to folders on this node's own disk.

    What the user set stays. A choice of our launcher on another node is made again here if it
    cannot be used here.

    Returns:
        Lines for people: a folder was avoided, or the user's variable names a network disk.

    Raises:
        UsageError: as for `own_folder`, for the folder in /tmp too.
    """
    mounts = read_mounts()
    environ.update(user_variables(environ))
    folder, line = local_folder(environ, mounts)
    lines = [line] if line else []
    theirs = {name: value for name in CACHES if (value := environ.get(name, ""))}
    for name, value in list(theirs.items()):
        if Path(value).parent.name == folder.name:
            del theirs[name], environ[name]
        elif (kind := disk_type(Path(value), mounts)) in NETWORK_DISKS:
            lines.append(f"{name}={value} is on a network disk ({kind}), where its locks may fail")
    if len(theirs) == len(CACHES):
        return lines[bool(line) :]
    try:
        own_folder(folder)
    except UsageError as error:
        folder = own_folder(LAST_RESORT / folder.name)
        lines.append(f"compiler caches are in {folder}: {error.message}")
    clear_builds(folder)
    environ.update(cache_variables(environ, folder))
    return lines


def own_folder(folder: Path) -> Path:
    """Creates a folder that only this user can write: others can guess its name in /tmp.

    Raises:
        UsageError: it exists already, and another user could write it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: it cannot be created: {error.strerror}.",
            "Set TMPDIR to a folder of yours on this node's disk.",
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder}: not a folder that only you can write.",
            "Set TMPDIR to a folder of yours on this node's disk.",
        )
    return folder


def clear_builds(folder: Path) -> None:
    """Removes the locks of killed builds, unless another process uses this folder of caches.

    torch waits without end for the file `lock` of a build, which stays when the process is killed
    (torch.utils.file_baton): a job that is requeued to the same node would wait for its own start
    before. The folder counts as used as long as this process lives, or what it becomes.
    """
    with suppress(OSError):  # a full disk, or one without locks
        mark = os.open(folder / "builds.lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(mark, True)
        with suppress(BlockingIOError):  # another process uses the folder
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for lock in (folder / _folder_name("TORCH_EXTENSIONS_DIR")).glob("*/lock"):
                lock.unlink()
        fcntl.flock(mark, fcntl.LOCK_SH)


def _folder_name(variable: str) -> str:
    return variable.lower().removesuffix("_dir")
