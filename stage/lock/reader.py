"""Reads what people write: a mapping -> a frozen dataclass; `document` does so for machines.

A field of the dataclass is a key of the file. Its type is what the key takes, and `setting` adds
the reason of its default, bounds and examples. So one table serves the values, the messages, the
choices that are printed and the reference pages. All mistakes of a file are kept together, each
with file:line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from stage.errors import (
    Mistakes,
    Place,
    UsageError,
    as_shown,
    join_errors,
    nearest_name,
    suggest,
    without_secrets,
)
from stage.installation import install_command

T = TypeVar("T")
Where = tuple[str | int, ...]
REQUIRED: Any = object()
UNFIT: Any = object()
"""What a value becomes that is of none of the types of its key."""
_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}
_BOUNDS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("at_least", "at least", operator.ge),
    ("above", "above", operator.gt),
    ("below", "below", operator.lt),
)


class WrongValueError(ValueError):
    """A value that cannot be: the problem, such as "names no file", and perhaps a remedy."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a file, as its dataclass says.

    Attributes:
        name: in the file.
        field: in the dataclass.
        options: the types that it takes.
        default: `REQUIRED`: there is none.
        exact: types of plain values that need no further check.
        why: the reason for the default, printed at the start of a run; of a key without a default,
            where its value is found.
        also: a second spelling.
        convert: makes the value of what the file has, or raises `WrongValueError`.
        at_least, above, below: bounds for numbers.
        like: an example, for messages.
        is_path: a path of this machine, or a list of words with some: `~` is the home folder.
        is_one: a single text means a list with that text.
        only: another key, and its values with which this key means something.
        decides: what another value changes, for a comparison of two files.
        is_optional: not written where it is null or empty.
        order: the order of the items of a list where it is written; None: as they are.
    """

    name: str
    field: str
    options: tuple[Any, ...]
    default: Any
    exact: frozenset[type]
    why: str = ""
    also: str = ""
    convert: Callable[[Any], Any] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    like: str = ""
    is_path: bool = False
    is_one: bool = False
    only: tuple[str, tuple[str | int, ...]] | None = None
    decides: str = "result"
    is_optional: bool = False
    order: Callable[[Any], Any] | None = None

    @property
    def component(self) -> type | None:
        """The dataclass of the key's value, or of the items of its list."""
        items = [typing.get_args(o)[0] for o in self.options if typing.get_origin(o) is tuple]
        found: list[Any] = [o for o in (*self.options, *items) if dataclasses.is_dataclass(o)]
        return found[0] if found else None


def setting(default: Any = REQUIRED, why: str = "", **about: Any) -> Any:
    """Declares a key as a field of a dataclass.

    Args:
        default: the value when the key is absent; a type is called; `REQUIRED`: there is none.
        why, about: as in `Key`; and `key`, the name in the file where it is not the field's;
            `takes`, the type in the file, where it is another one than the field's. `takes` and
            `only` can be functions, which are called when the first file is read.
    """
    metadata = described(why=why, **about)
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def described(**about: Any) -> Mapping[str, Any]:
    """The metadata of a field that is a key, as for `setting`. A type checker knows that
    `field(metadata=described(...))` has no default, so that fields without any may follow.
    """
    return {"setting": about}


HIDDEN: Mapping[str, Any] = {"setting": None}
"""Metadata of a field that is no key of the file."""
# What may be said about a key without a check of its value. A plain value of such a key is taken by
# its type alone (`Key.exact`), without a call: a lock can have 100,000 files.
_UNCHECKED = {"why", "like", "only", "decides", "is_optional", "order"}


def keys_of(cls: Any) -> Mapping[str, Key]:
    """The keys of a dataclass, by their names in the file."""
    return _keys_of(cls)


@functools.cache  # it would hide the type of its argument
def _keys_of(cls: Any) -> Mapping[str, Key]:
    hints, keys = typing.get_type_hints(cls), dict[str, Key]()
    for item in dataclasses.fields(cls):
        if (found := item.metadata.get("setting", {})) is None:
            continue
        about = {name: _asked(name, value) for name, value in found.items()}
        name = about.pop("key", item.name)
        options = _options(about.pop("takes", hints[item.name]))
        default = REQUIRED if item.default is dataclasses.MISSING else item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        exact = {str, int, bool} & set(options) if about.keys() <= _UNCHECKED else ()
        keys[name] = Key(
            name=name,
            field=item.name,
            options=options,
            default=default,
            exact=frozenset(exact),
            **about,
        )
    return keys


def _asked(name: str, value: Any) -> Any:
    """What is said about a key; a function for `takes` or `only` is called for it."""
    # A function asks a table that is not complete yet where the key is declared (the tasks). By its
    # type, not by `callable`: `takes` is mostly a type, and `convert` is a function to keep.
    is_function = isinstance(value, types.FunctionType)
    return value() if is_function and name in ("takes", "only") else value


def lookup(component: Any, dotted_key: str) -> Any:
    """The value at a dotted key of a dataclass."""
    for name in dotted_key.split("."):
        component = getattr(component, keys_of(type(component))[name].field)
    return component


def plain(value: Any) -> Any:
    """A dataclass as the data of a file: mappings, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {name: plain(item) for name, item in row(value).items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


# What an optional key is omitted for. Not 0 and not False: these say something.
_EMPTY_VALUES: tuple[Any, ...] = (None, (), {})


def row(value: Any) -> dict[str, Any]:
    """The first level of `plain`: the values of the keys as they are."""
    found = {}
    for name, key in keys_of(type(value)).items():
        item = getattr(value, key.field)
        if key.is_optional and item in _EMPTY_VALUES:
            continue
        found[name] = item if key.order is None else sorted(item, key=key.order)
    return found


def dotted(where: Where) -> str:
    """A key as users write it: `a.b.0.c`."""
    return ".".join(map(str, where))


@dataclass(frozen=True)
class Lines:
    """Line numbers (from 1) of the keys of one file, by path of keys.

    Attributes:
        written: the text in the file of a value that was not read as text: `yes`, `1.10`, `~`.
        elsewhere: keys that something else gave, and what: `--set batch.micro`, another file.
        mistakes: what is wrong in the file. `reading_yaml` raises them together.
    """

    path: Path
    numbers: dict[Where, int] = field(default_factory=dict)
    written: dict[Where, str] = field(default_factory=dict)
    elsewhere: dict[Where, str] = field(default_factory=dict)
    mistakes: Mistakes = field(default_factory=Mistakes, compare=False, repr=False)

    def of(self, *where: str | int) -> int | None:
        """The line of a key, or of the nearest enclosing key that has one."""
        for depth in range(len(where), 0, -1):
            if where[:depth] in self.numbers:
                return self.numbers[where[:depth]]
        return None

    def place(self, *where: str | int) -> Place:
        """The line of a key, or what else gave it."""
        for depth in range(len(where), 0, -1):
            if where[:depth] in self.elsewhere:
                return Place(self.elsewhere[where[:depth]])
        return Place(str(self.path), self.of(*where) or 0)

    def put(self, data: dict[str, Any], keys: Sequence[str], value: Any, given_by: str) -> None:
        """Sets a key of the file's data to a value that something else gives.

        Args:
            given_by: the place of the key, for messages; "" takes the key away.
        """
        for known in (self.numbers, self.written, self.elsewhere):
            for where in [where for where in known if where[: len(keys)] == tuple(keys)]:
                del known[where]
        *outer, last = keys
        for depth, key in enumerate(outer, 1):
            if not isinstance(data.get(key), dict):
                data[key] = {}
                self.elsewhere[tuple(keys[:depth])] = given_by
            data = data[key]
        if given_by:
            data[last], self.elsewhere[tuple(keys)] = value, given_by
        else:
            data.pop(last, None)

    def shown(self, value: object, *where: str | int) -> str:
        """A value as its author wrote it: Python's terms mean nothing in YAML."""
        written = self.written.get(where)
        if value is None:
            return "nothing"
        if isinstance(value, bool):
            read = str(value).lower()
            return f"`{read}`" if written in (None, read) else f"`{written}`, which is {read} here"
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            if not all(type(item) in (str, int, float) for item in inner):
                return "a mapping" if isinstance(value, dict) else "a list"
        if isinstance(value, dict):
            written = f"{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}"
        text = repr(value)[1:-1] if isinstance(value, str) else written or str(value)
        text = without_secrets(text)
        return f"`{text}`" if len(text) <= 200 else f"`{text[:200]}...`"

    def check_format(self, data: dict[str, Any], format: int) -> None:
        """Checks the key `format`, and sets it: its mistake is kept.

        Raises:
            UsageError: the format is newer than this version of airlift reads.
        """
        found, data["format"] = data.get("format"), format
        if type(found) is int and found > format:
            raise UsageError(
                f"format {str(found)[:20]}; this version of airlift reads format {format}.",
                f"Use a newer airlift: update its source, then {install_command()}. Or, if you "
                f"wrote this file yourself, write `format: {format}`.",
                place=self.place("format"),
            )
        if type(found) is not int or found != format:
            problem = f"must be {format}, found {self.shown(found, 'format')}"
            problem = "is missing" if found is None else problem
            with self.mistakes:
                raise UsageError(
                    f"`format` {problem}.", f"Write `format: {format}`.", place=self.place("format")
                )


class Reader:
    """Reads mappings of one file into dataclasses.

    Args:
        lines: the lines of the file; keeps the mistakes.
        elsewhere: names that other tools use -> the dotted key here.
        has_nulls: whether a key without a value can mean null; else it was meant to have one.

    Attributes:
        wrong: the dotted keys whose values are not known, because of a mistake. Such a value is its
            default, or None: do not use it before the mistakes are raised.
    """

    def __init__(
        self,
        lines: Lines,
        elsewhere: Mapping[str, str] | None = None,
        has_nulls: bool = True,
    ) -> None:
        self.lines, self.elsewhere, self.has_nulls = lines, elsewhere or {}, has_nulls
        self.wrong: set[str] = set()

    def read(self, cls: type[T], data: Any, where: Where = ()) -> T:
        """Reads one mapping. Keeps mistakes in its keys.

        Args:
            where: the keys that lead to it.

        Raises:
            UsageError: it is no mapping.
        """
        keys = keys_of(cls)
        if not isinstance(data, Mapping):
            raise self._no_mapping(keys, data, where)
        data = self._known(keys, data, where)
        values: dict[str, Any] = {}
        for name, key in keys.items():
            value = data.get(name, REQUIRED)
            # Not "": it is mostly a value that was forgotten, and `_fit` refuses it with a message.
            if type(value) in key.exact and value != "":
                values[key.field] = value
            elif value is not REQUIRED:
                self._take(values, key, value, (*where, name))
            elif key.default is REQUIRED:
                self._miss(values, key, where)
        return cls(**values)

    def _known(
        self, keys: Mapping[str, Key], data: Mapping[str, Any], where: Where
    ) -> Mapping[str, Any]:
        """The mapping, with one spelling of each key. Keeps mistakes: keys that are not known."""
        for key in keys.values():
            if key.also and key.also in data:
                ours, theirs = key.name, key.also
                with self.lines.mistakes:
                    if ours in data:
                        place = self.lines.place(*where, theirs)
                        raise UsageError(
                            f"`{theirs}` and `{ours}` are two spellings of one key.",
                            "Keep one.",
                            place=place,
                        )
                data = {ours if name == theirs else name: value for name, value in data.items()}
        with self.lines.mistakes:
            check_keys(data, keys, where, self.lines, self.elsewhere)
        for name in data.keys() - keys.keys():  # a mistyped key was probably the nearest one
            if meant := nearest_name(str(name), keys):
                self.wrong.add(dotted((*where, meant)))
        return data

    def _take(self, values: dict[str, Any], key: Key, value: Any, where: Where) -> None:
        is_right = False
        with self.lines.mistakes:  # it keeps an error of the block, and goes on after the block
            values[key.field] = self.value(key, value, where)
            is_right = True
        if is_right:
            return
        self.wrong.add(dotted(where))
        if key.default is REQUIRED:
            values[key.field] = None

    def _miss(self, values: dict[str, Any], key: Key, where: Where) -> None:
        values[key.field] = None
        here = dotted((*where, key.name))
        if here not in self.wrong:
            self.wrong.add(here)
            with self.lines.mistakes:
                place = self.lines.place(*where)
                raise UsageError(
                    f"`{as_shown(here)}` is missing.",
                    key.why or key.like or f"Add `{key.name}:`.",
                    place=place,
                )

    def value(self, key: Key, value: Any, where: Where) -> Any:
        """The value of a key, checked.

        Raises:
            UsageError: it cannot be.
        """
        if key.is_one and isinstance(value, str):
            value = [value]
        try:
            found = self._fit_any(self._allowed(key), value, where)
            if found is UNFIT:
                raise self._unfit(key, value, where)
            self._check_bounds(key, found)
            if key.is_path:
                found = _as_path(found)
            return key.convert(found) if key.convert and found is not None else found
        except WrongValueError as error:
            raise self._wrong(error, key, value, where) from None

    def _wrong(self, error: WrongValueError, key: Key, value: Any, where: Where) -> UsageError:
        shown = self.lines.shown(value, *where)
        gap = "" if str(error).startswith(":") else " "
        return UsageError(
            f"{self.named(where)}{gap}{error}, found {shown}.",
            error.remedy or self._what_to_do(key, value, where),
            place=self._place(where),
        )

    def named(self, where: Where) -> str:
        """A key, in messages."""
        return f"`{as_shown(dotted(where))}`"

    def _place(self, where: Where) -> Place | str:
        return self.lines.place(*where)

    def _allowed(self, key: Key) -> Sequence[Any]:
        return [o for o in key.options if self.has_nulls or o is not types.NoneType]

    def _fit_any(self, options: Iterable[Any], value: Any, where: Where) -> Any:
        for option in options:
            if (found := self._fit(option, value, where)) is not UNFIT:
                return found
        return UNFIT

    def _fit(self, option: Any, value: Any, where: Where) -> Any:
        """A value as one type; `UNFIT` if it has another one."""
        origin, arguments, kind = typing.get_origin(option), typing.get_args(option), type(value)
        if dataclasses.is_dataclass(option):
            return UNFIT if value is None else self.read(typing.cast(Any, option), value, where)
        if origin is tuple and kind in (list, tuple):
            hints = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
            if len(hints) != len(value):
                return UNFIT
            pairs = enumerate(zip(hints, value, strict=True))
            items = [self._fit_any(_options(h), item, (*where, n)) for n, (h, item) in pairs]
            return UNFIT if UNFIT in items else tuple(items)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            kinds = _options(arguments[1])
            inner = {str(k): self._fit_any(kinds, v, (*where, str(k))) for k, v in value.items()}
            return UNFIT if UNFIT in inner.values() else inner
        if origin is Literal:  # `True in (1, 2)` holds, but `true` was not meant as 1
            return value if kind is not bool and value in arguments else UNFIT
        if option is float:
            return float(value) if kind in (int, float) and math.isfinite(value) else UNFIT
        return value if option is Any or (kind is option and value != "") else UNFIT

    def _check_bounds(self, key: Key, value: Any) -> None:
        numbers = value if isinstance(value, tuple) else (value,)
        for name, text, holds in _BOUNDS:
            bound = getattr(key, name)
            for number in numbers if bound is not None else ():
                if isinstance(number, int | float) and not holds(number, bound):
                    raise WrongValueError(f"must be {text} {bound}")

    def _no_mapping(self, keys: Mapping[str, Key], data: Any, where: Where) -> UsageError:
        first = next((name for name in ("asset", "name") if name in keys), None)
        written = "-" if not where or isinstance(where[-1], int) else f"{where[-1]}:"
        named = f"`{as_shown(dotted(where))}`" if where else "it"
        return UsageError(
            f"{named} must be `key: value` lines, found {self.lines.shown(data, *where)}.",
            f"Write {written} {{{first}: {data}}}"
            if first and isinstance(data, str)
            else f"Its keys: {', '.join(keys)}.",
            place=self.lines.place(*where),
        )

    def _unfit(self, key: Key, value: Any, where: Where) -> UsageError:
        allowed, named = self._allowed(key), self.named(where)
        found = f", found {_in_quotes(allowed, value) or self.lines.shown(value, *where)}"
        for option in allowed:
            if typing.get_origin(option) is tuple and isinstance(value, list):
                items = _options(typing.get_args(option)[0])
                for number, item in enumerate(value):
                    if self._fit_any(items, item, (*where, number)) is UNFIT:
                        where = (*where, number)
                        found = f"; item {number + 1} is {self.lines.shown(item, *where)}"
                        break
        return UsageError(
            f"{named} must be {' or '.join(map(_describe, allowed))}{found}.",
            self._what_to_do(key, value, where),
            place=self._place(where),
        )

    def _what_to_do(self, key: Key, value: Any, where: Where) -> str:
        """What to do about a value that cannot be.

        The first case that fits decides: those of lists come before those of their items, and an
        example of the key (`like`) before one that is made from its type.
        """
        options = self._allowed(key)
        listed = any(typing.get_origin(option) is tuple for option in options)
        written = self.lines.written.get(where)
        like = f"For instance: {key.like}" if key.like else ""
        if listed and isinstance(value, list) and None in value:
            return "An entry is empty. `#` begins a comment in YAML: put such a line in quotes."
        if key.like and value == "":
            return f"For instance: {key.like}"
        if listed and isinstance(value, str | int | float):
            pair = isinstance(key.default, tuple) and len(key.default) == 2
            written = json.dumps(value, ensure_ascii=False)  # YAML too, also of `*.bin`
            return f"For instance: {list(key.default)}" if pair else f"Write a list: [{written}]"
        if isinstance(where[-1], int) and written:
            return f'Put each in quotes: "{written}"'
        if not like and str in options and isinstance(value, int | float):
            return f'Put it in quotes: {key.name}: "{written or value}"'
        if not like and {int, float} & {*options}:
            whole = {int, types.NoneType} & {*options}
            example = max(3, int(key.at_least or 0)) if whole else 0.001
            like = f"Write a number: {key.name}: {example}"
            if _in_quotes(options, value):
                like = f"Write it without quotes: {value}"
        if {int, float} & {*options} and isinstance(value, str) and "," in value:
            array = f"runner submit RUN --array {dotted(where)}=A,B"
            return f"Give one. Several are several runs: {array}"
        near = suggest(value, _words(options), like) if isinstance(value, str) else like
        return near or "Correct that line."


def check_keys(
    mapping: Mapping[str, Any],
    valid: Iterable[str],
    where: Where,
    lines: Lines,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raises for unknown keys; the message names the nearest valid one.

    Args:
        elsewhere: names that other tools use -> the dotted key here.

    Raises:
        UsageError: for all unknown keys.
    """
    valid, others = list(valid), elsewhere or {}
    inside = f" in `{dotted(where)}`" if where else ""
    unknown = [key for key in mapping if key not in valid]
    last = next((key for key in reversed(unknown) if str(key) not in others), None)
    mistakes = [
        UsageError(
            f"unknown key `{key}`{inside}.",
            f"Write it as `{others[str(key)]}`."
            if str(key) in others
            # The list of all keys is printed once, with the last of them.
            else suggest(str(key), valid, f"Valid keys: {', '.join(valid)}." if key == last else "")
            or "Remove it: see the valid keys below.",
            place=lines.place(*where, key),
        )
        for key in unknown
    ]
    if mistakes:
        raise join_errors(mistakes, "mistakes", str(lines.path))


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})(/\S*)?")


def _as_path(value: Any) -> Any:
    """A path with the home folder in place of `~`. A variable is refused: no shell replaces it."""
    if isinstance(value, tuple):
        return tuple(map(_as_path, value))
    if isinstance(value, str) and (match := _VARIABLE.fullmatch(value)):
        raise WrongValueError(
            f": {value} stays as it is: no shell reads this file, so "
            f"${match[1].strip('{}')} is not replaced",
            "Write the path itself.",
        )
    is_home = isinstance(value, str) and value.startswith("~/")
    return str(Path(value).expanduser()) if is_home else value


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        each = _describe(arguments[0])
        is_any = arguments[-1] is ...
        return f"a list of {each}" if is_any else f"a list of {len(arguments)}, each {each}"
    return _NAMES.get(hint, "`key: value` lines")


def _words(options: Sequence[Any]) -> Iterator[str]:
    """The words that a key takes as a value."""
    if bool in options:
        yield from ("true", "false")
    for option in options:
        if typing.get_origin(option) is Literal:
            yield from (word for word in typing.get_args(option) if isinstance(word, str))


def _in_quotes(options: Sequence[Any], value: object) -> str:
    """What to say about a number or truth in quotes where the quotes are wrong."""
    if str not in options and re.fullmatch(r"[-+.\deE]*\d[-+.\deE]*|true|false", str(value)):
        return f'the text `"{value}"` (remove the quotes)' if isinstance(value, str) else ""
    return ""
