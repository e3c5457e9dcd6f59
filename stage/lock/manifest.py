"""Reads a manifest: `manifests/*.yaml` -> `Manifest`.

Every entry becomes a frozen request of its kind; mistakes are reported with file:line. This module
reads no other file and no network: `resolve` finds out whether a repository exists.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import paths as util_paths
from stage.digests import is_hex
from stage.errors import PolicyError, UsageError, suggest_relative
from stage.file_kinds import MANIFEST
from stage.files import is_file, read_file
from stage.lock.fields import YamlFields, keeps_mistakes
from stage.lock.requests import (
    CONVERSIONS,
    DatasetRequest,
    EnvironmentRequest,
    MetricRequest,
    ModelRequest,
    PathRequest,
    Request,
    UrlRequest,
)
from stage.lock.yaml_lines import MAX_SIZE, Lines, Where, check_keys, reading_yaml

FORMAT = 1
_BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_MAX_NAME = 96  # characters of a repository's name (huggingface_hub, utils/_validators.py)


class Entry(YamlFields):
    """One mapping of a manifest; mistakes are reported with file:line."""

    @keeps_mistakes(None)
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

    @keeps_mistakes(None)
    def check_not_both(self, patterns: Sequence[str], of_splits: Sequence[str]) -> None:
        """Refuses a dataset that is to be both files as published and splits of a config."""
        pattern = next((key for key in patterns if self.data.get(key)), None)
        other = next((key for key in of_splits if self.data.get(key)), None)
        if pattern and other:
            self.fail(
                f"cannot stand beside `{pattern}`: with that, files travel as they are published, "
                "and the script chooses among them",
                other,
                remedy=f"Remove one of the two. For `runner train`, keep `{other}`.",
            )

    @keeps_mistakes("")
    def local_path(self) -> str:
        """The file or folder of a `path:` entry."""
        path = self.text("path")
        if "://" in path:
            self.fail(
                "names a file or folder on this machine; this is an address",
                "path",
                remedy=f"Write `url: {path}`.",
            )
        return path

    @keeps_mistakes("")
    def address(self) -> str:
        """The address of a `url:` entry."""
        url = self.text("url")
        if url and not url.startswith(("http://", "https://")):
            self.fail(
                "should begin with https:// or http://",
                "url",
                remedy="Or download it by hand, and name the file: path: FILE.",
            )
        if url and (problem := util_paths.problem_with_address(url)):
            self.wrong("url", f"is not a valid address: {problem}")
        return url

    @keeps_mistakes(None)
    def sha256(self) -> str | None:
        """The sha256 of a `url:` entry, in lower case."""
        value = self.text("sha256", default="").lower()
        if value and not is_hex(value, 64):
            self.wrong("sha256", "should be 64 hex digits")
        return value or None

    @keeps_mistakes("")
    def repository(self, key: str) -> str:
        """A Hub repository id: `name` or `org/name`."""
        value = self.text(key)
        if not value:
            return value
        for prefix in ("https://huggingface.co/", "hf://"):
            if value.startswith(prefix):
                bare = value.removeprefix(prefix).strip("/")
                for part in ("datasets/", "spaces/"):
                    bare = bare.removeprefix(part)
                self.fail("is an address", key, remedy=f"Write `{key}: {bare}`.")
        if is_local(value, self.lines.path.parent):
            how = _BY_SUFFIX.get(Path(value).suffix.lower())
            also = f", and how to read it: `convert: {how}`" if key == "dataset" and how else ""
            self.fail(
                f"{value} is a local file or folder; `{key}` names a repository on the Hub, "
                "such as org/name",
                key,
                remedy=f"Write `path: {value}`{also}. `stage init {value}` writes the whole entry.",
            )
        parts = value.split("/")
        allowed = all(
            0 < len(part) <= _MAX_NAME and all(c.isalnum() or c in "-_." for c in part)
            for part in parts
        )
        if len(parts) > 2 or not allowed or ".." in value:
            self.wrong(key, "should be a repository such as org/name")
        return value


def is_local(value: str, folder: Path) -> bool:
    """Whether a value names a file on this machine, not a repository.

    A folder `org/name` is not enough: it may be a clone of the repository.
    """
    is_data = "/" not in value and Path(value).suffix.lower() in _BY_SUFFIX
    return util_paths.names_a_local_path(value) or is_data or is_file(folder / value)


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
    requests: Mapping[str, Request]
    lines: Lines
    licences: tuple[str, ...] | None = None
    output: Path | None = None

    @property
    def lock_path(self) -> Path:
        """`x.lock` beside `x.yaml`."""
        return self.path.with_suffix(".lock")

    def place(self, asset: str, *keys: str) -> str:
        """`file:line` of an asset's entry, or of a key in it."""
        return self.lines.place("assets", asset, *keys)

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
            lines.check_format(data.get("format"), FORMAT)
            entry = Entry(data, lines)
            with lines.mistakes:
                check_keys(data, ("format", "name", "assets", "policy"), (), lines)
            return Manifest(
                path=path,
                text=read_file(path, MAX_SIZE),
                name=entry.text("name", default=path.stem),
                requests=_requests(path, entry, lines),
                lines=lines,
                licences=_licences(entry, lines),
            )


_KEYS = {
    "model": ("model", "revision", "include", "exclude", "allow_code", "base", "licence"),
    "tokenizer": ("tokenizer", "revision", "allow_code", "licence"),
    "dataset": (
        *("dataset", "revision", "config", "splits", "separator", "licence"),
        *("include", "exclude", "allow_code"),
    ),
    "metric": ("metric", "revision", "allow_code", "licence"),
    "path": ("path", "include", "exclude", "convert", "separator", "licence"),
    "url": ("url", "sha256", "unpack", "convert", "separator", "licence"),
    "environment": ("environment", "profile"),
}


def _requests(path: Path, entry: Entry, lines: Lines) -> dict[str, Request]:
    """The request of every asset. Keeps the mistakes."""
    requests: dict[str, Request] = {}
    assets = entry.mapping("assets")
    for name, value in assets.items():
        with lines.mistakes:
            requests[str(name)] = _request(str(name), value, lines)
    if not assets and not lines.mistakes.found:  # else the key may be mistyped
        with lines.mistakes:
            raise UsageError(
                f"{lines.place('assets')}: no assets.",
                "Name at least one, for instance: assets: {bert: {model: google-bert/"
                "bert-base-uncased}}",
            )
    for first, second in util_paths.collisions(requests):
        with lines.mistakes:
            raise PolicyError(
                f"{lines.place('assets', second)}: the assets `{first}` and `{second}` would be "
                "one folder on a disk that ignores case or normalises Unicode.",
                "Rename one of them.",
            )
    if lines.mistakes.found and not path.with_suffix(".lock").exists():
        _keep_missing(path, requests, lines)  # with a lock, the bundle may hold what is gone here
    return requests


def _keep_missing(path: Path, requests: Mapping[str, Request], lines: Lines) -> None:
    """Keeps errors for missing local files, to report them together with other mistakes."""
    for name, request in requests.items():
        if isinstance(request, PathRequest) and request.path:
            with lines.mistakes:
                place = f"{lines.place('assets', name, 'path')}: `{name}`"
                check_path(request.path, path, place)


def check_path(written: str, manifest: Path, place: str) -> Path:
    """The file or folder that a manifest's `path:` means on this machine.

    Args:
        written: as the manifest has it; `~` means the home folder.
        manifest: the manifest; relative paths are relative to its folder.
        place: of the key, for messages.

    Raises:
        UsageError: there is no such file or folder.
    """
    try:
        found = manifest.parent / Path(written).expanduser()
    except RuntimeError:
        problem = f"{place}: there is no home folder for {written}."
        raise UsageError(problem, "Write it out.") from None
    if not os.path.lexists(found):
        if written.startswith("$"):
            raise UsageError(
                f"{place}: there is no {found}: no shell reads this file, so {written} stays as it "
                "is.",
                "Write the path itself; `~/x` is in your home folder.",
            )
        raise UsageError(
            f"{place}: there is no {found}.",
            suggest_relative(written, found, "the manifest's folder"),
        )
    return found


def _request(name: str, value: Any, lines: Lines) -> Request:
    where: Where = ("assets", name)
    if problem := util_paths.problem_with_asset_name(name):
        raise UsageError(
            f"{lines.place(*where)}: {util_paths.printable(name)} cannot name an asset: {problem}.",
            "Give it another name.",
        )
    if not isinstance(value, dict):
        raise UsageError(
            f"{lines.place(*where)}: `{name}` should be a mapping such as `model: org/name`.",
            f"Give it one of: {', '.join(_KEYS)}.",
        )
    value = _one_spelling(value, "license", "licence", where, lines)
    kinds = [key for key in _KEYS if key in value]
    if len(kinds) != 1:
        every = sorted({key for keys in _KEYS.values() for key in keys})
        check_keys(value, every, where, lines)
        found = f"has both `{kinds[0]}` and `{kinds[1]}`" if kinds else "does not say what it is"
        raise UsageError(
            f"{lines.place(*where)}: asset `{name}` {found}.",
            f"Give it one of: {', '.join(_KEYS)}.",
        )
    with lines.mistakes:
        check_keys(value, _KEYS[kinds[0]], where, lines)
    return _BUILDERS[kinds[0]](Entry(value, lines, where))


def _one_spelling(
    value: Mapping[str, Any], theirs: str, ours: str, where: Where, lines: Lines
) -> dict[str, Any]:
    """Accepts a second spelling of a key: the Hub's cards write `license`.

    Args:
        theirs: the other spelling.
        ours: the spelling of airlift.

    Raises:
        UsageError: the mapping has both.
    """
    if theirs in value and ours in value:
        raise UsageError(
            f"{lines.place(*where, theirs)}: `{theirs}` and `{ours}` are two spellings of one key.",
            "Keep one.",
        )
    return {ours if key == theirs else key: found for key, found in value.items()}


def _model(entry: Entry) -> ModelRequest:
    return ModelRequest(
        repository=entry.repository("model"),
        revision=entry.text("revision", default="main"),
        include=entry.texts("include"),
        exclude=entry.texts("exclude"),
        allow_code=entry.flag("allow_code"),
        base=entry.flag("base", default=True),
        licence=entry.optional("licence"),
    )


def _tokenizer(entry: Entry) -> ModelRequest:
    return ModelRequest(
        repository=entry.repository("tokenizer"),
        revision=entry.text("revision", default="main"),
        allow_code=entry.flag("allow_code"),
        licence=entry.optional("licence"),
        tokenizer_only=True,
    )


def _dataset(entry: Entry) -> DatasetRequest:
    entry.check_not_both(("include", "exclude"), ("config", "splits", "separator"))
    return DatasetRequest(
        repository=entry.repository("dataset"),
        revision=entry.text("revision", default="main"),
        include=entry.texts("include"),
        exclude=entry.texts("exclude"),
        allow_code=entry.flag("allow_code"),
        config=entry.text("config", default="") or None,
        splits=entry.texts("splits"),
        separator=entry.separator(),
        licence=entry.optional("licence"),
    )


def _metric(entry: Entry) -> MetricRequest:
    return MetricRequest(
        repository=entry.repository("metric"),
        revision=entry.text("revision", default="main"),
        allow_code=entry.flag("allow_code"),
        licence=entry.optional("licence"),
    )


def _path(entry: Entry) -> PathRequest:
    return PathRequest(
        path=entry.local_path(),
        include=entry.texts("include"),
        exclude=entry.texts("exclude"),
        convert=entry.choice("convert", CONVERSIONS),
        separator=entry.separator(of="csv"),
        licence=entry.optional("licence"),
    )


def _url(entry: Entry) -> UrlRequest:
    return UrlRequest(
        url=entry.address(),
        sha256=entry.sha256(),
        unpack=entry.flag("unpack"),
        convert=entry.choice("convert", CONVERSIONS),
        separator=entry.separator(of="csv"),
        licence=entry.optional("licence"),
    )


def _environment(entry: Entry) -> EnvironmentRequest:
    return EnvironmentRequest(
        environment=entry.text("environment"), profile=entry.text("profile", default="") or None
    )


_BUILDERS: Mapping[str, Callable[[Entry], Request]] = {
    "model": _model,
    "tokenizer": _tokenizer,
    "dataset": _dataset,
    "metric": _metric,
    "path": _path,
    "url": _url,
    "environment": _environment,
}


def _licences(entry: Entry, lines: Lines) -> tuple[str, ...] | None:
    if "policy" not in entry.data:
        return None
    before = len(lines.mistakes.found)
    policy = entry.mapping("policy")
    with lines.mistakes:
        policy = _one_spelling(policy, "licenses", "licences", ("policy",), lines)
        check_keys(policy, ("licences",), ("policy",), lines)
    licences = Entry(policy, lines, ("policy",)).texts("licences")
    if not licences and len(lines.mistakes.found) == before:
        raise UsageError(
            f"{lines.place('policy', 'licences')}: `policy` names no licence, "
            "so nothing could be fetched.",
            "List those you allow: `policy: {licences: [apache-2.0, mit]}`; or omit `policy`.",
        )
    return licences
