"""Reads YAML mappings into frozen dataclasses.

(mapping, line numbers, dataclass) -> `Read`. `plain` does the reverse. A dataclass declares each
key with `setting(default, why)`. So each default has its reason, which is printed at the start
(`defaults`). Errors name file:line, the expected value and the found value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from runner.config.names_elsewhere import NAMES_ELSEWHERE
from runner.errors import Lines, UsageError, check_keys, nearest_name, read_value, suggest

T = TypeVar("T")
REQUIRED: Any = object()
Where = tuple[str | int, ...]


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


def setting(
    default: Any = REQUIRED,
    why: str = "",
    *,
    key: str | None = None,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    like: str = "",
    path: bool = False,
) -> Any:
    """Declares a key of the run file as a dataclass field.

    Args:
        default: the value when the key is absent; a type is called; `REQUIRED`: there is none.
        why: the reason for that default, printed at the start.
        key: the key in the file, where it cannot be a Python name (`global`).
        at_least, above, below: bounds for numbers.
        like: an example, for messages.
        path: it is a path of this machine, or a list of words with some: `~` is the home folder.
    """
    metadata = {"why": why, "key": key, "at_least": at_least, "above": above, "below": below}
    metadata |= {"like": like, "path": path}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def dotted(where: Where) -> str:
    """Returns a key as users write it: `a.b.0.c`."""
    return ".".join(map(str, where))


def key_of(field: dataclasses.Field[Any]) -> str:
    """Returns the key of a field in the file."""
    return field.metadata.get("key") or field.name


@dataclasses.dataclass(frozen=True)
class Read(Generic[T]):
    """One component of a run file, as it was read.

    Attributes:
        value: the component. Wrong and missing values are its defaults, or None: nobody may use it
            before `lines.mistakes` is checked, except to find mistakes in what is not `wrong`.
        given: the dotted keys that the file gave (all others are defaults).
        wrong: the dotted keys whose values are not known, because of a mistake.
    """

    value: T
    given: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()


def read(cls: type[T], mapping: Any, where: Where, lines: Lines) -> Read[T]:
    """Reads one component of a run file. Keeps all mistakes in `lines.mistakes`.

    A mistake is an unknown or missing key, a value of the wrong type or one that is out of bounds.

    Args:
        cls: its dataclass.
        mapping: its content.
        where: its key.
        lines: the file's line numbers.

    Raises:
        UsageError: it is no mapping.
    """
    fields = {
        key_of(field): field
        for field in dataclasses.fields(typing.cast(Any, cls))
        if field.metadata
    }
    if not isinstance(mapping, Mapping):
        first = next((key for key in ("asset", "name") if key in fields), None)
        written = "-" if isinstance(where[-1], int) else f"{where[-1]}:"
        raise UsageError(
            f"{lines.place(*where)}: `{dotted(where)}` must be `key: value` lines, "
            f"found {_show(mapping)}.",
            f"Write {written} {{{first}: {mapping}}}"
            if first and isinstance(mapping, str)
            else f"Its keys: {', '.join(fields)}.",
        )
    with lines.mistakes:
        check_keys(mapping, fields, where, lines, NAMES_ELSEWHERE)
    # A mistyped key was probably meant to be the nearest one.
    meant = {nearest_name(str(key), fields) for key in mapping if key not in fields}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    given: set[str] = set()
    wrong = {dotted((*where, key)) for key in meant if key}
    for key, field in fields.items():
        here = (*where, key)
        if key in mapping:
            found: Read[Any] = Read(None, wrong=frozenset({dotted(here)}))
            with lines.mistakes:
                found = _read_key(hints[field.name], mapping[key], field, here, lines)
                values[field.name] = found.value
            given |= found.given | {dotted(here)}
            wrong |= found.wrong
        elif _is_required(field) and key not in meant:
            with lines.mistakes:
                raise UsageError(
                    f"{lines.place(*where)}: `{dotted(here)}` is missing.",
                    "Write `format: 1`." if here == ("format",) else f"Add `{key}:`.",
                )
            wrong.add(dotted(here))
    required = {field.name: None for field in fields.values() if _is_required(field)}
    return Read(cls(**(required | values)), frozenset(given), frozenset(wrong))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _read_key(
    hint: Any, value: Any, field: dataclasses.Field[Any], here: Where, lines: Lines
) -> Read[Any]:
    """Reads the value of a key: a component, a list of components, or a plain value."""
    component = _component(hint)
    if component and value is not None:
        return read(component, value, here, lines)
    listed = _listed_component(hint)
    if listed and isinstance(value, (list, tuple)):
        items: list[Read[Any]] = [
            read(listed, item, (*here, number), lines) for number, item in enumerate(value)
        ]
        return Read(
            tuple(item.value for item in items),
            frozenset().union(*(item.given for item in items)),
            frozenset().union(*(item.wrong for item in items)),
        )
    return Read(_value(hint, value, field, here, lines))


def _field_named(component: Any, key: str) -> dataclasses.Field[Any]:
    return next(f for f in dataclasses.fields(component) if f.metadata and key_of(f) == key)


def lookup(component: Any, name: str) -> Any:
    """Returns the value at a dotted key."""
    for key in name.split("."):
        component = getattr(component, _field_named(component, key).name)
    return component


def replaced(component: Any, keys: Sequence[str], value: Any, origin: tuple[str, Lines]) -> Any:
    """Returns a component with another value, checked as if the run file had it.

    Args:
        component: an instance that `read` returned.
        keys: the key in the component.
        value: the new value.
        origin: the whole dotted key, and the file that gives the value, for messages.

    Raises:
        UsageError: the value has the wrong type or is out of bounds.
    """
    field = _field_named(component, keys[0])
    if len(keys) > 1:
        inner = replaced(getattr(component, field.name), keys[1:], value, origin)
    else:
        hint = typing.get_type_hints(type(component))[field.name]
        inner = _value(hint, value, field, tuple(origin[0].split(".")), origin[1])
    return dataclasses.replace(component, **{field.name: inner})


def defaults(component: Any, where: tuple[str, ...], given: frozenset[str]) -> Iterator[Choice]:
    """Yields every default that was used and has a reason, in the order of the fields.

    Args:
        component: an instance that `read` returned.
        where: its key.
        given: dotted keys that are not defaults.
    """
    for item in dataclasses.fields(component):
        if not item.metadata:
            continue
        here, value = (*where, key_of(item)), getattr(component, item.name)
        if dataclasses.is_dataclass(value):
            yield from defaults(value, here, given)
        elif ".".join(here) not in given and item.metadata["why"]:
            yield Choice(".".join(here), value, item.metadata["why"])


def plain(value: Any) -> Any:
    """Returns a component as YAML data: mappings, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {
            key_of(f): plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.metadata
        }
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _component(hint: Any) -> type | None:
    """Returns the dataclass in a hint (`X` or `X | None`)."""
    for option in _options(hint):
        if dataclasses.is_dataclass(option):
            return typing.cast(type, option)
    return None


def _listed_component(hint: Any) -> type | None:
    """Returns the dataclass in `tuple[X, ...]`."""
    return _component(typing.get_args(hint)[0]) if typing.get_origin(hint) is tuple else None


def _options(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )


def _value(hint: Any, value: Any, field: dataclasses.Field[Any], where: Where, lines: Lines) -> Any:
    fits, converted = _fit_any(_options(hint), value)
    if fits:
        _check_bounds(converted, field, where, lines)
        return _as_path(converted, where, lines) if field.metadata["path"] else converted
    expected = " or ".join(_describe(option) for option in _options(hint))
    lists = any(typing.get_origin(option) is tuple for option in _options(hint))
    like = f"For instance: {field.metadata['like']}" if field.metadata["like"] else ""
    if lists and isinstance(value, (str, int, float)):
        default: Any = field.default
        pair = isinstance(default, tuple) and len(default) == 2
        like = f"For instance: {list(default)}" if pair else f"Write a list: [{value}]"
    if lists and isinstance(value, list) and any(type(item) in (int, float) for item in value):
        like = like or "Put each in quotes: YAML reads 3.10 as the number 3.1."
    if not like and str in _options(hint) and type(value) in (int, float):
        like = f'Put it in quotes: {field.name}: "{value}"'
    if not like and {int, float} & set(_options(hint)):
        counts = {int, type(None)} & set(_options(hint))
        like = f"Write a number: {field.name}: {3 if counts else 0.001}"
    if lists and isinstance(value, list) and None in value:
        like = "An entry is empty. `#` begins a comment in YAML: put such a line in quotes."
    if {int, float} & set(_options(hint)) and isinstance(value, str) and "," in value:
        array = f"--array {dotted(where)}=A,B"
        like = f"Give one. Several are several runs: runner submit RUN {array}, or runner train"
    raise UsageError(
        f"{lines.place(*where)}: `{dotted(where)}` must be {expected}, found {_show(value)}.",
        suggest(value, _words(hint), like) if isinstance(value, str) else like,
    )


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})(/\S*)?")


def _as_path(value: Any, where: Where, lines: Lines) -> Any:
    """Returns a path with the home folder in place of `~`.

    Raises:
        UsageError: it begins with a variable. Only a shell replaces those.
    """
    if isinstance(value, tuple):
        return tuple(_as_path(item, where, lines) for item in value)
    if not isinstance(value, str):
        return value
    if match := _VARIABLE.fullmatch(value):
        raise UsageError(
            f"{lines.place(*where)}: `{dotted(where)}`: {value} stays as it is: no shell reads "
            f"this file, so ${match[1].strip('{}')} is not replaced.",
            "Write the path itself.",
        )
    return str(Path(value).expanduser()) if value.startswith("~/") else value


def _fit(hint: Any, value: Any) -> tuple[bool, Any]:
    """Returns whether a YAML value has a type, and the value in that type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return value is None, None
    if origin is typing.Literal:
        return (value in arguments and not isinstance(value, bool)), value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if hint is float:
        number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        return number, float(value) if number else value
    if hint in (str, bool):
        return isinstance(value, hint), value
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
        if len(kinds) != len(value):
            return False, value
        items = [_fit(kind, item) for kind, item in zip(kinds, value, strict=True)]
        return all(fits for fits, _ in items), tuple(item for _, item in items)
    if origin is dict and isinstance(value, Mapping):
        pairs = {str(key): _fit_any(_options(arguments[1]), item) for key, item in value.items()}
        return all(fits for fits, _ in pairs.values()), {
            key: item for key, (_, item) in pairs.items()
        }
    return False, value


def _fit_any(options: Sequence[Any], value: Any) -> tuple[bool, Any]:
    fitting = (result for result in (_fit(option, value) for option in options) if result[0])
    return next(fitting, (False, value))


def _check_bounds(value: Any, field: dataclasses.Field[Any], where: Where, lines: Lines) -> None:
    bounds: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
        ("at_least", "at least", operator.ge),
        ("above", "above", operator.gt),
        ("below", "below", operator.lt),
    )
    numbers = [
        n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, (int, float))
    ]
    for name, text, holds in bounds:
        bound = field.metadata.get(name)
        if bound is not None and not all(holds(number, bound) for number in numbers):
            raise UsageError(
                f"{lines.place(*where)}: `{dotted(where)}` must be {text} {bound}, "
                f"found {_show(value)}."
            )


def _words(hint: Any) -> list[str]:
    """Returns the words that a hint allows as a value."""
    words = ["true", "false"] if bool in _options(hint) else []
    for option in _options(hint):
        if typing.get_origin(option) is typing.Literal:
            words += [choice for choice in typing.get_args(option) if isinstance(choice, str)]
    return words


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        each = _describe(arguments[0])
        return (
            f"a list of {each}"
            if arguments[-1] is ...
            else f"a list of {len(arguments)}, each {each}"
        )
    if origin is dict or dataclasses.is_dataclass(hint):
        return "`key: value` lines"
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names[hint]


def _is_text_by_quotes(text: str) -> bool:
    """Returns whether YAML would read this text as another type without its quotes."""
    try:
        return not isinstance(read_value(text), (str, type(None)))
    except ValueError:
        return False


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str) and _is_text_by_quotes(value):
        return f'the text `"{value}"` (remove the quotes)'
    return f"`{value}`"
