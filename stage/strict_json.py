"""JSON that all readers understand alike (RFC 8259, 4 and 6). Python alone would read more."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


class Ambiguous(ValueError):
    """JSON that another reader may read otherwise, or not at all (RFC 8259, 4 and 6)."""


def loads(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        Ambiguous: a key that is twice in one mapping, NaN, Infinity, a number that is too large, or
            a lone surrogate, which no file can hold.
        ValueError: not UTF-8, or not JSON.
        RecursionError: nested too deeply.
    """
    value = json.loads(
        data.decode(),
        object_pairs_hook=_each_key_once,
        parse_constant=_refuse_constant,
        parse_float=_finite,
    )
    try:
        if b"\\u" in data:  # only an escape can be one; the search in a long text is slow
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Ambiguous("a text in it has a lone surrogate") from None
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise Ambiguous(f"`{twice[:60]}` is written twice in one place")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise Ambiguous(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # 1e999
        raise Ambiguous(f"{text[:60]} is a number larger than any reader holds")
    return number
