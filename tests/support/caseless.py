"""A real file system that ignores case and Unicode normal form, as on a Mac: FUSE over a folder.

    python -m tests.support.caseless FOLDER MOUNT       in the foreground, until it is unmounted

A name finds the entry that equals it when both are folded. A new entry keeps its spelling. Linux's
own file systems that ignore case (ext4 casefold, vfat) are not in every kernel; FUSE is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def folded(name: str) -> str:
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


@contextmanager
def caseless_disk(folder: Path) -> Iterator[Path]:
    """Mounts one below `folder`; skips where the user may not open /dev/fuse."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"needs a /dev/fuse that may be opened: {error.strerror}")
    backing, mount = folder / "backing", folder / "mount"
    backing.mkdir(parents=True)
    mount.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, backing, mount], cwd=Path(__file__).parents[2]
    )
    try:
        for _ in range(300):
            if os.path.ismount(mount):
                break
            assert server.poll() is None, "it does not mount"
            time.sleep(0.1)
        (mount / "Probe").touch()
        assert (mount / "pROBE").exists()
        (mount / "probe").unlink()
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
        server.wait(30)


def main(backing: str, mount: str) -> None:
    from mfusepy import FUSE, Operations

    class Caseless(Operations):
        use_ns = True

        def _find(self, path: str) -> str:
            """The real path: each name as the disk spells it, or as given if it does not exist."""
            found = backing
            for name in filter(None, path.split("/")):
                try:
                    there = os.listdir(found)
                except OSError:
                    there = []
                match = (
                    name
                    if name in there
                    else next((n for n in there if folded(n) == folded(name)), name)
                )
                found = os.path.join(found, match)
            return found

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            status = os.lstat(self._find(path))
            keys = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            times = {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}
            return {**{key: getattr(status, key) for key in keys}, **times}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._find(path))]

        def open(self, path: str, flags: int) -> int:
            return os.open(self._find(path), flags & ~(os.O_CREAT | os.O_EXCL))

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(self._find(path), os.O_RDWR | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._find(path), length)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(self._find(path), mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(self._find(path))
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(self._find(path))
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(self._find(old), self._find(new))
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, self._find(target))
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(self._find(source), self._find(target))
            return 0

        def readlink(self, path: str) -> str:
            return os.readlink(self._find(path))

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._find(path), mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.lchown(self._find(path), uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int]) -> int:
            os.utime(self._find(path), ns=times, follow_symlinks=False)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(backing)
            keys = (
                "f_bavail",
                "f_bfree",
                "f_blocks",
                "f_bsize",
                "f_favail",
                "f_ffree",
                "f_files",
                "f_frsize",
                "f_namemax",
            )
            return {key: getattr(status, key) for key in keys}

    FUSE(Caseless(), mount, foreground=True, nothreads=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
