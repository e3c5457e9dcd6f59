"""Where an `apply` keeps what is not yet in the bundle: `<bundle>.apply.partial`.

Pieces of volumes that came earlier, and new files that are built but not in place. Named by the patch and by content,
so that a later run finds what an earlier one left, and nothing of another patch.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from stage.digest import sha256_of_bytes
from stage.disk import write_atomically
from stage.errors import IncompleteError, UsageError
from stage.patchfile import Content, Plan, Volume

CHUNK = 2**22


def place_beside(root: Path) -> Path:
    """Where an `apply` works: beside the bundle itself, not beside a link to it, so that a rename puts files in place.

    Raises:
        UsageError: from there nothing can be renamed into the bundle: it is a mount point.
    """
    real = root.resolve()
    folder = real.with_name(f"{real.name}.apply.partial")
    if real.stat().st_dev != real.parent.stat().st_dev or _is_mounted_apart(real):
        raise UsageError(
            f"{root}: this folder is a mount point: what changes is built beside a bundle and renamed into it, and "
            f"{real.parent} is another disk, or mounted apart. Nothing was changed.",
            "Give the bundle where its disk has a folder above it (not as it is bound into a container), or move it "
            "into a folder of its own on that disk.",
        )
    return folder


def _is_mounted_apart(folder: Path) -> bool:
    """Whether the system tells apart two mounts of one disk here: it says so before it looks for what to rename."""
    try:
        (folder.parent / f".{os.getpid()}.nothing.partial").rename(folder / f".{os.getpid()}.nothing.partial")
    except OSError as error:
        return error.errno == errno.EXDEV
    return False


class Store:
    """`<bundle>.apply.partial`: pieces of volumes that came earlier, and files that are built."""

    def __init__(self, root: Path, plan: Plan, volumes: list[Volume]) -> None:
        self._root = root
        self._plan = plan
        self._volumes = {volume.number: volume for volume in volumes}
        self.folder = place_beside(root)
        self._kept = self.folder / plan.id[:16]

    def require_all_volumes(self) -> None:
        """Goes on only with all volumes at hand; else keeps the pieces of those given.

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
        shown = ", ".join(str(number) for number in missing[:20]) + (", ..." if len(missing) > 20 else "")
        raise IncompleteError(
            f"Of {self._plan.count} volumes still missing: {shown}. The others are kept in {self.folder}; "
            f"the bundle is as it was.",
            f"stage apply {self._root} VOLUME   with each that is missing, in any order",
        )

    def _mark(self, number: int) -> Path:
        return self._kept / f"volume-{number}"

    def _keep(self, volume: Volume) -> None:
        if self._mark(volume.number).exists():
            return
        self._kept.mkdir(parents=True, exist_ok=True)
        for piece in volume.pieces:
            with open(volume.path_of(piece), "rb") as source, open(self._kept / piece, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
                target.flush()
                os.fsync(target.fileno())
        write_atomically(self._mark(volume.number), b"")

    def piece(self, sha256: str) -> Path:
        """Where the piece of that sha256 lies now."""
        volume = self._volumes.get(self._plan.volumes[sha256])
        return volume.path_of(sha256) if volume else self._kept / sha256

    def built(self, path: str) -> Path:
        """Where the new file for that path waits until all are ready."""
        self._kept.mkdir(parents=True, exist_ok=True)
        return self._kept / f"new-{sha256_of_bytes(path.encode())}"

    def assemble(self, target: Path, source: Path, content: Content, progress: Callable[[int], None]) -> str:
        """Writes a content, `source` with the carried pieces in their places; returns the sha256 of what it wrote."""
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
            raise UsageError(f"{path}: the patch contradicts itself.", "Make it anew with `stage patch`.")
        return data

    def remove(self) -> None:
        """Deletes all of it: the bundle is sound."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
