"""JSON that all readers understand alike (RFC 8259, 4 and 6). Python alone would read more."""

from __future__ import annotations

import json
import math
import re
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
        object_pairs_hook=each_key_once,
        parse_constant=_refuse_constant,
        parse_float=held,
    )
    try:
        if b"\\u" in data:  # only an escape can be one; the search in a long text is slow
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Ambiguous("a text in it has a lone surrogate") from None
    return value


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: refuses a key that is twice in one mapping."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise Ambiguous(f"`{twice[:60]}` is written twice in one place")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise Ambiguous(f"{name} is no number of JSON")


def held(text: str) -> float:
    """For `parse_float`: refuses what would become infinity (1e999) or zero (1e-999)."""
    number = float(text)
    if not math.isfinite(number) or (number == 0 and re.match(r"-?[0.]*[1-9]", text)):
        size = "less" if number == 0 else "more"
        raise Ambiguous(f"{text[:60]} is {size} than a float64 holds")
    return number
