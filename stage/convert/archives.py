"""Unpacks an untrusted archive into a folder; writes nothing outside that folder.

Formats: tar (plain, gz, bz2, xz) and zip. All names and kinds of entries are checked before the
first byte is written. The whole archive is refused for links, devices, encrypted entries, names
that are not allowed in a bundle, names that collide, and archive bombs. Modes, owners and times of
the archive are not kept.
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

from stage.errors import DamageError, PolicyError, UsageError
from stage.files import human_size, is_pointer
from stage.paths import check_collisions, check_path, printable
from stage.text import entry_name

MAX_RATIO = 1000  # deflate ends at 1032:1; text and zeros in real data sets stay below 200:1
RATIO_COUNTS_ABOVE = 64 * 2**20  # bytes: a small file of zeros is not a bomb
MAX_SIZE = 2 * 2**40  # bytes
MAX_ENTRIES = 2_000_000
MAX_HEADER = 1 << 20  # bytes of a tar extension header (long names, pax): tarfile reads it whole
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
# What the readers of the standard library raise for damaged archives (found by fuzzing).
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
    """Above these limits an archive is refused as a bomb.

    Attributes:
        size: unpacked bytes.
        ratio: unpacked bytes per byte of the archive.
        entries: number of files.
    """

    size: int = MAX_SIZE
    ratio: int = MAX_RATIO
    entries: int = MAX_ENTRIES


def is_archive(path: Path) -> bool:
    """Whether a file is an archive that `unpack` supports, by its first bytes."""
    return _is_tar(path) or _is_zip(path)


def _is_tar(path: Path) -> bool:
    try:
        with _plain(path) as stream:
            tarfile.TarInfo.frombuf(stream.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    except EOFError:  # it begins as a compressed file, and is cut
        return True
    except (OSError, *_BROKEN):
        return False
    return True


def _is_zip(path: Path) -> bool:
    """Whether the first bytes are of a zip.

    `zipfile.is_zipfile` reads the end instead; a tar whose last file is a zip passes it.
    """
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", _ZIP_END)


def unpack(archive: Path, target: Path, what: str, limits: Limits | None = None) -> list[str]:
    """Unpacks an archive into a new folder.

    Args:
        target: the folder; replaced if it exists.
        what: names the archive in messages.
        limits: None: the default ones.

    Returns:
        The paths of the files, relative to `target`, sorted.

    Raises:
        PolicyError: an entry that is not allowed in a bundle, or a bomb.
        DamageError: the archive is damaged or cut.
        UsageError: not an archive, an empty one, or one with pointers of Git LFS.
    """
    if not is_archive(archive):
        raise UsageError(
            f"{what}: not an archive: neither tar (plain, gz, bz2, xz) nor zip.",
            "Omit `unpack: true`, or check the address in a browser.",
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
        # EINVAL: an offset of the archive is before its start. Other numbers are of the disk.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _damaged(what, error) from None
    if not out.paths:
        raise UsageError(f"{what}: the archive has no file in it.", "Check the address.")
    return sorted(out.paths)


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Out:
    """The target folder; checks names and sizes before it writes.

    Attributes:
        packed: size of the archive, in bytes.
        paths: of the files written so far.
        size: bytes written so far.
    """

    def __init__(self, target: Path, what: str, packed: int, limits: Limits) -> None:
        self.target, self.what, self.packed, self.limits = target, what, packed, limits
        self.paths: list[str] = []
        self.size = 0

    def check_names(self, names: list[str]) -> None:
        """Checks that the names are allowed in a bundle and do not collide.

        Raises:
            PolicyError: they do, or there are too many.
        """
        if len(names) > self.limits.entries:
            raise PolicyError(
                f"{self.what}: the archive has more than {self.limits.entries:,} files.", _BOMB
            )
        for name in names:
            check_path(name, self.what, _UNPACK)
        check_collisions(names, self.what, _UNPACK)

    def error(self, name: str, problem: str) -> PolicyError:
        """The error for an entry that is not allowed."""
        return PolicyError(
            f"{self.what}: the archive's {printable(name)} is {problem}; nothing was kept.", _UNPACK
        )

    def write(self, name: str, source: _Reader, announced: int) -> None:
        """Writes one file.

        Args:
            announced: its size in bytes, as the archive states it.

        Raises:
            PolicyError: it is larger than announced, or than the limits allow.
            EOFError: it is smaller than announced.
            UsageError: it is a pointer of Git LFS.
        """
        path = self.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.check(announced)
        written = 0
        with open(path, "xb") as file:
            while chunk := source.read(CHUNK):
                written += len(chunk)
                if written > announced:
                    raise self.error(name, f"larger than the {announced} bytes it announces")
                self.size += len(chunk)
                self.check(0)
                file.write(chunk)
        if written != announced:
            raise EOFError(f"{name} ends after {written} of {announced} bytes")
        if is_pointer(path, written):
            raise UsageError(
                f"{self.what}: the archive's {printable(name)} is a Git LFS pointer, "
                "not the file itself.",
                "git clone the repository, run git lfs pull in it, "
                "and name the folder with `path:`.",
            )
        self.paths.append(name)

    def check(self, more: int) -> None:
        """Checks the limits for the bytes written so far and `more` announced bytes.

        Raises:
            PolicyError: the archive is a bomb.
        """
        size = self.size + more
        if size > self.limits.size:
            raise PolicyError(
                f"{self.what}: the archive unpacks to more than {human_size(self.limits.size)}, "
                "which is the limit.",
                _BOMB,
            )
        self.check_ratio(size)

    def check_ratio(self, size: int, margin: int = 0) -> None:
        """Checks that the archive does not unpack to too many times its own size.

        Args:
            size: unpacked bytes.
            margin: bytes above the limit that are allowed.

        Raises:
            PolicyError: it does.
        """
        limit = self.limits.ratio * max(self.packed, 1) + margin
        if size > RATIO_COUNTS_ABOVE and size > limit:
            raise PolicyError(
                f"{self.what}: the archive of {human_size(self.packed)} unpacks to "
                f"{human_size(size)} or more: over {self.limits.ratio} times its size, "
                "which is the limit.",
                _BOMB,
            )


def _unpack_zip(archive: Path, out: _Out) -> None:
    _check_zip_end(archive)
    with zipfile.ZipFile(archive) as opened:
        if min((entry.header_offset for entry in opened.infolist()), default=0) > 0:
            raise EOFError("something precedes its first file: another zip?")
        named = [(_zip_name(entry, out), entry) for entry in opened.infolist()]
        files = [(name, entry) for name, entry in named if not name.endswith("/")]
        for name, entry in files:
            _check_zip_entry(entry, name, out)
        out.check_names([name for name, _ in files])
        for name, _ in named:
            if name.endswith("/"):
                check_path(name.rstrip("/"), out.what, _UNPACK)
        out.check(sum(entry.file_size for _, entry in files))
        for name, entry in files:
            with opened.open(entry) as source:
                out.write(name, source, entry.file_size)


def _check_zip_entry(entry: zipfile.ZipInfo, name: str, out: _Out) -> None:
    kind = entry.external_attr >> 28  # the file type of st_mode, if a Unix made the archive
    if kind not in (0, 0o10):
        raise out.error(name, "a link or a special file")
    if entry.flag_bits & 0x41:
        raise out.error(name, "encrypted")
    if entry.compress_type not in _ZIP_METHODS:
        raise out.error(name, f"packed by an unknown method (number {entry.compress_type})")


_UTF8_FLAG, _UNICODE_PATH = 0x800, 0x7075  # PKWARE's APPNOTE 6.3.10, 4.4.4 bit 11 and 4.6.9


def _zip_name(entry: zipfile.ZipInfo, out: _Out) -> str:
    """The name of an entry, if its encoding is known.

    It is UTF-8 if the flag or the Unicode path extra field says so, or if a Unix packed it and the
    bytes are valid UTF-8 (macOS sets no flag). Other packers write names in the code page of their
    system and do not record which; `zipfile` assumes code page 437.

    Raises:
        PolicyError: the encoding is not known, or the name has a zero byte.
    """
    name = entry.orig_filename
    if not entry.flag_bits & _UTF8_FLAG:
        raw = name.encode("cp437")
        stated = _unicode_path(entry.extra, raw)
        if stated or not raw.isascii():
            said = stated or (raw if entry.create_system == _UNIX else b"")
            name = entry_name(said, raw, out.what, _UNZIP)
    if "\0" in name:  # zipfile would cut the name there
        raise out.error(name, "a name with a zero byte")
    return name


_UNZIP = "python3 -m zipfile --metadata-encoding {} -e FILE FOLDER (Python 3.11 or newer)"
_UNTAR = "python3 -c \"import tarfile; tarfile.open('FILE', encoding='{}').extractall('FOLDER')\""
_UNIX = 3  # the host that packed: APPNOTE 4.4.2


def _unicode_path(extra: bytes, raw: bytes) -> bytes:
    """The name in the Unicode path extra field; empty if missing, or with another CRC."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == _UNICODE_PATH and len(field) > 5 and field[0] == 1:
            return field[5:] if struct.unpack_from("<I", field, 1)[0] == zlib.crc32(raw) else b""
    return b""


def _check_zip_end(archive: Path) -> None:
    """Checks that the end record is the last part of the file; `zipfile` accepts trailing bytes.

    Raises:
        EOFError: it is not.
    """
    with open(archive, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _ZIP_END_SIZE - 0xFFFF))
        tail = file.read()
    at = len(tail) - _ZIP_END_SIZE
    if not (tail[at:].startswith(_ZIP_END) and tail.endswith(b"\0\0")):
        at = tail.rfind(_ZIP_END)
    if at < 0 or at + _ZIP_END_SIZE > len(tail):
        raise EOFError("it has no end record of a zip")
    (comment,) = struct.unpack_from("<H", tail, at + _ZIP_END_SIZE - 2)
    if at + _ZIP_END_SIZE + comment < len(tail):
        raise EOFError("something follows its end")
    if at + _ZIP_END_SIZE + comment > len(tail):
        raise EOFError("its end is cut off")


def _unpack_tar(archive: Path, out: _Out) -> None:
    """Reads the archive twice: all names are checked before the first byte is written."""
    names: list[str] = []
    with _tar(archive, out) as opened:
        for entry in _entries(opened):
            name = _name(entry)
            if any("\udc80" <= character <= "\udcff" for character in name):  # not UTF-8
                raw = name.encode("utf-8", "surrogateescape")
                name = entry_name(b"", raw, out.what, _UNTAR)
            if entry.isdir():
                if name not in ("", "."):
                    check_path(name, out.what, _UNPACK)
                continue
            if not entry.isreg() or entry.issparse() or entry.size < 0:
                kind = "a link" if entry.issym() or entry.islnk() else "a special or sparse file"
                raise out.error(entry.name, kind)
            names.append(name)
            out.check(entry.size)
            if len(names) > out.limits.entries:
                break
        else:
            _check_end(opened)
    out.check_names(names)
    with _tar(archive, out) as opened:
        for entry in _entries(opened):
            if entry.isreg():
                source = opened.extractfile(entry)
                assert source is not None
                out.write(_name(entry), source, entry.size)


def _check_end(opened: tarfile.TarFile) -> None:
    """Reads to the end of the file, so that the decompressor compares its checksum.

    Raises:
        EOFError: data follows the end of the tar, which tarfile would ignore.
    """
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
    """Counts all decompressed bytes, also of headers: a tar without files can be a bomb."""

    def __init__(self, stream: IO[bytes], out: _Out) -> None:
        self._stream, self._out, self._read = stream, out, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._read += len(data)
        self._out.check_ratio(self._read, margin=CHUNK)
        return data


class _Entry(tarfile.TarInfo):
    """A tar entry that is safe to read from an untrusted archive.

    tarfile reads long names and pax headers whole; here their size is limited. tarfile also takes
    an invalid header for the end of the archive; here it is an error.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        try:
            return super().frombuf(buf, encoding, errors)
        except _END:
            raise
        except tarfile.HeaderError as error:
            raise EOFError(f"an invalid header: {error}") from None

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuses long runs of digits: tarfile needs hours for them (CVE-2024-6232)."""
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
    """A stream that returns bytes which were already read, then restores the original stream."""

    def __init__(self, archive: tarfile.TarFile, stream: Any, data: bytes) -> None:
        self._archive, self._stream, self._data = archive, stream, data

    def read(self, size: int) -> bytes:
        self._archive.fileobj = self._stream
        return self._data


def _entries(opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The entries one by one; the list in which tarfile would keep them is emptied."""
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
        f"{what}: the archive is cut off or damaged: {error or type(error).__name__}.",
        "The published file itself is broken, or it is another file: check its address and sha256.",
    )


_BOMB = "If it is what you want, unpack it yourself and name the folder with `path:`."
_UNPACK = "Unpack it yourself, omit that file, and name the folder with `path:`."
