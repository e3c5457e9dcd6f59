"""Other paths for names that are one name on a disk that ignores case.

On a Mac's disk, `share/terminfo/n` and `share/terminfo/N` of ncurses are one file. So one of the
two gets an ending (`N.airlift-aside-1`) in the folder of an environment. The image and all digests
have the right name. On other disks this module is not used. conda packages are repacked with the
other names, because py-rattler unpacks and links them by their names; wheels are written to the
other paths.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stage.paths import folded

_ENDING = re.compile(r"\.airlift-aside-[0-9]+(?=/|$)")
_ENDING_BYTES = re.compile(_ENDING.pattern.encode(), re.MULTILINE)


def real_name(path: str) -> str:
    """The name in the environment of the file at `path` in the folder."""
    return _ENDING.sub("", path)


def real_line(line: bytes) -> bytes:
    """`real_name` for a line of bytes that ends in a path."""
    return _ENDING_BYTES.sub(b"", line)


def paths_aside(names: Iterable[str]) -> dict[str, str]:
    """Name -> other path, for names that collide on a disk that ignores case.

    Of colliding files or folders, the one with the most files keeps its name.
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for part in name.split("/"):
            node = node.setdefault(part, {})
    return dict(_moved_aside(tree, "", ""))


def _moved_aside(node: Mapping[str, Any], name: str, path: str) -> Iterator[tuple[str, str]]:
    taken: dict[str, int] = {}
    for part in sorted(node, key=lambda part: (-_count(node[part]), part)):
        number = taken[folded(part)] = taken.get(folded(part), -1) + 1
        ending = f".airlift-aside-{number}" if number else ""
        here, there = f"{name}{part}", f"{path}{part}{ending}"
        if node[part]:
            yield from _moved_aside(node[part], f"{here}/", f"{there}/")
        elif here != there:
            yield here, there


def _count(node: Mapping[str, Any]) -> int:
    return sum(map(_count, node.values())) if node else 1


@dataclass(frozen=True)
class CondaPackage:
    """A conda package as a file.

    Attributes:
        index: its `index.json`.
        names: its files, by their names in the package.
        entry_points: commands that an installer generates, for a `noarch: python` package; None: it
            is no such package.
    """

    file: Path
    index: Mapping[str, Any]
    names: tuple[str, ...]
    entry_points: tuple[str, ...] | None

    @classmethod
    def read(cls, file: Path) -> CondaPackage:
        """Reads the index of a package.

        Raises:
            ValueError: it has no list of files, which packages have since 2017.
        """
        found: dict[str, Any] = {"info/paths.json": None, "info/index.json": {}}
        found["info/link.json"] = {}
        with _opened(file, "info") as archive:
            for entry in archive:
                if entry.name in found:
                    stream = archive.extractfile(entry)
                    assert stream is not None
                    found[entry.name] = json.load(stream)
        paths, index, link = found.values()
        if paths is None:
            raise ValueError(f"{file.name} has no info/paths.json")
        noarch = link.get("noarch") or {}
        commands = (entry.partition("=")[0].strip() for entry in noarch.get("entry_points") or ())
        names = tuple(entry["_path"] for entry in paths["paths"])
        return cls(file, index, names, tuple(commands) if noarch.get("type") == "python" else None)

    def installed(self, site_packages: str) -> dict[str, str]:
        """Name of a file in the package -> its name in an environment."""
        if self.entry_points is None:
            return {name: name for name in self.names}
        installed = {}
        for name in self.names:
            new = re.sub(r"^site-packages/", f"{site_packages}/", name)
            installed[name] = re.sub(r"^python-scripts/", "bin/", new)
        return installed

    def renamed(self, aside: Mapping[str, str], folder: Path, site_packages: str) -> Path:
        """The package, repacked if it has files that are moved aside; returns its path.

        Args:
            aside: the result of `paths_aside`.
            folder: the folder for the repacked file, which keeps its name.
        """
        installed = self.installed(site_packages)
        new = {
            own: _as_packed(aside[name], own, site_packages)
            for own, name in installed.items()
            if name in aside
        }
        if not new:
            return self.file
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / self.file.name
        if self.file.name.endswith(".conda"):
            with zipfile.ZipFile(self.file) as source, zipfile.ZipFile(target, "w") as out:
                for member in source.namelist():
                    content = source.read(member)
                    if ".tar.zst" in member:
                        content = _repacked(content, new, "zstd")
                    out.writestr(member, content)
        else:
            target.write_bytes(_repacked(self.file.read_bytes(), new, "bz2"))
        return target


def digests(file: Path) -> dict[str, Any]:
    """The fields of a package's file in its `conda-meta` record."""
    content = file.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _as_packed(path: str, own: str, site_packages: str) -> str:
    if own.startswith("site-packages/"):
        return "site-packages" + path.removeprefix(site_packages)
    if own.startswith("python-scripts/"):
        return "python-scripts" + path.removeprefix("bin")
    return path


@contextmanager
def _opened(file: Path, part: str) -> Iterator[tarfile.TarFile]:
    """The tar in a package; in a `.conda`, which has two, the one whose name begins with `part`."""
    if not file.name.endswith(".conda"):
        with tarfile.open(file, "r:bz2") as archive:
            yield archive
        return
    with zipfile.ZipFile(file) as package:
        member = next(name for name in package.namelist() if name.startswith(f"{part}-"))
        with tarfile.open(fileobj=_unpacked(package.read(member), "zstd"), mode="r:") as archive:
            yield archive


def _unpacked(content: bytes, how: str) -> IO[bytes]:
    if how == "bz2":
        return io.BytesIO(bz2.decompress(content))
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        return io.BytesIO(stream.read())


def _packed(content: bytes, how: str) -> bytes:
    if how == "bz2":
        return bz2.compress(content, 1)
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def _repacked(content: bytes, new: Mapping[str, str], how: str) -> bytes:
    """A compressed tar with other names for its files, and in its lists of files."""
    lists = {"info/paths.json": _renamed_paths, "info/files": _renamed_lines}
    sink = io.BytesIO()
    with (
        tarfile.open(fileobj=_unpacked(content, how), mode="r:") as source,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for entry in source:
            data = source.extractfile(entry) if entry.isreg() else None
            if data is not None and entry.name in lists:
                text = lists[entry.name](data.read(), new)
                entry.size, data = len(text), io.BytesIO(text)
            if entry.islnk():  # a hard link names another entry
                entry.linkname = new.get(entry.linkname, entry.linkname)
            entry.name = new.get(entry.name, entry.name)
            entry.pax_headers = {}
            out.addfile(entry, data)
    return _packed(sink.getvalue(), how)


def _renamed_paths(text: bytes, new: Mapping[str, str]) -> bytes:
    document = json.loads(text)
    for entry in document["paths"]:
        entry["_path"] = new.get(entry["_path"], entry["_path"])
    return json.dumps(document).encode()


def _renamed_lines(text: bytes, new: Mapping[str, str]) -> bytes:
    return "".join(f"{new.get(line, line)}\n" for line in text.decode().splitlines()).encode()
