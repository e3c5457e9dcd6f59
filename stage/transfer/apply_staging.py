"""The folder `<bundle>.apply.partial`, where `apply` keeps files that are not yet in the bundle.

It holds pieces of earlier volumes, and new files that are built but not in place. They are named by
the patch and by content, so that a later run finds the files of an earlier run, and none of another
patch.

Also checks the paths in the bundle where `apply` puts files. A link there could lead a file out of
the bundle, and a folder with files may belong to the user: both are refused.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from stage.errors import IncompleteError, PolicyError, UsageError
from stage.transfer.patch import Content, PatchPlan, Volume
from stage.util.digests import sha256_of_bytes
from stage.util.files import write_atomically
from stage.util.paths import printable

CHUNK = 2**22


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
    """`<bundle>.apply.partial`: pieces of volumes that came earlier, and files that are built."""

    def __init__(self, root: Path, plan: PatchPlan, volumes: list[Volume]) -> None:
        self._root = root
        self._plan = plan
        self._volumes = {volume.number: volume for volume in volumes}
        self.folder = place_beside(root)
        self._kept = self.folder / plan.id[:16]

    def check_all_volumes(self) -> None:
        """Continues only with all volumes at hand; else keeps the pieces of those given.

        Raises:
            IncompleteError: saying which are missing.
        """
        missing = [
            number
            for number in range(1, self._plan.count + 1)
            if number not in self._volumes and not self._mark(number).exists()
        ]
        if not missing:
            return
        for volume in self._volumes.values():
            self._keep(volume)
        shown = ", ".join(str(number) for number in missing[:20]) + (
            ", ..." if len(missing) > 20 else ""
        )
        raise IncompleteError(
            f"Of {self._plan.count} volumes still missing: {shown}. The others are kept in "
            f"{self.folder}; the bundle is unchanged.",
            f"stage apply {self._root} VOLUME   with each missing volume, in any order",
        )

    def _mark(self, number: int) -> Path:
        return self._kept / f"volume-{number}"

    def _keep(self, volume: Volume) -> None:
        if self._mark(volume.number).exists():
            return
        self._kept.mkdir(parents=True, exist_ok=True)
        for piece in volume.pieces:
            with (
                open(volume.path_of(piece), "rb") as source,
                open(self._kept / piece, "wb") as target,
            ):
                shutil.copyfileobj(source, target, CHUNK)
                target.flush()
                os.fsync(target.fileno())
        write_atomically(self._mark(volume.number), b"")

    def piece(self, sha256: str) -> Path:
        """Where the piece of that sha256 lies now."""
        volume = self._volumes.get(self._plan.volumes[sha256])
        return volume.path_of(sha256) if volume else self._kept / sha256

    def built(self, path: str) -> Path:
        """The path of the new file until all new files are ready."""
        self._kept.mkdir(parents=True, exist_ok=True)
        return self._kept / f"new-{sha256_of_bytes(path.encode())}"

    def assemble(
        self, target: Path, source: Path, content: Content, progress: Callable[[int], None]
    ) -> str:
        """Writes `source` with the pieces of the patch; returns the sha256 of the written bytes."""
        digest, at = sha256(), 0
        with open(target, "wb") as sink:

            def copy(path: Path, start: int, end: int) -> None:
                with open(path, "rb", buffering=0) as stream:
                    stream.seek(start)
                    while start < end and (data := stream.read(min(CHUNK, end - start))):
                        sink.write(data)
                        digest.update(data)
                        start += len(data)
                        progress(len(data))

            for piece in content.pieces:
                if at < piece.start:
                    copy(source, at, piece.start)
                copy(self.piece(piece.sha256), 0, piece.end - piece.start)
                at = piece.end
            if at < content.size:
                copy(source, at, content.size)
            sink.flush()
            os.fsync(sink.fileno())
        return digest.hexdigest()

    def tag(self, path: str) -> bytes:
        """The bytes of a file beside the payload that the patch carries."""
        digest = self._plan.tags[path]
        pieces = self._plan.contents[digest].pieces
        data = b"".join(self.piece(piece.sha256).read_bytes() for piece in pieces)
        if sha256_of_bytes(data) != digest:
            raise UsageError(
                f"{path}: the patch contradicts itself.", "Make it again with `stage patch`."
            )
        return data

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
