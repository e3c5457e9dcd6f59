"""The place in a bundle where `apply` is going to put a file: what stands there, and making room for it.

A link in the way could lead a file out of the bundle, and a folder with something in it may be a person's: both are
refused.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from stage.errors import PolicyError
from stage.names import printable


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


def refuse_folders(root: Path, paths: set[str], stale: set[str]) -> None:
    """Folders in the places of files, unless nothing will be in them once the `stale` files are gone.

    Raises:
        PolicyError: there is one.
    """
    for path in sorted(paths):
        place = root / path
        for found in place.rglob("*") if is_real_folder(place) else ():
            if not is_real_folder(found) and found.relative_to(root).as_posix() not in stale:
                raise PolicyError(
                    f"{printable(str(place))}: a folder with something in it stands where a file has to be. The "
                    "bundle is as it was.",
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
            raise PolicyError(f"{printable(str(at))}: a link or file stands where a folder has to be.", "Remove it.")
        at.mkdir(exist_ok=True)
