"""`runner submit RUN --to FOLDER`: the same road by a disk that is carried.

It gets the bundle, the run file, the plan and `go.sh`, which takes them into the queue there:
`sh go.sh FOLDER`. Every byte is read back from the disk before it leaves.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.disks import disk_type, read_mounts
from runner.errors import (
    DamageError,
    IncompleteError,
    UsageError,
    as_shown,
    human_size,
    quoted,
    write_atomically,
)
from runner.inputs import Bundle, state_folder
from runner.inputs.far import PushTarget
from runner.inputs.staged import Reporter, drop_from_memory, push
from runner.remote.road import sha256_of

_FAT = ("vfat", "msdos", "fuse.fusefat")
_MOST_ON_FAT = 2**32 - 1  # bytes of a file


def check_disk(disk: Path, bundle: Path) -> list[str]:
    """Refuses a disk that cannot take a bundle, touching nothing; lines on sizes."""
    if not disk.is_dir():
        raise UsageError(f"{disk}: is no folder here.", "Plug the disk in, and give its folder.")
    files = {file.path: file.size or 0 for file in Bundle.open(bundle).lock.files}
    path, size = max(files.items(), key=lambda file: file[1], default=("", 0))
    if size > _MOST_ON_FAT and disk_type(disk, read_mounts()) in _FAT:
        parts = f"tar -c BUNDLE | split -b 3900M - {quoted(disk / 'bundle.tar.')}"
        raise UsageError(
            f"{disk}: is FAT32, where no file may have 4 GiB; {path} has {human_size(size)}. "
            "Nothing was written.",
            f"Format the disk as exFAT or ext4 (that erases it), or send by ssh: --to HOST:FOLDER. "
            f"By hand, in parts: {parts}   (there: cat bundle.tar.* | tar -x)",
        )
    there = {path: disk / "bundle" / path for path in files}
    kept = sum(path.stat().st_size for path in there.values() if path.is_file())
    needed, free = max(0, sum(files.values()) - kept), shutil.disk_usage(disk).free
    if needed > free:
        raise IncompleteError(
            f"{disk}: {human_size(needed)} are to be written, and {human_size(free)} are free.",
            "Free space there, or take a larger disk.",
        )
    return [f"to write: {human_size(needed)}; free on {disk}: {human_size(free)}"]


def write_to_disk(disk: Path, bundle: Path, files: Mapping[str, str], *, quiet: bool) -> list[str]:
    """Writes all that the run needs to a disk, and reads it back; lines on what is next.

    `files`: path on the disk -> text: run files, `go.sh` and `.airlift/plan`.
    """
    check_disk(disk, bundle)
    target = PushTarget(None, str(disk.absolute() / "bundle"))
    state = state_folder(os.environ)
    with Reporter(quiet=quiet) as bar:
        done = push(bundle, target, ssh="ssh", delete="all", reporter=bar, quiet=quiet, state=state)
    _check_read([f"bundle/{finding['path']}" for finding in done.report["findings"]], disk)
    sums = [f"{sha256_of(files[name])}  {name}\n" for name in (".airlift/plan", "go.sh")]
    # By this file, go.sh knows that it stands on the disk.
    texts = {**files, ".airlift/carried": "".join(sums)}
    before = _run_on(disk)
    for name, text in texts.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(disk / name, text.encode())
    drop_from_memory(disk / name for name in texts)
    _check_read([n for n, text in texts.items() if (disk / n).read_bytes() != text.encode()], disk)
    is_other = before not in ("", _run_on(disk))
    return [
        *([f"note: go.sh there took {before}; now it takes this run alone"] if is_other else []),
        f"{disk}: bundle, {', '.join(files)}; every byte was read back",
        f"next: eject it; on the cluster: sh {quoted(disk)}/go.sh FOLDER",
        f"its results: there, sh FOLDER/go.sh --results {quoted(disk)}",
        f"      and here: runner pull RUN --to {quoted(disk)}/",
    ]


def _run_on(disk: Path) -> str:
    """The run folder in the plan on a disk; empty: there is no plan."""
    with suppress(OSError):
        text = (disk / ".airlift/plan").read_text("utf-8", "replace")
        return as_shown(text.partition("\nOUTPUT=")[2].partition("\n")[0])
    return ""


def _check_read(damaged: Sequence[str], disk: Path) -> None:
    """Raises DamageError if anything was read back otherwise than it was written."""
    if damaged:
        raise DamageError(
            f"{disk}: written, and not as it was read here: {as_shown(damaged[0])}.",
            "Take another disk; this one loses bytes.",
        )
