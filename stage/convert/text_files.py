"""Opens text files, and checks that they are UTF-8 before they are parsed.

At another encoding or a NUL byte many parsers continue without an error, with wrong rows.
"""

from __future__ import annotations

import codecs
import io
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from stage.errors import quoted
from stage.files import human_size
from stage.text import KNOWN, likely_encoding

MAX_LINE = 64 * 2**20  # characters of a line, of a cell, or of a JSON value
_LINE_END = b"\n"
_PIECE = 1 << 20
_SAMPLE = 1 << 16  # bytes from which an encoding is guessed
_SHOWN = 40  # characters of a line
_MARKS = {  # byte order marks, the longer ones first
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UNPACKERS = {".gz": "gzip -dc", ".bz2": "bzip2 -dc", ".zst": "zstd -dc"}
_AGAIN = "Get the file again."
_OTHERS = {  # first bytes -> what it is, and what to do
    b"PK\x03\x04": (
        "a zip, such as Excel's .xlsx",
        "In Excel: Save As, CSV UTF-8. Of another zip: unzip it, and name the file in it.",
    ),
    b"\xd0\xcf\x11\xe0": ("a file of an old Excel", "In Excel: Save As, CSV UTF-8."),
    b"\x1f\x8b": ("compressed by gzip", "Give it a name that ends in .gz."),
    b"PAR1": ("parquet", "Write `convert: parquet`."),
    b"%PDF": ("a PDF", "Take the file that it was made from."),
    **dict.fromkeys(
        (b"<!DOCTYPE html", b"<!doctype html", b"<html"),
        ("a page of the web", "A login or a proxy answered: get it again."),
    ),
}


class NotReadable(ValueError):
    """A file that must be changed before it can be converted.

    Args:
        problem: what is wrong, with the line.
        remedy: what to do; None: the usual advice.
        encoding: the likely encoding of a text that is not UTF-8, by iconv's name.
    """

    def __init__(
        self, problem: str, remedy: str | None = None, encoding: str | None = None
    ) -> None:
        super().__init__(problem)
        self.remedy, self.encoding = remedy, encoding


def to_utf8(file: Path, encoding: str) -> str:
    """The command that converts a file to UTF-8. `file`: its path, as the user knows it."""
    name = file.name
    ending = next((ending for ending in _UNPACKERS if name.lower().endswith(ending)), "")
    convert = f"iconv -f {encoding} -t UTF-8"
    old = quoted(file)
    new = quoted(file.with_name(f"utf8-{name.removesuffix(ending)}"))
    command = f"{_UNPACKERS[ending]} {old} | {convert}" if ending else f"{convert} {old}"
    where = "" if file.parent.name else "in its folder; "
    return (
        f"{command} > {new}   # {where}then `path:` to that; if the encoding is another, correct it"
    )


def open_bytes(path: Path) -> IO[bytes]:
    """The decompressed bytes of a file; the suffix names the compression."""
    stream: Any = pa.input_stream(str(path), compression="detect")
    return io.BufferedReader(stream)


def open_text(path: Path, newline: str | None) -> IO[str]:
    """The decompressed text of a UTF-8 file, without byte order mark; `newline` as for `open`."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def check_start(head: bytes, *, may_be_page: bool = False) -> None:
    """Checks by the first 64 KiB of a file that it is a text and not UTF-16.

    Args:
        may_be_page: whether a page of the web is a text like others.

    Raises:
        NotReadable: it is of another kind that has the name of a text, or UTF-16 or UTF-32.
    """
    for start, (what, remedy) in _OTHERS.items():
        if head.startswith(start) and not (may_be_page and start.startswith(b"<")):
            raise NotReadable(f"it is {what}, not a text.", remedy)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            raise NotReadable(
                f"it is {encoding}, by its first {len(mark)} bytes, not UTF-8.", encoding=encoding
            )
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) > len(head) // 8 and min(even, odd) * 20 < max(even, odd):
        encoding = "UTF-16LE" if odd > even else "UTF-16BE"
        raise NotReadable(
            f"it is {encoding} (every second byte is zero), not UTF-8.", encoding=encoding
        )


def check_text(path: Path, *, may_be_page: bool = False, has_lines: bool = True) -> None:
    """Reads a whole file, and checks that it is UTF-8 without NUL bytes.

    Args:
        may_be_page: as for `check_start`.
        has_lines: whether each line must fit in memory.

    Raises:
        NotReadable: it is not UTF-8, has NUL bytes, ends within a character, or has a line of more
            than 64 MiB.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, length, wide_characters = 1, 0, 0
    with open_bytes(path) as stream:
        piece = stream.read(_PIECE)
        check_start(piece[:_SAMPLE], may_be_page=may_be_page)
        while True:
            if (at := piece.find(b"\0")) >= 0:
                raise NotReadable(
                    f"line {line + piece.count(_LINE_END, 0, at)} has a NUL byte: "
                    "the file is damaged, or not a text.",
                    "Get the file again, or remove the byte: tr -d '\\000' < FILE > NEW",
                )
            data = decoder.getstate()[0] + piece  # a character may begin in the piece before
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                line += data.count(b"\n", 0, error.start)
                if not piece:
                    raise NotReadable(
                        f"it ends within a character, in line {line}: it was cut.", _AGAIN
                    ) from None
                wide_characters += sum(c > "\x7f" for c in data[: error.start].decode())
                data += stream.read(_SAMPLE)
                raise _not_utf8(data, error.start, line, wide_characters) from None
            if not piece:
                return
            line += piece.count(b"\n")
            length = length + len(piece) if b"\n" not in piece else len(piece) - piece.rfind(b"\n")
            if has_lines and length > MAX_LINE:
                raise NotReadable(f"line {line} has more than {human_size(MAX_LINE)}.")
            wide_characters += 0 if text.isascii() else sum(c > "\x7f" for c in text)
            piece = stream.read(_PIECE)


def check_lines(head: bytes) -> None:
    """Checks that the whole lines at the beginning of a file are UTF-8.

    Raises:
        NotReadable: they are not.
    """
    try:
        head[: head.rfind(b"\n") + 1].decode()
    except UnicodeDecodeError as error:
        before = head[: error.start]
        wide = sum(c > "\x7f" for c in before.decode())
        raise _not_utf8(head, error.start, 1 + before.count(b"\n"), wide) from None


def _not_utf8(data: bytes, at: int, line: int, wide_characters: int) -> NotReadable:
    """The error for bytes that are not UTF-8.

    Args:
        at: index in `data` of the first invalid byte.
        line: its line in the file.
        wide_characters: number of valid characters beyond ASCII before it.
    """
    problem = f"line {line} is not UTF-8 (byte 0x{data[at]:02X})"
    if wide_characters > 20:
        return NotReadable(
            f"{problem}, though {wide_characters} characters before it are: "
            "it is damaged, or of mixed encodings.",
            "Repair that line, or get the file again.",
        )
    start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
    encoding = likely_encoding(data[max(start, at - _SAMPLE) :][:_SAMPLE])
    if encoding is None:
        return NotReadable(f"{problem}, nor likely {', '.join(KNOWN)}.", encoding="ENCODING")
    shown = data[start : end if end >= 0 else None].decode(encoding, "replace").strip()[:_SHOWN]
    return NotReadable(
        f"{problem}; as {encoding} that line begins with {shown!r}", encoding=encoding
    )
