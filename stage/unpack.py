"""Unpacks an archive from somewhere else into a folder, and nothing outside it.

tar (plain, gz, bz2, xz) and zip, one entry after the other, straight to disk. Entries are judged by their names and
kinds before a byte of them is written; links, devices, encrypted entries, names that may not be in a bundle, twins and
bombs refuse the whole archive. Nothing of an archive's modes, owners and times is kept.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from stage.disk import human_size
from stage.errors import DamageError, PolicyError, UsageError
from stage.names import check_collisions, check_path, printable

MAX_RATIO = 1000  # deflate ends at 1032:1; text and zeros in real data sets stay below 200:1
RATIO_COUNTS_ABOVE = 64 * 2**20  # bytes: a small file of zeros is no bomb
MAX_SIZE = 2 * 2**40  # bytes
MAX_ENTRIES = 2_000_000
MAX_HEADER = 1 << 20  # bytes of a tar extension header (long names, pax): tarfile reads them whole
CHUNK = 1 << 20
_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_END = tarfile.EOFHeaderError  # type: ignore[attr-defined]  # a block of zeros
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22  # of the end record without its comment
_ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
# What the standard library's readers raise at bytes that are no archive, or none any more (found by fuzzing).
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
)


@dataclass(frozen=True)
class Limits:
    """When an archive is a bomb: bytes it unpacks to, how many times its own size, and files."""

    size: int = MAX_SIZE
    ratio: int = MAX_RATIO
    entries: int = MAX_ENTRIES


def is_archive(path: Path) -> bool:
    """Whether a file is an archive this room can unpack, by its first bytes."""
    return _is_tar(path) or _is_zip(path)


def _is_tar(path: Path) -> bool:
    try:
        with _plain(path) as stream:
            tarfile.TarInfo.frombuf(stream.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    except EOFError:  # it begins as one
        return True
    except (OSError, *_BROKEN):
        return False
    return True


def _is_zip(path: Path) -> bool:
    """By its beginning: `zipfile.is_zipfile` looks at the end, and a tar whose last file is a zip ends as one."""
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", _ZIP_END)


def unpack(archive: Path, target: Path, what: str, limits: Limits | None = None) -> list[str]:
    """Unpacks into a new folder; returns the paths of the files below it, sorted.

    Args:
        what: how to call the archive in messages.

    Raises:
        PolicyError: an entry that may not be in a bundle, or a bomb.
        DamageError: the archive is torn or damaged.
        UsageError: no archive, or one with nothing in it.
    """
    if not is_archive(archive):
        raise UsageError(
            f"{what}: not an archive: neither tar (plain, gz, bz2, xz) nor zip.",
            "Leave `unpack: true` out, or check the address in a browser.",
        )
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    out = _Out(target, what, archive.stat().st_size, limits or Limits())
    try:
        if _is_tar(archive):
            _unpack_tar(archive, out)
        else:
            _unpack_zip(archive, out)
    except _BROKEN as error:
        raise _damaged(what, error) from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # the disk's words; EINVAL: it sent us before its own start
            raise
        raise _damaged(what, error) from None
    if not out.paths:
        raise UsageError(f"{what}: the archive has no file in it.", "Check the address.")
    return sorted(out.paths)


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Out:
    """The folder that fills, and the watch over what goes in."""

    def __init__(self, target: Path, what: str, packed: int, limits: Limits) -> None:
        self.target, self.what, self.packed, self.limits = target, what, packed, limits
        self.paths: list[str] = []
        self.size = 0

    def judge(self, names: list[str]) -> None:
        """Refuses names that would be one file, or leave the folder."""
        if len(names) > self.limits.entries:
            raise PolicyError(f"{self.what}: the archive has more than {self.limits.entries:,} files.", _BOMB)
        for name in names:
            check_path(name, self.what, _UNPACK)
        check_collisions(names, self.what, _UNPACK)

    def refuse(self, name: str, problem: str) -> PolicyError:
        return PolicyError(f"{self.what}: the archive's {printable(name)} is {problem}; nothing was kept.", _UNPACK)

    def write(self, name: str, source: _Reader, announced: int) -> None:
        """One file, as it comes; more than announced, or than the limits, is never written."""
        path = self.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.check(announced)
        written = 0
        with open(path, "xb") as file:
            while chunk := source.read(CHUNK):
                written += len(chunk)
                if written > announced:
                    raise self.refuse(name, f"larger than the {announced} bytes it announces")
                self.size += len(chunk)
                self.check(0)
                file.write(chunk)
        if written != announced:
            raise EOFError(f"{name} ends after {written} of {announced} bytes")
        self.paths.append(name)

    def check(self, more: int) -> None:
        """Refuses a bomb: by what was written, and by what is announced next."""
        size = self.size + more
        if size > self.limits.size:
            raise PolicyError(
                f"{self.what}: the archive unpacks to more than {human_size(self.limits.size)}, which is the limit.",
                _BOMB,
            )
        if size > RATIO_COUNTS_ABOVE and size > self.limits.ratio * max(self.packed, 1):
            raise PolicyError(
                f"{self.what}: the archive of {human_size(self.packed)} unpacks to {human_size(size)} or more: over "
                f"{self.limits.ratio} times its size, which is the limit.",
                _BOMB,
            )


def _unpack_zip(archive: Path, out: _Out) -> None:
    _require_zip_end(archive)
    with zipfile.ZipFile(archive) as opened:
        if min((entry.header_offset for entry in opened.infolist()), default=0) > 0:
            raise EOFError("something precedes its first file: another zip?")
        entries = [entry for entry in opened.infolist() if not entry.filename.endswith("/")]
        for entry in entries:
            if entry.orig_filename != entry.filename:  # zipfile cuts a name at its first zero byte
                raise out.refuse(entry.orig_filename, "a name with a zero byte or a foreign separator")
            kind = entry.external_attr >> 28  # the file type of st_mode, where a Unix made the archive
            if kind not in (0, 0o10):
                raise out.refuse(entry.filename, "a link or a special file")
            if entry.flag_bits & 0x41:
                raise out.refuse(entry.filename, "encrypted")
            if entry.compress_type not in _ZIP_METHODS:
                raise out.refuse(entry.filename, f"packed by a method (number {entry.compress_type}) not known here")
        out.judge([entry.filename for entry in entries])
        for folder in opened.infolist():
            if folder.filename.endswith("/"):
                check_path(folder.filename.rstrip("/"), out.what, _UNPACK)
        out.check(sum(entry.file_size for entry in entries))
        for entry in entries:
            with opened.open(entry) as source:
                out.write(entry.filename, source, entry.file_size)


def _require_zip_end(archive: Path) -> None:
    """The end record that zipfile goes by has to reach the file's end; zipfile lets anything follow."""
    with open(archive, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _ZIP_END_SIZE - 0xFFFF))
        tail = file.read()
    at = len(tail) - _ZIP_END_SIZE
    if not (tail[at:].startswith(_ZIP_END) and tail.endswith(b"\0\0")):
        at = tail.rfind(_ZIP_END)
    if at < 0 or at + _ZIP_END_SIZE > len(tail):
        raise EOFError("no end of a zip")
    (comment,) = struct.unpack_from("<H", tail, at + _ZIP_END_SIZE - 2)
    if at + _ZIP_END_SIZE + comment < len(tail):
        raise EOFError("something follows its end")
    if at + _ZIP_END_SIZE + comment > len(tail):
        raise EOFError("its end is cut off")


def _unpack_tar(archive: Path, out: _Out) -> None:
    """Twice through the archive: all names are judged before the first byte is written."""
    names: list[str] = []
    with _tar(archive, out) as opened:
        for entry in _entries(opened):
            name = _name(entry)
            if entry.isdir():
                if name not in ("", "."):
                    check_path(name, out.what, _UNPACK)
                continue
            if not entry.isreg() or entry.issparse() or entry.size < 0:
                kind = "a link" if entry.issym() or entry.islnk() else "a special or sparse file"
                raise out.refuse(entry.name, kind)
            names.append(name)
            out.check(entry.size)
            if len(names) > out.limits.entries:
                break
        else:
            _require_end(opened)
    out.judge(names)
    with _tar(archive, out) as opened:
        for entry in _entries(opened):
            if entry.isreg():
                source = opened.extractfile(entry)
                assert source is not None
                out.write(_name(entry), source, entry.size)


def _require_end(opened: tarfile.TarFile) -> None:
    """Reads on to the very end: a decompressor's checksum comes last, and what tar does not see would be lost."""
    stream = cast("_Reader", opened.fileobj)
    while data := stream.read(CHUNK):
        if data.strip(b"\0"):
            raise EOFError("something follows its end")


@contextmanager
def _tar(archive: Path, out: _Out) -> Iterator[tarfile.TarFile]:
    with _plain(archive) as stream:
        watched: Any = _Watched(stream, out)
        with tarfile.open(fileobj=watched, mode="r|", tarinfo=_Entry) as opened:
            yield opened


@contextmanager
def _plain(archive: Path) -> Iterator[IO[bytes]]:
    """The archive's bytes without compression."""
    with open(archive, "rb") as file:
        start = file.read(6)
        file.seek(0)
        if start.startswith(b"\x1f\x8b"):
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        elif start.startswith(b"BZh"):
            yield bz2.BZ2File(file)
        elif start == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(file, format=lzma.FORMAT_XZ) as opened:
                yield opened
        else:
            yield file


class _Watched:
    """Counts what a decompressor gives, headers and gaps too: a tar can be a bomb without having a file."""

    def __init__(self, stream: IO[bytes], out: _Out) -> None:
        self._stream, self._out, self._read = stream, out, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._read += len(data)
        limits = self._out.limits
        if self._read > RATIO_COUNTS_ABOVE and self._read > limits.ratio * max(self._out.packed, 1) + CHUNK:
            raise PolicyError(
                f"{self._out.what}: the archive of {human_size(self._out.packed)} unpacks to {human_size(self._read)} "
                f"or more: over {limits.ratio} times its size, which is the limit.",
                _BOMB,
            )
        return data


class _Entry(tarfile.TarInfo):
    """A tar entry whose long name or pax header has a bounded size: tarfile reads those whole.

    And one that is sound: a header that is not one, or an archive cut between two, is to tarfile the end of it all.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        try:
            return super().frombuf(buf, encoding, errors)
        except _END:
            raise
        except tarfile.HeaderError as error:
            raise EOFError(f"no sound header where one has to be: {error}") from None

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Before Python 3.11.10 a long run of digits takes tarfile hours (CVE-2024-6232)."""
        stream: Any = archive.fileobj
        text = stream.read(self._block(self.size))  # type: ignore[attr-defined]
        if re.search(rb"[0-9]{256}", text):
            raise ValueError("an extended header of digits")
        archive.fileobj = _Again(archive, stream, text)  # type: ignore[assignment]
        return super()._proc_pax(archive)  # type: ignore[misc, no-any-return]

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENSIONS and not 0 <= self.size <= MAX_HEADER:
            raise PolicyError(f"the archive has a header of {human_size(self.size)} in it.", _BOMB)
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


class _Again:
    """Gives bytes that were read already once more, then makes room for the stream they came from."""

    def __init__(self, archive: tarfile.TarFile, stream: Any, data: bytes) -> None:
        self._archive, self._stream, self._data = archive, stream, data

    def read(self, size: int) -> bytes:
        self._archive.fileobj = self._stream
        return self._data


def _entries(opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The entries one by one; tarfile would keep them all."""
    for entry in opened:
        yield entry
        opened.members = []  # type: ignore[attr-defined]


def _name(entry: tarfile.TarInfo) -> str:
    name = entry.name
    while name.startswith("./"):
        name = name[2:]
    return name


def _damaged(what: str, error: Exception) -> DamageError:
    return DamageError(
        f"{what}: the archive is torn or damaged: {error or type(error).__name__}.",
        "The published file itself is broken, or not the one you mean: check its address and sha256.",
    )


_BOMB = "If it is what you want, unpack it yourself and name the folder with `path:`."
_UNPACK = "Unpack it yourself, leave that out, and name the folder with `path:`."
