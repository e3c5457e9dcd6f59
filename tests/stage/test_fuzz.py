"""For any bytes, a parser returns a value or an error with a remedy. The corpus keeps old failures.

hypothesis mutates the corpus: a few mutations, always the same; with `-m slow` many more, new ones
each time. scripts/fuzz searches longer, guided by the code that the bytes reach.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stage.fuzzing import CORPUS, PARSERS, survives

SEEDS = {
    target: [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    for target in PARSERS
}
# Each has broken a parser before.
TOKENS = (
    b"\0", b"\n", b"\r\n", b"\xff", b"\xef\xbb\xbf", b'"', b"\\ud800", b"\\u0000", b"{", b"}",
    b"[", b"]", b",", b":", b"-", b"../", b"/", b"%0A", b"  ", b"\t", b"&a ", b"*a", b"!!int ",
    b"!!binary ", b"<<: ", b"---\n", b"? ", b"NaN", b"-Infinity", b"1e999", b"true", b"null",
    b"9" * 30, b"[" * 200, b"9" * 5000, "\u202e".encode(), "e\u0301".encode(),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.0, 1e300, 2**63 - 1, 2**63, 2**70, 10**400, "", "a", "..", "/",
    "data/x", "a" * 64, "A" * 64, "0" * 40, "\ud800", "\0", "\x1b[2J", "\u202e",
    [], [0], [[]], [0, 0], {}, {"a": {}}, {"": []},
)  # fmt: skip


def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Cuts, doubles, flips, overwrites or inserts bytes."""
    for _ in range(draw(st.integers(1, 4))):
        at, until = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        middle = draw(
            st.sampled_from((b"", data[at:until] * 2, data[at:until].swapcase()))
            | st.sampled_from(TOKENS)
            | st.binary(max_size=8)
        )  # fmt: skip
        data = data[:at] + middle + data[draw(st.sampled_from((at, until))) :]
    return data


def changed_json(draw: st.DrawFn, data: bytes) -> bytes | None:
    """Changes, removes or doubles one to three values of a JSON document; None if it is no JSON."""
    start = data.index(b"{") if b"{" in data else len(data)
    try:
        document, end = json.JSONDecoder().raw_decode(
            data[start:].decode("utf-8", "surrogateescape")
        )
    except ValueError:
        return None
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(("value", "gone", "twice", "moved")))
        if what == "value":
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif what == "gone":
            del holder[key]
        elif what == "twice" and isinstance(holder, list):
            holder.append(holder[key])
        else:
            other, there = draw(st.sampled_from(places))
            holder[key] = json.loads(json.dumps(other[there]))
    with suppress(ValueError):
        text = json.dumps(document).encode()
        rest = (
            data[start:].decode("utf-8", "surrogateescape")[end:].encode("utf-8", "surrogateescape")
        )
        length = struct.pack("<Q", len(text))  # of a safetensors header, before it
        return (length if start == len(length) else data[:start]) + text + rest
    return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@st.composite
def mutations(draw: st.DrawFn, target: str) -> bytes:
    """Bytes that are similar to valid input."""
    data: bytes = draw(st.sampled_from(SEEDS[target]))
    if draw(st.booleans()) and (changed := changed_json(draw, data)) is not None:
        return changed
    return changed_bytes(draw, data)


FILES = [(target, path.name) for target in PARSERS for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize(("target", "name"), FILES, ids=lambda part: part)
def test_what_once_broke_a_parser_does_not_again(target: str, name: str, tmp_path: Path) -> None:
    survives(target, (CORPUS / target / name).read_bytes(), tmp_path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", PARSERS)
def test_any_bytes_give_a_value_or_words(target: str, tmp_path: Path) -> None:
    search(target, tmp_path, settings(max_examples=300, derandomize=True, database=None))


def search(target: str, folder: Path, how: settings) -> None:
    @settings(how, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutations(target))
    def check(data: bytes) -> None:
        survives(target, data, folder)

    check()
