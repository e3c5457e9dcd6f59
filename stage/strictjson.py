"""JSON in the one way that all readers of it agree on (RFC 8259, 4 and 6): what Python alone would read is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


class Ambiguous(ValueError):
    """JSON that Python reads and another reader may read otherwise, or not at all (RFC 8259, 4 and 6)."""


def loads(data: bytes) -> Any:
    """The value that a text of JSON stands for.

    Raises:
        Ambiguous: a key that is written twice in one place, NaN, Infinity, or a number beyond any reader's range.
        ValueError: not UTF-8, or not JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(
        data.decode(), object_pairs_hook=_each_key_once, parse_constant=_refuse_constant, parse_float=_finite
    )


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Ambiguous(f"`{twice[:60]}` is written twice in one place")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise Ambiguous(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # 1e999
        raise Ambiguous(f"{text[:60]} is a number larger than any reader holds")
    return number
