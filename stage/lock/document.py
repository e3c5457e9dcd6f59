"""Reads the JSON documents of machines: locks, reports, plans of patches, entries of conda-lock.

The tables are those of `stage.lock.reader`: a dataclass, with a field per key. But a document can
come from anywhere (a mail, a mirror, a damaged disk) and has no lines. It ends at its first
mistake. null counts as absent, and a key that is not known is skipped: a newer version wrote it.

`loads` reads the JSON that all readers understand alike (RFC 8259, 4 and 6). Python reads more.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from stage.errors import Place, UsageError
from stage.file_kinds import check_kind
from stage.files import MAX_NUMBER, is_hex
from stage.installation import install_command
from stage.lock.reader import (
    REQUIRED,
    Key,
    Lines,
    Reader,
    Where,
    WrongValueError,
    keys_of,
)


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


T = TypeVar("T")


class DocumentReader(Reader):
    """Reads mappings of a document into dataclasses.

    A dataclass may have a `prepared`: from the mapping in the document to one with its keys. Errors
    have no place: the caller names the document (`stage.errors.about`).

    Args:
        remedy: of every error.
    """

    def __init__(self, remedy: str) -> None:
        super().__init__(Lines(Path()), has_nulls=False)
        self.remedy = remedy

    def read(self, cls: type[T], data: Any, where: Where = ()) -> T:
        if type(data) is not dict:
            raise self.error(f"must be a mapping, found {self.lines.shown(data)}", *where)
        if prepared := getattr(cls, "prepared", None):
            data = prepared(data)
        values: dict[str, Any] = {}
        for name, key in keys_of(cls).items():
            value = data.get(name)
            kind = type(value)
            if kind in key.exact and (kind is not int or 0 <= value <= MAX_NUMBER):
                values[key.field] = value  # no call for what is usual: a lock has 100,000 files
            elif value is not None:
                values[key.field] = self.value(key, value, (*where, name))
            elif key.default is REQUIRED:
                if types.NoneType not in key.options:
                    raise self.error("is missing", *where, name)
                values[key.field] = None
        return cls(**values)

    def value(self, key: Key, value: Any, where: Where) -> Any:
        if key.convert is None or key.options[0] not in (Any, type(value)):
            return super().value(key, value, where)
        try:
            return key.convert(value)
        except WrongValueError as error:
            raise self._wrong(error, key, value, where) from None

    def error(self, problem: str, *where: str | int) -> UsageError:
        """The error for a field.

        Args:
            problem: such as "names no file".
            where: the keys that lead to the field; none: the whole document.
        """
        return UsageError(f"{self.named(where)} {problem}.", self.remedy)

    def named(self, where: Where) -> str:
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
        path = path.removeprefix(".").encode(errors="backslashreplace").decode()
        return f"`{path[:200]}`" if path else "it"

    def _place(self, where: Where) -> Place | str:
        return ""

    def _what_to_do(self, key: Key, value: Any, where: Where) -> str:
        return self.remedy

    def _fit(self, option: Any, value: Any, where: Where) -> Any:
        if option is str and value == "":
            return value
        if option is int and not (type(value) is int and 0 <= value <= MAX_NUMBER):
            raise WrongValueError("must be a whole number from 0 to 2^63 - 1")
        arguments = typing.get_args(option)
        if type(value) is list and arguments and dataclasses.is_dataclass(arguments[0]):
            item = typing.cast(Any, arguments[0])
            return tuple([self.read(item, one, (*where, n)) for n, one in enumerate(value)])
        return super()._fit(option, value, where)


def _hex_digits(name: str, length: int) -> Callable[[Any], str]:
    """For `convert`: returns the value if it is such a digest, else raises `WrongValueError`."""

    def check(value: Any) -> str:
        if not is_hex(value, length):
            raise WrongValueError(f"must be a {name} ({length} lowercase hex digits)")
        return str(value)

    return check


sha256_digits = _hex_digits("sha256", 64)
commit_digits = _hex_digits("commit", 40)


def read_document(
    data: bytes, file: str, what: str, formats: Collection[int], remedy: str
) -> dict[str, Any]:
    """Reads a JSON document of a known format. Only its `format` is checked.

    Args:
        file: its name, for the remedy.
        what: such as "a lock", for messages.
        remedy: of every error, except that a newer format needs a newer airlift.

    Raises:
        UsageError: no JSON, ambiguous JSON, no `format`, or another format. It has no place.
    """
    check_kind(file, data, what)
    try:
        document = loads(data)
    except Ambiguous as error:
        raise UsageError(f"not {what}: {error}.", remedy) from None
    except (ValueError, RecursionError):
        raise UsageError(f"not {what}: it is not JSON.", remedy) from None
    if not isinstance(document, dict) or "format" not in document:
        raise UsageError(f"not {what}: it has no `format`.", remedy)
    found = document["format"]
    if type(found) is not int or found not in formats:
        known = " and ".join(f"format {format}" for format in formats)
        raise UsageError(
            f"format {str(found)[:60]}; this version of airlift reads {known}.",
            f"Use a newer airlift: update its source, then {install_command()}",
        )
    return document
