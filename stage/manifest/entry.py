"""The values that only a manifest has: repositories of the Hub, and separators of CSV files."""

from __future__ import annotations

from pathlib import Path

from stage.util import paths as util_paths
from stage.util.fields import YamlFields
from stage.util.files import is_file

_MAX_NAME = 96  # characters of a repository's name (huggingface_hub, utils/_validators.py)


class Entry(YamlFields):
    """One mapping of a manifest; mistakes are reported with file:line."""

    def separator(self, of: str | None = None) -> str | None:
        """The character between the cells of a CSV.

        Args:
            of: the conversion that the key requires; None: it may always be given.
        """
        value = self.optional("separator")
        if value is None:
            return None
        if len(value.encode()) != 1 or value in '"\r\n':
            self.wrong("separator", 'should be one character, such as ";" or "\\t"')
        if of is not None and self.data.get("convert") != of:
            self.wrong("separator", f"goes with `convert: {of}`")
        return value

    def repository(self, key: str) -> str:
        """A Hub repository id: `name` or `org/name`."""
        value = self.text(key)
        for prefix in ("https://huggingface.co/", "hf://"):
            if value.startswith(prefix):
                bare = value.removeprefix(prefix).strip("/")
                for part in ("datasets/", "spaces/"):
                    bare = bare.removeprefix(part)
                self.fail("is an address", key, remedy=f"Write `{key}: {bare}`.")
        if _is_local(value, self.lines.path.parent):
            also = ", and how to read it: `convert: csv`." if key == "dataset" else "."
            self.fail(
                f"{value} is a local file or folder; `{key}` names a repository on the Hub, "
                "such as org/name",
                key,
                remedy=f"Write `path: {value}`{also}",
            )
        parts = value.split("/")
        allowed = all(
            0 < len(part) <= _MAX_NAME and all(c.isalnum() or c in "-_." for c in part)
            for part in parts
        )
        if len(parts) > 2 or not allowed or ".." in value:
            self.wrong(key, "should be a repository such as org/name")
        return value


def _is_local(value: str, folder: Path) -> bool:
    """Whether a value names a file on this machine, not a repository.

    A folder `org/name` is not enough: it may be a clone of the repository.
    """
    is_data = "/" not in value and value.lower().endswith(
        (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
    )
    return util_paths.names_a_local_path(value) or is_data or is_file(folder / value)
