"""A folder for an environment's files, on a disk that keeps names apart that differ in case.

On a Mac's disk, `share/terminfo/n` and `share/terminfo/N` of ncurses are one folder.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage.errors import UsageError

_CREATE = ["hdiutil", "create", "-quiet", "-type", "SPARSE", "-size", "200g", "-volname", "airlift"]


@contextmanager
def folder_that_keeps_case(beside: Path) -> Iterator[Path]:
    """A temporary folder in `beside`; else in TMPDIR; else, on a Mac, in a disk image.

    Raises:
        UsageError: names that differ in case are one on each of these disks.
    """
    for parent in (beside, Path(tempfile.gettempdir())):
        if not ignores_case(parent):
            with tempfile.TemporaryDirectory(dir=parent, prefix="airlift-root-") as name:
                yield Path(name)
            return
    with tempfile.TemporaryDirectory(prefix="airlift-disk-") as name:
        file, mount = Path(name, "disk.sparseimage"), Path(name, "mount")
        mount.mkdir()
        try:
            subprocess.run([*_CREATE, "-fs", "Case-sensitive APFS", file], check=True)
            attach = ["hdiutil", "attach", "-quiet", "-nobrowse", "-mountpoint"]
            subprocess.run([*attach, mount, file], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(
                f"{beside}: this disk ignores case, and so does {parent}; an environment has names "
                f"that differ in nothing else. No other disk could be made: {error}.",
                "TMPDIR=FOLDER, a folder on a disk that does not, then the same command again.",
            ) from None
        try:
            yield mount
        finally:
            subprocess.run(["hdiutil", "detach", "-quiet", "-force", mount], check=False)


def ignores_case(folder: Path) -> bool:
    """Whether names that differ only in case, or the form of accents, are one on this disk.

    Raises:
        OSError: nothing can be written there.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="airlift-probe-") as name:
        Path(name, "Probe-\u00c9").touch()
        others = ("pROBE-\u00c9", "Probe-E\u0301")
        return any(Path(name, other).exists() for other in others)
