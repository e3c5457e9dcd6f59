"""Reads YAML files of users, with the line of each key; and the cards of the Hub.

File -> (plain dicts and lists, `Lines`). For a mistyped key the error names file:line and the
nearest valid key. A key that is written twice is an error, because YAML would silently keep the
last one.

A card of the Hub (README.md) is YAML between two lines of `---` at the top, and text below.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from stage.errors import Place, UsageError, about, quoted
from stage.file_kinds import MAX_START, check_kind, how_to_get, suggest_file
from stage.files import read_file, read_start
from stage.lock.reader import Lines, Where
from stage.text import is_utf16, save_as_utf8

MAX_SIZE = 2**20  # bytes: PyYAML takes seconds for that much
MAX_DEPTH = 50  # of lists and mappings: PyYAML takes minutes for a line of brackets


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises: 1e-4 is a number, 010 is not 8, dates stay text."""


_SURPRISING = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "int", "float")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _SURPRISING]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.2, 10.3.2 (core schema), with the `_` between digits that people write.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+"
        r"|[-+]?[0-9][0-9_]*\.[0-9_]*|[-+]?\.[0-9][0-9_]*"
        r"(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def read_value(text: str) -> Any:
    """One value, as it would be read in a file.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, OverflowError) as error:
        raise ValueError(str(error)) from None


def load_yaml_with_lines(path: Path) -> tuple[dict[str, Any], Lines]:
    """Reads a YAML mapping.

    Raises:
        UsageError: no such file, too large, not UTF-8, not YAML, not a mapping, keys written
            twice, or an alias (`&a`/`*a`: a few lines of those can mean gigabytes).
    """
    with reading_yaml(path) as loaded:
        return loaded


@contextmanager
def reading_yaml(path: Path, wanted: str = "") -> Iterator[tuple[dict[str, Any], Lines]]:
    """Reads a YAML mapping for the block that follows.

    The block checks the values. It keeps mistakes by `with lines.mistakes:`, and may raise one. At
    its end all mistakes are raised together; keys that are written twice are among them.

    Args:
        wanted: the kind of file (`stage.file_kinds`): another known kind is refused; "": any.

    Raises:
        UsageError, PolicyError: as for `load_yaml_with_lines`, or there are mistakes.
    """
    data, lines = _load(path, wanted)
    with lines.mistakes:
        yield data, lines
    lines.mistakes.check(str(path))


def _load(path: Path, wanted: str) -> tuple[dict[str, Any], Lines]:
    lines = Lines(path)
    with about(lines.place()):
        text = _text(path, wanted)
        try:
            _check_aliases_and_depth(text, path)
            node = yaml.compose(text, Loader=_Loader)
            data = None if node is None else _build(node, (), lines)
        except yaml.YAMLError as error:
            raise _not_yaml(text, error, path) from None
        except (ValueError, OverflowError):  # PyYAML on "\Uffffffff": no character has that number
            raise UsageError(
                "not YAML: the number after a `\\U` in quotes is no character's number.",
                "Put text with backslashes into single quotes.",
            ) from None
        if not isinstance(data, dict):
            raise UsageError(
                f"expected `key: value` lines, found {_kind(data)}.",
                how_to_get(wanted) or "Write `key: value`.",
            )
    return data, lines


def _text(path: Path, wanted: str) -> str:
    content = b""
    try:
        if wanted:  # before its size and encoding, which another kind may have
            check_kind(path, read_start(path, MAX_START), wanted)
        content = read_file(path, MAX_SIZE)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError("no such file.", suggest_file(path, wanted)) from None
    except IsADirectoryError:
        raise UsageError(
            "is a folder, expected a YAML file.",
            f"Give the file itself, and this folder as --output {quoted(path)}, if a run is in it."
            if (path / "config.yaml").exists()
            else "Give the path of the file.",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"not UTF-8 text (byte {error.start}).", save_as_utf8(path, content)
        ) from None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}.", "Give a YAML file.") from None
    if is_utf16(content):  # without a mark
        raise UsageError("not UTF-8 text (UTF-16).", save_as_utf8(path, content))
    return text


def _check_aliases_and_depth(text: str, path: Path) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        place = Place(str(path), event.start_mark.line + 1 if event.start_mark else 0)
        if isinstance(event, yaml.AliasEvent):
            raise UsageError(
                "YAML aliases (`*name`) are not read here.", "Write the value out.", place=place
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise UsageError("nested too deeply.", "Use fewer nested levels.", place=place)


def _build(node: yaml.Node, where: Where, lines: Lines) -> Any:
    """A node as plain data. Fills `lines`."""
    numbers, place = lines.numbers, Place(str(lines.path), node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            place = Place(str(lines.path), key_node.start_mark.line + 1)
            _check_lone_surrogates(key_node.value, place)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError("a key must be plain text.", "Write `key: value`.", place=place)
            here: Where = (*where, key_node.value)
            if key_node.value in result:
                with lines.mistakes:
                    raise UsageError(
                        f"`{key_node.value}` is written twice (first on line {numbers[here]}).",
                        "Keep one.",
                        place=place,
                    )
                continue
            numbers[here] = place.line
            result[key_node.value] = _build(value_node, here, lines)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            inside: Where = (*where, index)
            numbers[inside] = item.start_mark.line + 1
            items.append(_build(item, inside, lines))
        return items
    try:
        value = _Loader("").construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError, yaml.YAMLError):  # `!!int ""`, `!!bool x`
        raise UsageError(
            f"`{node.value[:60]}` cannot be read as a value.", "Put it in quotes.", place=place
        ) from None
    _check_lone_surrogates(value, place)
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if is_plain and (found := _NOT_A_KEY.match(node.value)):
        raise UsageError(
            f"no plain space and colon after `{found[1]}`: {_named(found[2])}.",
            f"Write `{found[1]}: ` with the keys `:` and space. Text from a web page or a chat "
            "often has other characters, which look the same.",
            place=place,
        )
    if not isinstance(value, str):
        lines.written[where] = _cut(node.value)
    return value


# A key whose colon is a wide one, or whose space is not one to YAML. The line is read as text.
_NOT_A_KEY = re.compile(r"([a-z][a-z0-9_.-]*)(:[^\S \t\r\n]|:\u200b|\uff1a)")


def _named(text: str) -> str:
    return " and ".join(f"U+{ord(c):04X} ({unicodedata.name(c, '?').lower()})" for c in text[-1:])


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_lone_surrogates(value: object, place: Place) -> None:
    """YAML reads `"\\ud800"` as text, and no file can hold it."""
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise UsageError(
            f"{value[:60]!a} has a lone surrogate in it.",
            "Write the character itself.",
            place=place,
        )


def _not_yaml(text: str, error: yaml.YAMLError, path: Path) -> UsageError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = Place(str(path), mark.line + 1 if mark else 0)
    return UsageError(f"not valid YAML: {problem}.", _yaml_remedy(text, error), place=place)


def _kind(data: object) -> str:
    return {type(None): "nothing", list: "a list", str: "text"}.get(type(data), type(data).__name__)


def _yaml_remedy(text: str, error: yaml.YAMLError) -> str:
    """What is wrong in the line of a YAML error, where that is known."""
    mark: Any = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return "Correct that line."
    line = lines[mark.line]
    for number in range(max(1, mark.line), mark.line + 2):
        if found := re.search(r"[\uff1a\u3000\u00a0\u200b\uff0c\u201c\u201d]", lines[number - 1]):
            return f"Line {number} has {_named(found[0])}: type the plain character."
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"Line {mark.line + 1} begins with a tab. Write spaces."
    above = next((number for number in range(mark.line, 0, -1) if lines[number - 1].strip()), 0)
    if "mapping values are not allowed" in str(error) and above and ":" not in lines[above - 1]:
        return f"Is a `:` missing at the end of line {above}?"
    # `*.bin` and `@x` have a meaning in YAML that few users know.
    pattern = re.search(r"[*&!%@`][^\s,\]}]*", line)
    if pattern and '"' not in line:
        return f'Put it in quotes: "{pattern[0]}"'
    return "Correct that line."


_FRONT_MATTER = re.compile(
    r"\A(?:\ufeff)?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE
)


def scalar(text: str) -> str:
    """Text as YAML on one line: plain where that means the same, else in quotes."""
    if re.fullmatch(r"[A-Za-z][\w./-]*", text, re.ASCII) and yaml.safe_load(text) == text:
        return text
    return str(yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**6)).strip()


def split_card(card: str) -> tuple[dict[str, Any], str]:
    """The YAML's mapping and the text of a card; an empty mapping if it cannot be read."""
    match = _FRONT_MATTER.match(card)
    if not match:
        return {}, card
    try:
        metadata = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        metadata = None
    return (metadata if isinstance(metadata, dict) else {}), card[match.end() :]
