"""Typed fields of a document that a user, another machine or another version wrote.

`Fields` is one mapping of a JSON document; `stage.lock.reader` reads YAML files. Nothing is
believed: each method checks the type of one value. A wrong value is a `UsageError` that names the
file, the field, what is expected and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from stage.digests import is_hex
from stage.errors import UsageError, suggest
from stage.file_kinds import check_kind
from stage.files import MAX_NUMBER
from stage.installation import install_command
from stage.strict_json import Ambiguous, loads

if TYPE_CHECKING:
    from stage.lock.reader import Where

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_EXPECTED: Mapping[type, str] = {
    str: "text",
    int: "a whole number from 0 to 2^63 - 1",
    list: "a list",
    dict: "a mapping",
}
_HEX = {40: "a commit", 64: "a sha256"}


class Fields:
    """One mapping of a JSON document. A field that is null counts as absent.

    Args:
        data: the mapping.
        file: the name of the document, for messages.
        remedy: of every error.
        where: the keys that lead to the mapping in the document.

    Raises:
        UsageError: `data` is no mapping. Each method raises it for a wrong value.
    """

    __slots__ = ("data", "file", "remedy", "where")

    def __init__(self, data: Any, file: str, remedy: str, where: Where = ()) -> None:
        self.data, self.file, self.remedy, self.where = data, file, remedy, where
        if type(data) is not dict:
            self.fail(f"should be a mapping, found {self.shown(data)}")

    def place(self, *keys: str | int) -> str:
        """File and field, as messages name them: "x.lock: `assets.a.files[0].path`"."""
        path = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in (*self.where, *keys))
        path = path.removeprefix(".").encode(errors="backslashreplace").decode()
        return f"{self.file}: `{path[:200]}`" if path else f"{self.file}: it"

    def shown(self, value: object, *keys: str | int) -> str:
        """The beginning of a value, for a message."""
        text = _EXPECTED[type(value)] if isinstance(value, dict | list) else repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    def fail(self, problem: str, *keys: str | int, remedy: str = "") -> NoReturn:
        """Raises the error for a field.

        Args:
            problem: such as "names no file".
            keys: of the field; none: the whole mapping.
            remedy: where it is not the document's.
        """
        raise UsageError(f"{self.place(*keys)} {problem}.", remedy or self.remedy)

    def wrong(self, key: str, problem: str, remedy: str = "") -> NoReturn:
        """Raises the error for a value, which the message shows."""
        self.fail(f"{problem}, found {self.shown(self.data.get(key), key)}", key, remedy=remedy)

    def missing(self, key: str) -> NoReturn:
        """Raises the error for an absent field."""
        self.fail("is missing", key)

    def maybe(self, key: str, type_: type[T]) -> T | None:
        """A field that may be absent."""
        return None if self.data.get(key) is None else self.take(key, type_)

    def take(self, key: str, type_: type[T]) -> T:
        """A field that must be there."""
        value: Any = self.data.get(key)
        found = type(value)
        if found is not type_ or (found is int and not 0 <= value <= MAX_NUMBER):
            if value is None:
                self.missing(key)
            self.wrong(key, f"should be {_EXPECTED[type_]}")
        return value  # type: ignore[no-any-return]

    def text(self, key: str) -> str:
        """Text that is not empty."""
        return self.take(key, str) or self.wrong(key, "should be text")

    def choice(self, key: str, choices: Collection[str], remedy: str = "") -> str | None:
        """One of these values. The field may be absent."""
        value: Any = self.data.get(key)
        if value not in (None, *choices):
            near = suggest(value, choices, remedy) if isinstance(value, str) else remedy
            self.wrong(key, f"should be one of {', '.join(choices)}", near)
        return value  # type: ignore[no-any-return]

    def maybe_hex(self, key: str, digits: int = 64) -> str | None:
        """A sha256 (64 digits) or a commit (40). The field may be absent."""
        value: str | None = self.data.get(key)
        if value is not None and not is_hex(value, digits):
            self.wrong(key, f"should be {_HEX[digits]} ({digits} lowercase hex digits)")
        return value

    def hex(self, key: str, digits: int = 64) -> str:
        """The same, of a field that must be there."""
        return self.maybe_hex(key, digits) or self.missing(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where the field is absent."""
        values = self.maybe(key, list) or []
        for number, value in enumerate(values):
            if not isinstance(value, str):
                self.fail(f"should be text, found {self.shown(value)}", key, number)
        return tuple(values)

    def maybe_inside(self, key: str) -> Fields | None:
        """A mapping. The field may be absent."""
        value = self.maybe(key, dict)
        return None if value is None else self._inner(value, key)

    def inside(self, key: str) -> Fields:
        """A mapping."""
        return self._inner(self.take(key, dict), key)

    def each(self, key: str) -> Iterator[Fields]:
        """A list of mappings; empty where the field is absent."""
        for number, value in enumerate(self.maybe(key, list) or ()):
            yield Fields(value, self.file, self.remedy, (*self.where, key, number))

    def _inner(self, value: Any, *keys: str | int) -> Fields:
        return Fields(value, self.file, self.remedy, (*self.where, *keys))


def read_document(
    data: bytes, file: str, what: str, formats: Collection[int], remedy: str
) -> Fields:
    """Reads a JSON document of a known format. Only its `format` is checked.

    Args:
        what: such as "a lock", for messages.
        remedy: of every error, except that a newer format needs a newer airlift.

    Raises:
        UsageError: no JSON, ambiguous JSON, no `format`, or another format.
    """
    check_kind(file, data, what)
    try:
        document = loads(data)
    except Ambiguous as error:
        raise UsageError(f"{file}: not {what}: {error}.", remedy) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file}: not {what}: it is not JSON.", remedy) from None
    if not isinstance(document, dict) or "format" not in document:
        raise UsageError(f"{file}: not {what}: it has no `format`.", remedy)
    fields, found = Fields(document, file, remedy), document["format"]
    if type(found) is not int or found not in formats:
        known = " and ".join(f"format {format}" for format in formats)
        raise UsageError(
            f"{file}: format {fields.shown(found)}; this version of airlift reads {known}.",
            f"Use a newer airlift: update its source, then {install_command()}",
        )
    return fields
