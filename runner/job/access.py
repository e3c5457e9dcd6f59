"""Rights, space, inodes and quota: a run can read its inputs, and write where it will write.

`shutil.disk_usage` says nothing about inodes, quotas, rights, or a disk that is mounted read-only.
So a file is really made where the run will write, and removed at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.disks import disk_type, what_is_used_up, write_fault
from runner.errors import FULL_DISK, OTHER_DISK, OTHER_RUN
from runner.from_stage import (
    IncompleteError,
    StageError,
    UsageError,
    human_count,
    human_size,
    quoted,
)
from runner.inputs import Inputs, JobInputs
from runner.job.findings import Finding, warning
from runner.job.shapes import ModelShape
from runner.run_folder.layout import RunFolder

ENVIRONMENT_FILES = ("env.json", "bootstrap.sh", "node-local.sh", "image.tar.gz")
NAMED = 3  # at most so many files are named in a message
FILES_OF_A_RUN = 500  # inodes of a run folder: logs, checkpoints of many ranks, the model
QUOTA_TIMEOUT_S = 3.0  # a file server that does not answer must not hold up the other checks
_WITH_LFS = ("lustre",)
_UNLIMITED = 0  # in what quota(1) and lfs-quota(1) print


def files_to_read(inputs: Inputs) -> tuple[Path, ...]:
    """Lists the bundle's files that a training reads: of its model, datasets and environment."""
    splits = [s for data in inputs.datasets for s in (data.train, data.validation) if s]
    return (
        *environment_files(inputs),
        *(inputs.model.path / name for name in inputs.model.digests),
        *(file for split in splits for file in split.files),
    )


def environment_files(inputs: JobInputs) -> tuple[Path, ...]:
    """Lists the bundle's files that any run reads: its lock, and those of its environment."""
    environment = inputs.environment.path if inputs.environment else None
    return (
        inputs.bundle / "stage.lock",
        *(environment / name for name in ENVIRONMENT_FILES if environment),
    )


def check_readable(paths: Iterable[Path]) -> None:
    """Checks that this user may read files.

    Raises:
        UsageError: some cannot be read; says which folder or file is closed.
    """
    closed = [path for path in paths if not os.access(path, os.R_OK, effective_ids=True)]
    closed = [path for path in closed if _is_there(path)]
    if not closed:
        return
    first = _first_closed(closed[0])
    named = ", ".join(str(path) for path in closed[:NAMED])
    more = f" and {len(closed) - NAMED} more" if len(closed) > NAMED else ""
    what = "entered" if first.is_dir() else "read"
    raise UsageError(
        f"{human_count(len(closed), 'file')} of this run cannot be read: {named}{more}. "
        f"{first} cannot be {what} by you; it is not damaged.",
        f"Its owner can open it: chmod {'a+rx' if first.is_dir() else 'a+r'} {quoted(first)} "
        f"(`namei -l {quoted(closed[0])}` shows every right on the way)",
    )


def _is_there(path: Path) -> bool:
    """Whether a path is there, or cannot be known to be missing."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _first_closed(path: Path) -> Path:
    """Returns the first folder above a file that cannot be entered; else the file."""
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return path


def nearest_folder(path: Path) -> Path:
    """Returns the nearest folder that exists, at a path or above it.

    Raises:
        UsageError: something above the path is a file.
    """
    for folder in (path, *path.parents):
        # Not Path.exists(): it raises where a folder above is closed.
        if os.path.isdir(folder):  # noqa: PTH112
            return folder
        if os.path.lexists(folder):
            raise UsageError(
                f"{folder}: a folder is needed there, and it is a file or a broken link.",
                f"Look at it: ls -ld {quoted(folder)}; or "
                + (f"give the run {OTHER_RUN}" if folder == path else f"choose {OTHER_DISK}"),
            )
    return Path("/")


def check_writable(where: Path) -> None:
    """Checks that files can be made at a path, by making one.

    Args:
        where: a folder of the run; it need not exist.

    Raises:
        UsageError: no right to write, or a disk that is mounted read-only.
        IncompleteError: no space, no inodes, or no quota.
    """
    folder = nearest_folder(where)
    try:
        status = os.statvfs(folder)
        # A file system without a fixed number of inodes (btrfs, many network disks) has 0 files.
        if status.f_files and status.f_favail < FILES_OF_A_RUN:
            raise IncompleteError(
                f"{where}: {human_count(status.f_favail, 'file')} can still be made there; a run "
                f"makes up to {FILES_OF_A_RUN}. The disk has space but no free inodes (df -i).",
                "Remove many small files there (du --inodes -s * | sort -n shows where they are), "
                f"or choose {OTHER_DISK}",
            )
        fault = write_fault(folder)
    except OSError as error:
        fault = error
    if fault is not None:
        raise _refusal(where, folder, fault)


def _refusal(where: Path, folder: Path, error: OSError) -> StageError:
    if used_up := what_is_used_up(folder, error):
        is_full = error.errno in FULL_DISK
        cause = used_up[0] or ("the disk is full" if is_full else "no file of 1 MiB can be made")
        kind = IncompleteError if is_full else UsageError
        return kind(
            f"{where}: {cause} ({error.strerror}).", f"{used_up[1]}; or choose {OTHER_DISK}"
        )
    return UsageError(
        f"{where}: no file can be made in {folder}: {error.strerror or error}.",
        f"Choose {OTHER_DISK}, in a folder of yours (`ls -ld {quoted(folder)}` and `id` show who "
        "may write)",
    )


def check_quota(where: Path, needed: int, mounts: str) -> None:
    """Compares what this user's quota leaves with what a run needs.

    Args:
        where: a folder of the run; it need not exist.
        needed: bytes.
        mounts: the text of `/proc/self/mounts`.

    Raises:
        IncompleteError: the quota is too small.
    """
    folder = nearest_folder(where)
    if disk_type(folder, mounts) in _WITH_LFS:
        shows = f"lfs quota -h -u $USER {folder}"
        text = _shown("lfs", "quota", "-q", "-u", str(os.geteuid()), str(folder))
    else:
        shows = "quota -s"
        shown = _shown("quota", "-w", "-p", "--show-mntpoint", "--hide-device")
        text = line_of_quota(shown, folder)
    left = quota_left(text)
    if left is None:
        return
    space, files = left
    if space is not None and space < needed:
        raise IncompleteError(
            f"{where}: the run needs up to {human_size(needed)}; your quota leaves "
            f"{human_size(space)}.",
            f"Free space ({shows}), keep fewer: --set checkpoint.keep=1, or choose {OTHER_DISK}",
        )
    if files is not None and files < FILES_OF_A_RUN:
        raise IncompleteError(
            f"{where}: your quota leaves {human_count(files, 'file')}; a run makes up to "
            f"{FILES_OF_A_RUN}.",
            f"Remove many small files ({shows}), or choose {OTHER_DISK}",
        )


def _shown(*command: str) -> str:
    """What a program prints; empty: it is not here, or does not answer in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUOTA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def line_of_quota(text: str, folder: Path) -> str:
    """The line of `quota -w -p --show-mntpoint` (quota(1)) on the disk of a folder. Pure.

    Empty: there is no quota on it.
    """
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("/")}
    return next((lines[str(p)] for p in (folder, *folder.parents) if str(p) in lines), "")


def quota_left(text: str) -> tuple[int | None, int | None] | None:
    """Reads `lfs quota -q` (lfs-quota(1)): bytes and files that are left; None: not known. Pure.

    A line, also of quota(1), has the path, kbytes, quota, limit, grace, files, quota, limit,
    grace. A long path is alone on the line before. A number over its quota has a `*`. A limit of 0
    is no limit.
    """
    fields = text.split()
    numbers = [re.sub(r"[*\[\]]", "", field) for field in fields[1:9]]
    if len(numbers) < 8 or not all(numbers[at].isdecimal() for at in (0, 1, 2, 4, 5, 6)):
        return None
    used, _, limit, _, files, _, most, _ = (int(n) if n.isdecimal() else 0 for n in numbers)
    space = None if limit == _UNLIMITED else max(0, limit - used) * 1024
    return space, None if most == _UNLIMITED else max(0, most - files)


def disk_needed(config: RunConfig, shape: ModelShape) -> int:
    """Returns the most bytes that a run needs on disk.

    These are `keep` checkpoints, the best one, one more while it is written, and the model. A
    checkpoint holds the weights and Adam's two moments in fp32 (12 bytes per parameter) and a
    second copy of the weights (4). With LoRA, it holds these for the trained parameters only; at
    ZeRO stage 3 it also holds all weights (4). The exported model is whole if LoRA is merged.
    It is 0 where the number of parameters is not known.
    """
    if not shape.num_parameters:
        return 0
    if shape.num_trained is not None:
        may_be_stage_3 = config.engine.name == "deepspeed" and config.engine.zero in ("auto", 3)
        frozen = 4 * shape.num_parameters if may_be_stage_3 and not config.quantization else 0
        checkpoints = (16 * shape.num_trained + frozen) * (
            config.checkpoint.keep + 1 + config.checkpoint.best
        )
        merged = config.lora is not None and config.lora.merge
        return checkpoints + 4 * (shape.num_parameters if merged else shape.num_trained)
    return shape.num_parameters * (16 * (config.checkpoint.keep + 1 + config.checkpoint.best) + 4)


def check_disk(config: RunConfig, folder: RunFolder, shape: ModelShape, needed: int) -> None:
    """Compares the free space at the run folder with what the run still needs.

    Args:
        needed: bytes that the run needs in all, from `disk_needed`.

    Raises:
        IncompleteError: too little is free.
    """
    free = shutil.disk_usage(nearest_folder(folder.root)).free
    more = disk_still_needed(config, folder.checkpoints, needed)
    if free >= more:
        return
    beside = ""
    if more < needed:
        beside = f" beside the checkpoints that are there ({human_size(needed)} in all)"
    least = replace(config, checkpoint=replace(config.checkpoint, keep=1))
    with_one = disk_still_needed(least, folder.checkpoints, disk_needed(least, shape))
    fewer = ", or keep fewer: --set checkpoint.keep=1" if free >= with_one < more else ""
    also = ""
    if not fewer and with_one < more:
        also = f" (--set checkpoint.keep=1 needs {human_size(with_one)})"
    raise IncompleteError(
        f"{folder.root}: checkpoints and model need up to {human_size(more)}{beside}; "
        f"{human_size(free)} are free.",
        f"Free space there{',' if fewer else ' or'} choose {OTHER_DISK}{fewer}{also}",
    )


def disk_still_needed(config: RunConfig, checkpoints: Path, needed: int) -> int:
    """Returns how many bytes a run needs beyond those that its own checkpoints already take.

    A new checkpoint replaces an old one, but only when it is complete. So space for one is always
    needed.

    Args:
        config: the run file.
        checkpoints: the folder with the run's checkpoints.
        needed: the most bytes that the run needs in all.
    """
    there = sum(p.stat().st_size for p in checkpoints.glob("step-*/**/*") if p.is_file())
    one = needed // (config.checkpoint.keep + 1 + config.checkpoint.best)
    return max(needed - there, one)


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
LOCAL_NAMES = ("/tmp", "/var/tmp", "/local", "/localscratch", "/scratch_local", "/dev/shm", "/nvme")
"""Folders that are a node's own at most sites. `/scratch` is shared at many."""


def find_private_places(folders: Mapping[str, Path], mounts: str) -> Iterator[Finding]:
    """Finds folders of a job that only this node has.

    Args:
        folders: what it is, such as `the run folder` -> its path.
        mounts: the text of `/proc/self/mounts`.
    """
    for what, path in folders.items():
        kind = disk_type(path, mounts)
        in_memory = kind in IN_MEMORY
        if in_memory or (kind in LOCAL_DISKS and any(map(path.is_relative_to, LOCAL_NAMES))):
            where = "this node's memory" if in_memory else "a disk of this node"
            yield warning(
                f"{what} {path} is on {where} ({kind}): the job's nodes may have "
                "their own, in which it is not.",
                "Use a folder on the shared disk; `runner rehearse RUN --bundle B --job` "
                "shows what a node sees.",
            )
