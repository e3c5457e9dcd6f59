"""A file or folder of this machine as an entry of a new manifest: what it is, by its names."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stage.convert.convert import chosen
from stage.convert.csv_files import other_separator
from stage.convert.formats import conversion_of, is_model
from stage.errors import UsageError, suggest_path
from stage.files import human_count
from stage.lock.yaml_lines import scalar
from stage.staging.sources.listing import Walk

_WHAT = {
    "csv": "a table",
    "json": "rows in JSON",
    "jsonl": "rows in JSON",
    "text": "lines of text",
    "arrow": "a table",
    "parquet": "a table",
    "imagefolder": "images",
}


@dataclass(frozen=True)
class LocalEntry:
    """A `path:` entry.

    Attributes:
        path: as the user gave it.
        what: in words; `a model`, for one.
        convert: None: a model, or files that are taken as they are.
        separator: between the cells of its CSV, where that is no comma.
    """

    path: Path
    what: str
    convert: str | None = None
    separator: str | None = None

    @property
    def name(self) -> str:
        """For the asset's name: without the suffixes."""
        return self.path.absolute().name.partition(".")[0]

    def lines(self, manifest: Path) -> list[str]:
        """The lines below the asset's name; a relative path becomes relative to the manifest."""
        path = self.path
        if not path.is_absolute():
            path = Path(os.path.relpath(path, manifest.parent))
            if not (manifest.parent / path).exists():  # `..` behind a link
                path = self.path.absolute()
        lines = [f"path: {scalar(str(path))}"]
        lines += [f"convert: {self.convert}   # {self.what}"] if self.convert else []
        lines += [f"separator: {json.dumps(self.separator)}"] if self.separator else []
        return lines if self.convert else [f"# {self.what}", *lines]


def look_at(path: Path) -> LocalEntry:
    """Finds out what a file or folder is.

    Raises:
        UsageError: there is none, or no file in it.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder.", suggest_path(path))
    walk = Walk(path, ())
    if path.is_file():
        walk.sizes[path.name] = path.stat().st_size
    else:
        walk.run()
    names = sorted(walk.sizes)
    if not names:
        raise UsageError(f"{path}: has no file to take.", "Check the path.")
    if is_model(names):
        return LocalEntry(path, "a model")
    convert = conversion_of(names)
    if convert is None:
        return LocalEntry(path, f"{human_count(len(names), 'file')}, as they are")
    read = chosen(convert, names, str(path))
    what = _WHAT[convert]
    what += f", {len(read)} of {len(names)} files" if len(read) < len(names) else ""
    separator = None
    if convert == "csv":
        with suppress(OSError, ValueError):  # `fetch` says what is wrong with it
            separator = other_separator(path if path.is_file() else path / read[0])
    return LocalEntry(path, what, convert, separator)
