"""Typed fields of a lock's JSON: taken out one by one, believing nothing; failures name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from stage.digest import Digest, is_hex
from stage.disk import MAX_NUMBER
from stage.errors import UsageError

T = TypeVar("T")

REMEDY = "Make it anew with `stage lock`, or take it from version control or from the bundle's origin."

_MAX_DEPTH = 32  # a lock has nine levels; Python's own limit would strike somewhere else
_NAMES: Mapping[type, str] = {str: "text", int: "a whole number from 0 to 2^63 - 1", list: "a list", dict: "a mapping"}


class Fields:
    """Takes typed fields out of a parsed lock; failures name the file and the field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, place: str, problem: str) -> NoReturn:
        """Refuses the lock for what stands at `place`."""
        raise UsageError(f"{self.where}: `{place}` {problem}.", REMEDY)

    def check_text(self, value: Any, place: str, depth: int) -> None:
        """Refuses what JSON can say and our own text cannot: lone surrogates; and nesting no lock has."""
        if depth > _MAX_DEPTH:
            self.fail(".".join(place.split(".")[:3]), "is nested too deeply")
        if isinstance(value, dict):
            for key, item in value.items():
                self.check_text(key, place, depth)
                self.check_text(item, f"{place}.{key}" if place else key, depth + 1)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.check_text(item, f"{place}[{index}]", depth + 1)
        elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            self.fail(ascii(place)[1:-1], f"has half a character in it: {value!a}")

    def take(self, mapping: Mapping[str, Any], key: str, type_: type[T], place: str) -> T:
        """A field that must be there, of the given type."""
        value = self.maybe(mapping, key, type_, place)
        if value is None:
            self.fail(f"{place}.{key}" if place else key, "is missing")
        return value

    def maybe(self, mapping: Mapping[str, Any], key: str, type_: type[T], place: str) -> T | None:
        """A field that may be null or absent."""
        value = mapping.get(key)
        if value is None:
            return None
        is_no_count = isinstance(value, int) and (isinstance(value, bool) or not 0 <= value <= MAX_NUMBER)
        if is_no_count or not isinstance(value, type_):
            self.fail(f"{place}.{key}" if place else key, f"should be {_NAMES[type_]}, found {shown(value)}")
        return value

    def mapping(self, value: Any, place: str, of: str = "a mapping") -> Mapping[str, Any]:
        """A value that has to be a mapping; `of`: in words."""
        if not isinstance(value, dict):
            self.fail(place, f"should be {of}")
        return value

    def text(self, value: Any, place: str) -> str:
        """A value that has to be text."""
        if not isinstance(value, str):
            self.fail(place, f"should be text, found {shown(value)}")
        return value

    def texts(self, mapping: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
        """A list of texts; empty if it is null or absent."""
        return tuple(self.text(item, f"{place}.{key}") for item in self.maybe(mapping, key, list, place) or [])

    def commit(self, mapping: Mapping[str, Any], key: str, place: str) -> str | None:
        """The id of a commit, which may be null or absent."""
        commit = self.maybe(mapping, key, str, place)
        if commit is not None and not is_hex(commit, 40):
            self.fail(f"{place}.{key}", f"should be a commit (40 hex digits), found {shown(commit)}")
        return commit

    def sha256(self, value: Mapping[str, Any], place: str) -> str | None:
        """The field `sha256`, which may be null or absent."""
        sha256 = self.maybe(value, "sha256", str, place)
        if sha256 is not None and not is_hex(sha256, 64):
            self.fail(f"{place}.sha256", f"should be 64 lowercase hex digits, found {shown(sha256)}")
        return sha256

    def upstream(self, value: Mapping[str, Any], place: str) -> Digest | None:
        """The field `upstream`: one digest, or nothing."""
        evidence = self.maybe(value, "upstream", dict, place)
        if not evidence:
            return None
        if len(evidence) != 1:
            self.fail(f"{place}.upstream", "should be one digest")
        algorithm, digest = next(iter(evidence.items()))
        try:
            return Digest(algorithm, self.text(digest, f"{place}.upstream"))
        except ValueError as error:
            self.fail(f"{place}.upstream", f"is no digest: {error}")


def shown(value: object) -> str:
    """A value as a message has it: its beginning."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
