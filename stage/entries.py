"""Typed access to one mapping of a manifest: what each key may hold, and words with file:line where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import names
from stage.disk import is_file
from stage.errors import UsageError
from stage.yamlfile import Lines, Where

_LONGEST_NAME = 96  # characters, of a repository on the Hub (huggingface_hub, utils/_validators.py)


@dataclass(frozen=True)
class Entry:
    """Typed access to one YAML mapping; mistakes come with file:line.

    Attributes:
        where: its own place in the file, for the lines of its keys.
    """

    data: Mapping[str, Any]
    where: Where
    lines: Lines

    def wrong(self, key: str, problem: str, found: object) -> UsageError:
        """What to say of a value."""
        return UsageError(
            f"{self._place(key)}: `{key}` {problem}, found {self._shown(found, key)}.",
            "Correct that line; docs/stage.md says what each key takes.",
        )

    def _place(self, *key: str | int) -> str:
        return self.lines.place(*self.where, *key)

    def _shown(self, found: object, *key: str | int) -> str:
        return self.lines.shown(found, *self.where, *key)

    def text(self, key: str, default: str | None = None) -> str:
        """Text; without a default it has to be there.

        Raises:
            UsageError: it is something else.
        """
        value = self.data.get(key, default)
        if isinstance(value, str) and (value or default == ""):
            return value
        if isinstance(value, int | float):
            written = self.lines.written.get((*self.where, key), "...")
            raise UsageError(
                f"{self._place(key)}: `{key}` should be text, found {self._shown(value, key)}.",
                f'Put it in quotes, as you mean it: {key}: "{written}"',
            )
        raise self.wrong(key, "should be text", value)

    def optional(self, key: str) -> str | None:
        """Text, or None where the key is not written."""
        return self.text(key) if key in self.data else None

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; one text alone stands for a list of it."""
        value = self.data.get(key, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            raise self.wrong(key, "should be a list of texts", value)
        for number, item in enumerate(value):
            if not isinstance(item, str) or not item:
                raise UsageError(
                    f"{self._place(key, number)}: `{key}` should be a list of texts; item {number + 1} is "
                    f"{self._shown(item, key, number)}.",
                    f'Put what you mean there in quotes: {key}: ["..."]',
                )
        return tuple(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "should be true or false", value)
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str | None:
        """One of these words, or None where the key is not written."""
        value = self.data.get(key)
        if value is not None and value not in choices:
            raise self.wrong(key, f"should be one of {', '.join(choices)}", value)
        return value

    def separator(self, of: str | None = None) -> str | None:
        """The character between the cells of a CSV; `of`: the conversion it goes with."""
        value = self.optional("separator")
        if value is None:
            return None
        if len(value.encode()) != 1 or value in '"\r\n':
            raise self.wrong("separator", 'should be one character, such as ";" or "\\t"', value)
        if of is not None and self.data.get("convert") != of:
            raise self.wrong("separator", f"goes with `convert: {of}`", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping; empty where the key is not written."""
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "should be a mapping", value)
        return value

    def repository(self, key: str) -> str:
        """A Hub repository id: `name` or `org/name`."""
        value = self.text(key)
        for prefix in ("https://huggingface.co/", "hf://"):
            if value.startswith(prefix):
                bare = value.removeprefix(prefix).removeprefix("datasets/").strip("/")
                raise UsageError(f"{self._place(key)}: `{key}` is an address.", f"Write `{key}: {bare}`.")
        if _is_local(value, self.lines.path.parent):
            raise UsageError(
                f"{self._place(key)}: `{key}: {value}` is a local file or folder; `{key}` names a "
                "repository on the Hub, such as org/name.",
                f"Write `path: {value}`" + (", and how to read it: `convert: csv`." if key == "dataset" else "."),
            )
        parts = value.split("/")
        allowed = all(0 < len(part) <= _LONGEST_NAME and all(c.isalnum() or c in "-_." for c in part) for part in parts)
        if len(parts) > 2 or not allowed or ".." in value:
            raise self.wrong(key, "should be a repository such as org/name", value)
        return value


def _is_local(value: str, folder: Path) -> bool:
    """Whether a repository's name means something on this machine. A folder `org/name` may be just a clone of it."""
    is_data = "/" not in value and value.lower().endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt"))
    return names.names_a_local_path(value) or is_data or is_file(folder / value)
