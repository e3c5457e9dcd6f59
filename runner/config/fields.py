"""The keys of a run file as a whole: which defaults are in use, and which keys mean nothing.

Each component of a run file is a dataclass whose fields `setting` declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from runner.errors import Key, Lines, UsageError, Where, dotted, keys_of, lookup


class Choice(NamedTuple):
    """One automatic choice, for printing.

    Attributes:
        key: dotted key of the run file.
        value: the chosen value.
        reason: why.
        group: the heading under which it is printed; empty: the section of its key.
    """

    key: str
    value: object
    reason: str
    group: str = ""


def every_key(component: Any, where: Where = ()) -> Iterator[tuple[Where, Key, Any]]:
    """Yields the keys of a component and of those inside it, each with its value."""
    for key in keys_of(type(component)).values():
        value, here = getattr(component, key.field), (*where, key.name)
        if dataclasses.is_dataclass(value):
            yield from every_key(value, here)
        elif isinstance(value, tuple) and key.component:
            for number, item in enumerate(value):
                yield from every_key(item, (*here, number))
        else:
            yield here, key, value


def unused_keys(config: Any) -> Iterator[tuple[Where, Key, Any]]:
    """Yields the keys that mean nothing beside the value of another key."""
    for where, key, value in every_key(config):
        if key.only and lookup(config, key.only[0]) not in key.only[1]:
            yield where, key, value


def check_unused_keys(config: Any, wrong: set[str], lines: Lines) -> None:
    """Finds keys that mean nothing here, and are not their defaults: `config.yaml` has all keys.

    The mistakes are kept in `lines.mistakes`.

    Args:
        config: the run file.
        wrong: dotted keys whose values are not known.
    """
    for where, key, value in unused_keys(config):
        other, values = key.only or ("", ())
        if value == key.default or other in wrong:
            continue
        actual = lookup(config, other)
        with lines.mistakes:
            raise UsageError(
                f"`{dotted(where)}` is only for {other}: "
                f"{' or '.join(map(str, values))}; it is {actual} here.",
                f"Remove it, or set {other}: {values[0]}.{_those_that_are(config, where, actual)}",
                place=lines.place(*where),
            )


def _those_that_are(config: Any, where: Where, actual: object) -> str:
    names = [
        key.name
        for other, key, _ in every_key(config)
        if other[:-1] == where[:-1] and key.only and actual in key.only[1]
    ]
    return f" With {actual} there are {', '.join(names)}." if where[1:] and names else ""
