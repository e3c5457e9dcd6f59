"""The folder `<bundle>.apply.partial`, where `apply` keeps files that are not yet in the bundle.

It holds new files that are written but not in place. They are named by the patch and by their path,
so that a later run finds the files of an earlier run, and none of another patch.

Also checks the paths in the bundle where `apply` puts files. A link there could lead a file out of
the bundle, and a folder with files may belong to the user: both are refused.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from pathlib import Path

from stage.carry.patch import Patch
from stage.digests import sha256_of_bytes
from stage.errors import PolicyError, UsageError
from stage.paths import printable


def place_beside(root: Path) -> Path:
    """The folder where an `apply` works: beside the bundle, on the same disk, not beside a link.

    Raises:
        UsageError: no file there can be renamed into the bundle, which is a mount point.
    """
    real = root.resolve()
    folder = real.with_name(f"{real.name}.apply.partial")
    if real.stat().st_dev != real.parent.stat().st_dev or _is_mounted_apart(real):
        raise UsageError(
            f"{root}: this folder is a mount point: new files are built beside a bundle and "
            f"renamed into it, and {real.parent} is another disk, or mounted apart. "
            "Nothing was changed.",
            "Give the bundle where its disk has a folder above it (not as it is bound into a "
            "container), or move it into a folder of its own on that disk.",
        )
    return folder


def _is_mounted_apart(folder: Path) -> bool:
    """Whether both folders are different mounts of one disk: rename(2) reports that first."""
    try:
        (folder.parent / f".{os.getpid()}.nothing.partial").rename(
            folder / f".{os.getpid()}.nothing.partial"
        )
    except OSError as error:
        return error.errno == errno.EXDEV
    return False


class ApplyStaging:
    """`<bundle>.apply.partial`: files that are written and not in place."""

    def __init__(self, root: Path, patch: Patch) -> None:
        self._patch = patch
        self.folder = place_beside(root)
        self._kept = self.folder / patch.plan.id[:16]

    def built(self, path: str) -> Path:
        """The path of the new file until all new files are ready."""
        self._kept.mkdir(parents=True, exist_ok=True)
        return self._kept / f"new-{sha256_of_bytes(path.encode())}"

    def tag(self, path: str) -> bytes:
        """The bytes of a file beside the payload that the patch carries."""
        return self._patch.path_of(self._patch.plan.tags[path]).read_bytes()

    def remove(self) -> None:
        """Deletes all of it: the bundle is sound."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def is_regular(path: Path) -> bool:
    """Whether a regular file lies there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_real_folder(path: Path) -> bool:
    """Whether a folder lies there, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_empty(folder: Path) -> None:
    """Makes room for a file where a folder of empty folders stands."""
    if is_real_folder(folder):
        for inner, _, _ in os.walk(folder, topdown=False):
            Path(inner).rmdir()


def check_no_folders(root: Path, paths: set[str], stale: set[str]) -> None:
    """Checks that no folder is in the place of a file, unless it has only `stale` files.

    Raises:
        PolicyError: there is one.
    """
    for path in sorted(paths):
        place = root / path
        for found in place.rglob("*") if is_real_folder(place) else ():
            if not is_real_folder(found) and found.relative_to(root).as_posix() not in stale:
                raise PolicyError(
                    f"{printable(str(place))}: a folder with files is in the place of a file. "
                    "The bundle is unchanged.",
                    f"Move it out of the bundle: mv {shlex.quote(str(place))} ELSEWHERE",
                )


def make_real_folder(root: Path, folder: Path) -> None:
    """Makes a folder inside the bundle, never through a link out of it.

    Raises:
        PolicyError: something else stands there.
    """
    at = root
    for part in folder.relative_to(root).parts:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            raise PolicyError(
                f"{printable(str(at))}: a link or file stands where a folder has to be.",
                "Remove it.",
            )
        at.mkdir(exist_ok=True)
