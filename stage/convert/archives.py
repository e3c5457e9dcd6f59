"""Unpacks an untrusted archive into a folder; writes nothing outside that folder.

Formats: tar (plain, gz, bz2, xz) and zip. An archive is read twice: all names and kinds of entries
are checked before the first byte is written. Each file is written by this module under its checked
name, so no link is ever made. The whole archive is refused for links, devices, encrypted entries,
names that are not allowed in a bundle, names that collide, and archive bombs. Modes, owners and
times of the archive are not kept.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from stage.errors import DamageError, PolicyError, UsageError
from stage.files import human_size, is_pointer
from stage.paths import check_collisions, check_path, check_paths, printable
from stage.text import likely_encoding

_RATIO_COUNTS_ABOVE = 64 * 2**20  # bytes: a small file of zeros is not a bomb
_MAX_HEADER = 1 << 20  # bytes of a tar extension header (long names, pax): tarfile reads it whole
_CHUNK = 1 << 20
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
# PKWARE's APPNOTE 6.3.10: 4.4.4 bit 11; 4.6.9; 4.4.2, the host that packed.
_UTF8_FLAG, _UNICODE_PATH, _UNIX = 0x800, 0x7075, 3
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
_BOMB = "If it is what you want, unpack it yourself and name the folder with `path:`."
_UNPACK = "Unpack it yourself, omit that file, and name the folder with `path:`."
_UNZIP = "python3 -m zipfile --metadata-encoding {} -e FILE FOLDER (Python 3.11 or newer)"
_UNTAR = "python3 -c \"import tarfile; tarfile.open('FILE', encoding='{}').extractall('FOLDER')\""

# A file in an archive: its name, the size that the archive announces, and how to open it.
_File = tuple[str, int, Callable[[], IO[bytes]]]


class Limits(NamedTuple):
    """Above these limits an archive is refused as a bomb.

    Attributes:
        size: unpacked bytes.
        ratio: unpacked bytes per byte of the archive. Deflate ends at 1032:1; text and zeros in
            real data sets stay below 200:1.
        entries: number of files.
    """

    size: int = 2 * 2**40
    ratio: int = 1000
    entries: int = 2_000_000


def unpack(archive: Path, target: Path, limits: Limits | None = None) -> list[str]:
    """Unpacks an archive into a new folder.

    Args:
        target: the folder; replaced if it exists.
        limits: None: the default ones.

    Returns:
        The paths of the files, relative to `target`, sorted.

    Raises:
        PolicyError: an entry that is not allowed in a bundle, or a bomb.
        DamageError: the archive is damaged or cut.
        UsageError: not an archive, an empty one, or one with pointers of Git LFS.
    """
    opened = _Archive(archive, limits or Limits())
    if not (opened.is_tar() or opened.is_zip()):
        raise UsageError(
            "not an archive: neither tar (plain, gz, bz2, xz) nor zip.",
            "Omit `unpack: true`; or unpack it yourself and name the folder with `path:`; or check "
            "the address in a browser.",
        )
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    try:
        names = opened.check()
        for name, size, source in opened.files():
            opened.write(target / name, name, size, source)
    except (OSError, *_BROKEN) as error:
        # EINVAL: an offset of the archive is before its start. Other numbers are of the disk.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamageError(
            f"the archive is cut off or damaged: {error or type(error).__name__}.",
            "The published file itself is broken, or it is another file: check its address and "
            "sha256.",
        ) from None
    if not names:
        raise UsageError("the archive has no file in it.", "Check the address.")
    return sorted(names)


class _Archive:
    """An archive from a source that is not trusted."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._packed = path.stat().st_size
        self._written = 0

    def is_tar(self) -> bool:
        try:
            with _plain(self._path) as stream:
                block = stream.read(tarfile.BLOCKSIZE)
                tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except EOFError:  # it begins as a compressed file, and is cut
            return True
        except (OSError, *_BROKEN):
            return False
        return True

    def is_zip(self) -> bool:
        """By the first bytes: a tar whose last file is a zip ends as a zip."""
        with open(self._path, "rb") as file:
            return file.read(4) in (b"PK\x03\x04", _ZIP_END)

    def files(self) -> Iterator[_File]:
        """Every file.

        Raises:
            PolicyError: an entry that is no file or folder, or a name that is not allowed.
        """
        return self._tar_files() if self.is_tar() else self._zip_files()

    def check(self) -> list[str]:
        """The names of all files.

        Raises:
            PolicyError: they are not allowed in a bundle, or there are too many or too large ones.
        """
        names: list[str] = []
        announced = 0
        for name, size, _ in self.files():
            names.append(name)
            announced += size
            self._check_size(announced)
            if len(names) > self._limits.entries:
                raise PolicyError(
                    f"the archive has more than {self._limits.entries:,} files.",
                    _BOMB,
                )
        check_paths(names, _UNPACK)
        check_collisions(names, _UNPACK)
        return names

    def write(self, path: Path, name: str, size: int, opened: Callable[[], IO[bytes]]) -> None:
        """Writes one file.

        Raises:
            PolicyError: it is larger than announced, or than the limits allow.
            EOFError: it is smaller than announced.
            UsageError: it is a pointer of Git LFS.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        left = size
        with opened() as source, open(path, "xb") as file:
            while chunk := source.read(_CHUNK):
                left -= len(chunk)
                self._written += len(chunk)
                self._check_size(self._written)
                if left < 0:
                    raise self._refused(name, f"larger than the {size} bytes it announces")
                file.write(chunk)
        if left:
            raise EOFError(f"{name} ends {left} bytes early")
        if is_pointer(path, size):
            raise UsageError(
                f"the archive's {printable(name)} is a Git LFS pointer, not the file itself.",
                "git clone the repository, run git lfs pull in it, "
                "and name the folder with `path:`.",
            )

    def _refused(self, name: str, problem: str) -> PolicyError:
        return PolicyError(
            f"the archive's {printable(name)} is {problem}; nothing was kept.",
            _UNPACK,
        )

    def _check_size(self, size: int, margin: int = 0) -> None:
        """Raises for a bomb. `margin`: bytes above the limit that are allowed."""
        problem = None
        if size > self._limits.size:
            problem = f"unpacks to more than the limit of {human_size(self._limits.size)}"
        elif size > max(_RATIO_COUNTS_ABOVE, self._limits.ratio * max(self._packed, 1) + margin):
            problem = (
                f"of {human_size(self._packed)} unpacks to {human_size(size)} or more: over the "
                f"limit of {self._limits.ratio} times its size"
            )
        if problem:
            raise PolicyError(f"the archive {problem}.", _BOMB)

    def _zip_files(self) -> Iterator[_File]:
        with zipfile.ZipFile(self._path) as opened:
            with open(self._path, "rb") as file:  # zipfile reads on if something follows the end
                file.seek(-_ZIP_END_SIZE - len(opened.comment), 2)
                end = file.read(_ZIP_END_SIZE)
            stated = int.from_bytes(end[-2:], "little")
            if not end.startswith(_ZIP_END) or stated != len(opened.comment):
                raise EOFError("something follows its end, or its comment is cut off")
            if min((entry.header_offset for entry in opened.infolist()), default=0) > 0:
                raise EOFError("something precedes its first file: another zip?")
            for entry in opened.infolist():
                name = self._zip_name(entry)
                if name.endswith("/"):
                    check_path(name.rstrip("/"), _UNPACK)
                    continue
                if entry.external_attr >> 28 not in (0, 0o10):  # the file type of a Unix
                    raise self._refused(name, "a link or a special file")
                if entry.flag_bits & 0x41:
                    raise self._refused(name, "encrypted")
                if entry.compress_type not in _ZIP_METHODS:
                    raise self._refused(
                        name, f"packed by an unknown method (number {entry.compress_type})"
                    )
                yield name, entry.file_size, partial(opened.open, entry)

    def _zip_name(self, entry: zipfile.ZipInfo) -> str:
        """The name of an entry, if its encoding is known.

        It is UTF-8 if the flag or the Unicode path extra field says so, or if a Unix packed it and
        the bytes are valid UTF-8 (macOS sets no flag). Other packers write names in the code page
        of their system and do not record which; `zipfile` assumes code page 437.
        """
        name = entry.orig_filename
        if not entry.flag_bits & _UTF8_FLAG and not name.isascii():
            raw = name.encode("cp437")
            likely = raw if entry.create_system == _UNIX else b""
            name = _entry_name(_unicode_path(entry.extra, raw) or likely, raw, _UNZIP)
        if "\0" in name:  # zipfile would cut the name there
            raise self._refused(name, "a name with a zero byte")
        return name

    def _tar_files(self) -> Iterator[_File]:
        with _plain(self._path) as stream:
            watched: Any = _Watched(stream, self._check_size)
            with tarfile.open(fileobj=watched, mode="r|", tarinfo=_TarEntry) as opened:
                for entry in opened:
                    opened.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
                    name = self._tar_name(entry)
                    if entry.isdir():
                        if name not in ("", "."):
                            check_path(name, _UNPACK)
                    elif not entry.isreg() or entry.issparse() or entry.size < 0:
                        is_link = entry.issym() or entry.islnk()
                        raise self._refused(
                            entry.name, "a link" if is_link else "a special or sparse file"
                        )
                    else:
                        yield name, entry.size, partial(_tar_file, opened, entry)
                # The rest is read, so that the decompressor compares its checksum.
                rest = cast("IO[bytes]", opened.fileobj)
                while data := rest.read(_CHUNK):
                    if data.strip(b"\0"):
                        raise EOFError("something follows its end")

    def _tar_name(self, entry: tarfile.TarInfo) -> str:
        name = entry.name
        while name.startswith("./"):
            name = name[2:]
        if any("\udc80" <= character <= "\udcff" for character in name):  # not UTF-8
            raw = name.encode("utf-8", "surrogateescape")
            name = _entry_name(b"", raw, _UNTAR)
        return name


def _entry_name(stated: bytes, raw: bytes, command: str) -> str:
    """The name of an entry of an archive, as text.

    Args:
        stated: the name in an encoding that should be UTF-8; empty where none is stated.
        raw: the bytes of the name in the archive.
        command: unpacks the archive in a given encoding (`{}`).

    Raises:
        PolicyError: the encoding is not known; names the likely one.
    """
    try:
        if stated:
            return stated.decode("utf-8")
    except UnicodeDecodeError:
        pass
    encoding = likely_encoding(raw) or "GB18030"
    name = printable(raw.decode(encoding, "replace"))
    raise PolicyError(
        f"the archive does not say in which encoding its names are (in {encoding}, one is {name}).",
        f"Unpack it yourself and name the folder with `path:`: {command.format(encoding)}",
    )


def _unicode_path(extra: bytes, raw: bytes) -> bytes:
    """The name in the Unicode path extra field; empty if missing, or with another CRC."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == _UNICODE_PATH and len(field) > 5 and field[0] == 1:
            return field[5:] if struct.unpack_from("<I", field, 1)[0] == zlib.crc32(raw) else b""
    return b""


def _tar_file(opened: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    source = opened.extractfile(entry)
    assert source is not None
    return source


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

    def __init__(self, stream: IO[bytes], check_size: Callable[[int, int], None]) -> None:
        self._stream, self._check_size, self._read = stream, check_size, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._read += len(data)
        self._check_size(self._read, _CHUNK)
        return data


class _TarEntry(tarfile.TarInfo):
    """A tar entry that is safe to read from an untrusted archive.

    tarfile reads long names and pax headers whole; here their size is limited. tarfile also takes
    an invalid header for the end of the archive; here it is an error.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _TarEntry:
        try:
            return super().frombuf(buf, encoding, errors)
        except _END:
            raise
        except tarfile.HeaderError as error:
            raise EOFError(f"an invalid header: {error}") from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENSIONS and not 0 <= self.size <= _MAX_HEADER:
            raise PolicyError(f"the archive has a header of {human_size(self.size)} in it.", _BOMB)
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuses long runs of digits: tarfile needs hours for them (CVE-2024-6232)."""
        stream: Any = archive.fileobj
        text = stream.read(self._block(self.size))  # type: ignore[attr-defined]
        if re.search(rb"[0-9]{256}", text):
            raise ValueError("an extended header of digits")
        archive.fileobj = _Again(archive, stream, text)  # type: ignore[assignment]
        return super()._proc_pax(archive)  # type: ignore[misc, no-any-return]


class _Again:
    """A stream that returns bytes which were already read, then restores the original stream."""

    def __init__(self, archive: tarfile.TarFile, stream: Any, data: bytes) -> None:
        self._archive, self._stream, self._data = archive, stream, data

    def read(self, size: int) -> bytes:
        self._archive.fileobj = self._stream
        return self._data
