"""Checks text files before they are parsed: the encoding, NUL bytes, and the quotes of a CSV.

At another encoding, a NUL byte or a wrong quote, many parsers continue without an error, with wrong
rows. So the bytes are read once before parsing, and a fault is reported with its line.
"""

from __future__ import annotations

import codecs
import csv
import io
import shlex
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from stage.text import KNOWN, likely_encoding

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


class NotReadable(ValueError):
    """A file that must be changed before it can be converted.

    Args:
        problem: what is wrong, with the line.
        remedy: what to do; None: the usual advice.
    """

    def __init__(self, problem: str, remedy: str | None = None) -> None:
        super().__init__(problem)
        self.remedy = remedy


class OtherEncoding(NotReadable):
    """A text that is not UTF-8.

    Args:
        encoding: the likely encoding, by iconv's name; None: not known.
    """

    def __init__(self, problem: str, encoding: str | None) -> None:
        super().__init__(problem)
        self.encoding = encoding

    def advice(self, file: str) -> str:
        """The command that converts the file to UTF-8.

        Args:
            file: its path, as the user knows it.
        """
        name = file.rpartition("/")[2]
        ending = next((ending for ending in _UNPACKERS if name.lower().endswith(ending)), "")
        new = shlex.quote(f"utf8-{name.removesuffix(ending)}")
        convert = f"iconv -f {self.encoding or 'ENCODING'} -t UTF-8"
        command = (
            f"{_UNPACKERS[ending]} {shlex.quote(name)} | {convert}"
            if ending
            else f"{convert} {shlex.quote(name)}"
        )
        return f"{command} > {new}   # then `path:` to that; if the encoding is another, correct it"


def open_bytes(path: Path) -> IO[bytes]:
    """The decompressed bytes of a file; the suffix names the compression."""
    stream: Any = pa.input_stream(str(path), compression="detect")
    return io.BufferedReader(stream)


def open_text(path: Path, newline: str | None) -> IO[str]:
    """The decompressed text of a UTF-8 file, without byte order mark; `newline` as for `open`."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def check_start(path: Path) -> None:
    """Checks the encoding of a CSV by the first 64 KiB of the file.

    Raises:
        OtherEncoding: it is UTF-16 or UTF-32, by its byte order mark or by its zero bytes.
        NotReadable: it is no text, but a zip or the like.
    """
    with open_bytes(path) as stream:
        head = stream.read(_SAMPLE)
    _check_other(head, may_be_page=False)
    _check_wide(head)


def check_text(path: Path, *, may_be_page: bool = True) -> bool:
    """Reads a whole file, and checks that it is UTF-8 without NUL bytes.

    Args:
        path: the file.
        may_be_page: whether a page of the web is a text like others.

    Returns:
        Whether the file has a double quote.

    Raises:
        OtherEncoding: it is not UTF-8.
        NotReadable: it has NUL bytes, or ends within a character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, quoted, wide_characters = 1, False, 0
    with open_bytes(path) as stream:
        piece = stream.read(_PIECE)
        _check_other(piece[:_SAMPLE], may_be_page=may_be_page)
        _check_wide(piece[:_SAMPLE])
        while True:
            if (at := piece.find(b"\0")) >= 0:
                raise NotReadable(
                    f"line {lines + piece.count(_LINE_END, 0, at)} has a NUL byte: "
                    "the file is damaged, or not a text.",
                    "Get the file again, or remove the byte: tr -d '\\000' < FILE > NEW",
                )
            waiting = decoder.getstate()[0]  # the first bytes of a character, from the last piece
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                data = waiting + piece
                line = lines + data.count(b"\n", 0, error.start)
                if not piece:
                    raise NotReadable(
                        f"it ends within a character, in line {line}: it was cut.", _AGAIN
                    ) from None
                wide_characters += sum(c > "\x7f" for c in data[: error.start].decode())
                raise _other(
                    data + stream.read(_SAMPLE), error.start, line, wide_characters
                ) from None
            if not piece:
                return quoted
            quoted = quoted or b'"' in piece
            lines += piece.count(b"\n")
            wide_characters += 0 if text.isascii() else sum(c > "\x7f" for c in text)
            piece = stream.read(_PIECE)


_AGAIN = "Get the file again."


_OTHERS = {  # first bytes -> what it is, and what to do
    b"PK\x03\x04": ("a zip, such as Excel's .xlsx", "In Excel: Save As, CSV UTF-8."),
    b"\xd0\xcf\x11\xe0": ("a file of an old Excel", "In Excel: Save As, CSV UTF-8."),
    b"\x1f\x8b": ("compressed by gzip", "Give it a name that ends in .gz."),
    b"PAR1": ("parquet", "Write `convert: parquet`."),
    b"%PDF": ("a PDF", "Take the file that it was made from."),
    **dict.fromkeys(
        (b"<!DOCTYPE html", b"<!doctype html", b"<html"),
        ("a page of the web", "A login or a proxy answered: get it again."),
    ),
}


def _check_other(head: bytes, *, may_be_page: bool) -> None:
    """Raises for a file of another kind that has the name of a text.

    Args:
        may_be_page: whether a page of the web is a text like others.

    Raises:
        NotReadable: says what it is.
    """
    for start, (what, remedy) in _OTHERS.items():
        if head.startswith(start) and not (may_be_page and start.startswith(b"<")):
            raise NotReadable(f"it is {what}, not a text.", remedy)


def _check_wide(head: bytes) -> None:
    """Raises for UTF-16 and UTF-32, which have a zero byte beside every ASCII character.

    Raises:
        OtherEncoding: it is one of them.
    """
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            raise OtherEncoding(
                f"it is {encoding}, by its first {len(mark)} bytes, not UTF-8.", encoding
            )
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) > len(head) // 8 and min(even, odd) * 20 < max(even, odd):
        encoding = "UTF-16LE" if odd > even else "UTF-16BE"
        raise OtherEncoding(f"it is {encoding} (every second byte is zero), not UTF-8.", encoding)


def _other(data: bytes, at: int, line: int, wide_characters: int) -> NotReadable:
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
        return OtherEncoding(f"{problem}, nor likely {', '.join(KNOWN)}.", None)
    shown = data[start : end if end >= 0 else None].decode(encoding, "replace").strip()[:_SHOWN]
    return OtherEncoding(f"{problem}; as {encoding} that line begins with {shown!r}", encoding)


def check_quotes(path: Path, separator: str) -> None:
    """Checks the quotes of a CSV by RFC 4180.

    After the quote that ends a cell, a separator or the end of the line must follow. Many parsers
    continue without an error where that is not so, and join several rows to one.

    Raises:
        NotReadable: with the line.
    """
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is too small for texts
    with open_text(path, newline="") as text:
        rows = csv.reader(text, delimiter=separator, strict=True)
        before = 0  # the last line of the last valid row
        try:
            for _ in rows:
                before = rows.line_num
        except csv.Error as error:
            begins, reached = before + 1, rows.line_num
            if "end of data" in str(error):
                raise NotReadable(
                    f"the row that begins in line {begins} has a quote that is never closed: "
                    f"it contains the rest of the file, to line {reached}.",
                    f"Close the quote in line {begins}. {_DOUBLED}",
                ) from None
            place = f"line {begins}" if begins == reached else f"lines {begins} to {reached}"
            raise NotReadable(
                f"{place}: a quoted cell continues after the quote that ends it ({error}).",
                _DOUBLED,
            ) from None


_DOUBLED = 'A quote inside a quoted cell is written twice (""), not as \\".'
