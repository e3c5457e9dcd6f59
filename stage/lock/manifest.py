"""Reads a manifest: `manifests/*.yaml` -> `Manifest`.

Every entry becomes a frozen request of its kind (`requests`); mistakes are reported with file:line.
This module reads no other file and no network: `resolve` finds out whether a repository exists.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stage.errors import (
    Place,
    PolicyError,
    UsageError,
    about,
    quoted,
    suggest_relative,
)
from stage.file_kinds import MANIFEST
from stage.files import is_file, read_file
from stage.lock.reader import (
    Lines,
    Reader,
    Where,
    check_keys,
    keys_of,
    setting,
)
from stage.lock.requests import (
    KINDS,
    AssetRequest,
    DatasetRequest,
    ModelRequest,
    PathRequest,
    TokenizerEntry,
    UrlRequest,
)
from stage.lock.yaml_lines import MAX_SIZE, reading_yaml
from stage.paths import collisions, printable, problem_with_asset_name

FORMAT = 1
BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_MAX_NAME = 96  # characters of a repository's name (huggingface_hub, utils/_validators.py)


def names_local_file(value: str, folder: Path) -> bool:
    """Whether a value names a file on this machine, not a repository.

    A folder `org/name` is not enough: it may be a clone of the repository.
    """
    is_data = "/" not in value and Path(value).suffix.lower() in BY_SUFFIX
    is_path = value.startswith(("./", "../", "/", "~/")) or value in (".", "..")
    return is_path or is_data or is_file(folder / value)


def is_repository_id(value: str) -> bool:
    """Whether a repository of the Hub can have this name: `name` or `org/name`."""
    parts = value.split("/")
    allowed = all(
        0 < len(part) <= _MAX_NAME and all(c.isalnum() or c in "-_." for c in part)
        for part in parts
    )
    return allowed and len(parts) <= 2 and ".." not in value


@dataclass(frozen=True, kw_only=True)
class _Policy:
    licences: tuple[str, ...] = setting((), is_one=True, also="licenses")


@dataclass(frozen=True, kw_only=True)
class _ManifestKeys:
    """The keys of a manifest."""

    format: int = FORMAT
    name: str | None = None
    assets: dict[str, Any] = setting(dict)
    policy: _Policy | None = None


@dataclass(frozen=True)
class Manifest:
    """The assets that a bundle should hold, as a user wrote them.

    Attributes:
        path: the file it was read from; relative paths inside are relative to its folder.
        text: the bytes of the file. The bundle holds them as `stage.yaml`.
        requests: by asset name, in the order of the file.
        lines: the line of each key, for messages.
        licences: licences that the bundle may hold (`policy: {licences: [...]}`); None: any.
        output: the bundle that this run makes, for messages; None: the run makes only the lock.
    """

    path: Path
    text: bytes
    name: str
    requests: Mapping[str, AssetRequest]
    lines: Lines
    licences: tuple[str, ...] | None = None
    output: Path | None = None

    @property
    def lock_path(self) -> Path:
        """`x.lock` beside `x.yaml`."""
        return self.path.with_suffix(".lock")

    def place(self, asset: str, *keys: str) -> Place:
        """The line of an asset's entry, or of a key in it."""
        return self.lines.place("assets", asset, *keys)

    def entry(self, asset: str, *keys: str) -> Place:
        """The same, for messages that name the asset after the line."""
        return replace(self.place(asset, *keys), name=asset)

    def update_command(self, asset: str) -> str:
        """The command that resolves an asset again, for messages."""
        command = ["stage", "lock", str(self.path)]
        if self.output is not None:
            command = ["stage", "fetch", str(self.path), "-o", str(self.output)]
        return shlex.join([*command, "--update", asset])

    @staticmethod
    def load(path: Path | str) -> Manifest:
        """Reads a manifest.

        Raises:
            UsageError, PolicyError: all mistakes in the manifest, each with file:line.
        """
        path = Path(path)
        with reading_yaml(path, MANIFEST) as (data, lines):
            lines.check_format(data, FORMAT)
            reader = Reader(lines, has_nulls=False)
            found = reader.read(_ManifestKeys, data)
            requests = _requests(path, found.assets, reader)
            licences = found.policy.licences if found.policy else None
            if licences == () and reader.wrong.isdisjoint(("policy", "policy.licences")):
                raise UsageError(
                    "`policy` names no licence, so nothing could be fetched.",
                    "List those you allow: `policy: {licences: [apache-2.0, mit]}`; or omit "
                    "`policy`.",
                    place=lines.place("policy", "licences"),
                )
            return Manifest(
                path=path,
                text=read_file(path, MAX_SIZE),
                name=found.name or path.stem,
                requests=requests,
                lines=lines,
                licences=licences,
            )


def _requests(path: Path, assets: Mapping[str, Any], reader: Reader) -> dict[str, AssetRequest]:
    """The request of every asset. Keeps the mistakes."""
    requests: dict[str, AssetRequest] = {}
    lines = reader.lines
    for name, value in assets.items():
        with lines.mistakes, about(lines.place("assets", name)):
            requests[str(name)] = _request(str(name), value, reader)
    if not assets and not lines.mistakes.found:  # else the key may be mistyped
        with lines.mistakes:
            raise UsageError(
                "no assets.",
                "Name at least one, for instance: assets: {bert: {model: google-bert/"
                "bert-base-uncased}}",
                place=lines.place("assets"),
            )
    for first, second in collisions(requests):
        with lines.mistakes:
            raise PolicyError(
                f"the assets `{first}` and `{second}` would be "
                "one folder on a disk that ignores case or normalises Unicode.",
                "Rename one of them.",
                place=lines.place("assets", second),
            )
    if lines.mistakes.found and not path.with_suffix(".lock").exists():
        _keep_missing(path, requests, lines)  # with a lock, the bundle may hold what is gone here
    return requests


def _keep_missing(path: Path, requests: Mapping[str, AssetRequest], lines: Lines) -> None:
    """Keeps errors for missing local files, to report them together with other mistakes."""
    for name, request in requests.items():
        if isinstance(request, PathRequest) and request.path:
            with lines.mistakes, about(replace(lines.place("assets", name, "path"), name=name)):
                local_path(request.path, path)


def local_path(written: str, manifest: Path) -> Path:
    """The file or folder that a manifest's `path:` means on this machine.

    Args:
        written: as the manifest has it; `~` means the home folder.
        manifest: the manifest; relative paths are relative to its folder.

    Raises:
        UsageError: there is no such file or folder.
    """
    try:
        found = manifest.parent / Path(written).expanduser()
    except RuntimeError:
        raise UsageError(f"there is no home folder for {written}.", "Write it out.") from None
    if not os.path.lexists(found):
        if written.startswith("$"):
            raise UsageError(
                f"there is no {found}: no shell reads this file, so {written} stays as it is.",
                "Write the path itself; `~/x` is in your home folder.",
            )
        raise UsageError(
            f"there is no {found}.", suggest_relative(written, found, "the manifest's folder")
        )
    return found


def _request(name: str, value: Any, reader: Reader) -> AssetRequest:
    where, lines = ("assets", name), reader.lines
    if problem := problem_with_asset_name(name):
        raise UsageError(
            f"{printable(name)} cannot name an asset: {problem}.",
            "Give it another name.",
        )
    if not isinstance(value, dict):
        raise UsageError(
            f"`{name}` should be a mapping such as `model: org/name`.",
            f"Give it one of: {', '.join(KINDS)}.",
        )
    kinds = [key for key in KINDS if key in value]
    if len(kinds) != 1:
        every = sorted({key for kind in KINDS.values() for key in keys_of(kind)})
        check_keys(value, every, where, lines)
        found = f"has both `{kinds[0]}` and `{kinds[1]}`" if kinds else "does not say what it is"
        raise UsageError(
            f"asset `{name}` {found}.",
            f"Give it one of: {', '.join(KINDS)}.",
        )
    request: Any = reader.read(KINDS[kinds[0]], value, where)
    with lines.mistakes, about(lines.place(*where, kinds[0])):
        if getattr(request, "repository", None):
            _check_repository(request.repository, kinds[0], lines)
    if isinstance(request, DatasetRequest):
        with lines.mistakes:
            _check_one_way(value, where, lines)
    elif isinstance(request, PathRequest | UrlRequest):
        if request.separator is not None and value.get("convert") != "csv":
            raise UsageError(
                "`separator` goes with `convert: csv`.",
                "Add it, or remove `separator`.",
                place=lines.place(*where, "separator"),
            )
    elif isinstance(request, TokenizerEntry):
        return ModelRequest(**asdict(request), tokenizer_only=True)
    return request  # type: ignore[no-any-return]


def _check_one_way(value: Mapping[str, Any], where: Where, lines: Lines) -> None:
    """Refuses a dataset that is to be both files as published and splits of a config."""
    pattern = next((key for key in ("include", "exclude") if value.get(key)), None)
    other = next((key for key in ("config", "splits", "separator") if value.get(key)), None)
    if pattern and other:
        raise UsageError(
            f"`{other}` cannot stand beside `{pattern}`: with that, "
            "files travel as they are published, and the script chooses among them.",
            f"Remove one of the two. For `runner train`, keep `{other}`.",
            place=lines.place(*where, other),
        )


def _check_repository(value: str, key: str, lines: Lines) -> None:
    """Refuses what is no Hub repository id: `name` or `org/name`."""
    for prefix in ("https://huggingface.co/", "hf://"):
        if value.startswith(prefix):
            bare = value.removeprefix(prefix).strip("/")
            for part in ("datasets/", "spaces/"):
                bare = bare.removeprefix(part)
            raise UsageError(f"`{key}` is an address.", f"Write `{key}: {bare}`.")
    if names_local_file(value, lines.path.parent):
        how = BY_SUFFIX.get(Path(value).suffix.lower())
        also = f", and how to read it: `convert: {how}`" if key == "dataset" and how else ""
        raise UsageError(
            f"`{key}`: {value} is a local file or folder; `{key}` names a repository on the Hub, "
            "such as org/name.",
            f"Write `path: {value}`{also}. `stage init {quoted(value)}` writes the whole entry.",
        )
    if not is_repository_id(value):
        shown = lines.shown(value)
        raise UsageError(
            f"`{key}` must be a repository such as org/name, found {shown}.", "Correct that line."
        )
