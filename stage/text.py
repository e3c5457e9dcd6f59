"""The encoding of texts that are not UTF-8: old files from China, Russia and Western Europe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stage.errors import quoted

# So many of the characters beyond ASCII must be usual ones in the languages of an encoding.
_LIKELY = 0.7


def likely_encoding(data: bytes) -> str | None:
    """The most likely encoding of a text; None: it is not one that old files have.

    Args:
        data: bytes that are not UTF-8; its last line may be cut.
    """
    whole = data[: data.rfind(b"\n") + 1] or data
    shares = {encoding: _share(whole, encoding, is_usual) for encoding, is_usual in _USUAL.items()}
    best = max(shares, key=lambda encoding: shares[encoding])
    return best if shares[best] >= _LIKELY else None


def save_as_utf8(path: Path, data: bytes) -> str:
    """The command that makes a file UTF-8, for a remedy.

    Args:
        path: the file.
        data: its bytes, which are not UTF-8. UTF-16 is what PowerShell's `>` writes.
    """
    encoding = "UTF-16" if is_utf16(data) else likely_encoding(data) or "ENCODING"
    name, new = quoted(path), quoted(f"{path}.utf8")
    return f"Save it as UTF-8: iconv -f {encoding} -t UTF-8 {name} > {new} && mv {new} {name}"


def is_utf16(data: bytes) -> bool:
    """Whether a text is UTF-16, by its mark, or because about every second byte is zero."""
    return data.startswith((b"\xff\xfe", b"\xfe\xff")) or data.count(0) > len(data) // 4


def _share(data: bytes, encoding: str, is_usual: Callable[[str, str], bool]) -> float:
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4:
            return 0
        text = data[: error.start].decode(encoding)
    padded = f" {text} "
    judged = [
        is_usual(character, padded[i] + padded[i + 2])
        for i, character in enumerate(text)
        if character > "\x7f"
    ]
    return sum(judged) / len(judged) if judged else 0


def _is_usual_chinese(character: str, beside: str) -> bool:
    """The 3755 most common characters of GB 2312 (its rows 16 to 55), and punctuation."""
    if (
        "\u3000" <= character <= "\u303f"
        or "\uff00" <= character <= "\uffef"
        or character in "“”‘’…—·"
    ):
        return True
    try:
        return 0xB0 <= character.encode("gb2312")[0] <= 0xD7
    except UnicodeEncodeError:
        return False


def _is_usual_cyrillic(character: str, beside: str) -> bool:
    """Most letters of a text are small, and words do not mix alphabets."""
    return ("а" <= character <= "я" or character in "ёіїєґў«»№—–“”„…") and not _has_latin(beside)


def _is_usual_latin(character: str, beside: str) -> bool:
    """Of Western Europe: a letter with an accent is beside one without."""
    return (
        character.isalpha() and character <= "\u017f" and _has_latin(beside)
    ) or character in "“”‘’…–—€°£§«»"


def _has_latin(beside: str) -> bool:
    return any(character.isascii() and character.isalpha() for character in beside)


_USUAL = {"GB18030": _is_usual_chinese, "CP1251": _is_usual_cyrillic, "CP1252": _is_usual_latin}
KNOWN = tuple(_USUAL)
