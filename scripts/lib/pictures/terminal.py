"""Draws a recording as a picture of a terminal: commands, and both ends of each output."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from html import escape

from stage.files import human_count

MOST_LINES = 8
"""Per command: longer output is cut in the middle, and the picture says so."""

CHARACTER, LINE, EDGE = 8.0, 19, 16
COLOURS = {"31": "#ff8a80", "32": "#7ee787", "33": "#e3b341", "36": "#76e3ea", "34": "#79c0ff"}
_COMMAND = re.compile(r"^\x1b\[1m(laptop|cluster)\$\x1b\[0m ")
_STYLE = re.compile(r"\x1b\[([\d;]*)m")
_OTHER = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class Piece:
    """A stretch of a line in one style: codes of SGR, such as `1` or `32`."""

    text: str
    style: frozenset[str]


def drawn(cast: str) -> str:
    """The picture of a recording (asciicast, version 2), as SVG. Pure."""
    header, *events = [json.loads(line) for line in cast.splitlines()]
    width = int(header["width"])
    lines = [
        piece
        for line in _shortened(_lines("".join(text for _, _, text in events)))
        for piece in _wrapped(line, width)
    ]
    wide, high = width * CHARACTER + 2 * EDGE, len(lines) * LINE + 2 * EDGE + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" '
        'role="img" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,'
        'monospace" font-size="13.3">',
        "<title>A recording: fetch on the laptop; verify and train on the cluster</title>",
        f'<rect width="{wide:g}" height="{high}" rx="10" fill="#15181c"/>',
        *(
            f'<circle cx="{20 + 18 * index}" cy="18" r="5.5" fill="{colour}"/>'
            for index, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
    ]
    for number, line in enumerate(lines):
        y = EDGE + 22 + LINE * (number + 0.75)
        spans = "".join(_span(piece) for piece in line)
        length = sum(len(piece.text) for piece in line) * CHARACTER
        if spans:
            parts.append(
                f'<text x="{EDGE}" y="{y:g}" fill="#e4e7eb" xml:space="preserve" '
                f'textLength="{length:g}">{spans}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


def _span(piece: Piece) -> str:
    attributes = "".join(f' fill="{COLOURS[c]}"' for c in sorted(piece.style & COLOURS.keys()))
    attributes += ' font-weight="700"' if "1" in piece.style else ""
    attributes += ' fill="#9aa4b0"' if "2" in piece.style else ""
    text = escape(piece.text)
    return f"<tspan{attributes}>{text}</tspan>" if attributes else text


def _lines(text: str) -> list[str]:
    """What stays on the screen: of a line that was written over, the last version."""
    found = []
    for line in _OTHER.sub("", text).replace("\r\n", "\n").split("\n"):
        versions = [version for version in line.split("\r") if version.strip()]
        found.append(versions[-1].rstrip() if versions else "")
    return found


def _shortened(lines: list[str]) -> list[str]:
    """The lines, with at most `MOST_LINES` per command, and an empty line between commands."""
    outputs: list[list[str]] = []
    for line in lines:
        if _COMMAND.match(line):
            outputs.append([line])
        elif line and outputs:
            outputs[-1].append(line)
    shown: list[str] = []
    for command, *output in outputs:
        if len(output) > MOST_LINES:
            half = MOST_LINES // 2
            left = len(output) - 2 * half
            cut = f"\x1b[2m    ... {human_count(left, 'more line')}\x1b[0m"
            output = [*output[:half], cut, *output[-half:]]
        shown += ["", command, *output]
    return shown[1:]


def _wrapped(line: str, width: int) -> list[list[Piece]]:
    """A line in pieces of one style; longer than the terminal, it becomes several lines."""
    plain = _STYLE.sub("", line)
    if len(plain) > width:
        rows = textwrap.wrap(plain, width, subsequent_indent="    ", drop_whitespace=True)
        return [[Piece(row, frozenset())] for row in rows]
    pieces: list[Piece] = []
    style: frozenset[str] = frozenset()
    for index, part in enumerate(_STYLE.split(line)):
        if index % 2:
            codes = frozenset(part.split(";")) - {""}
            style = frozenset() if not codes or "0" in codes else style | codes
        elif part:
            pieces.append(Piece(part, style))
    return [pieces]
