"""Reads a manifest: `manifests/*.yaml` -> `Manifest`.

Every entry becomes a frozen request of its kind; mistakes are reported with file:line. This module
reads no other file and no network: `resolve` finds out whether a repository exists.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import PolicyError, UsageError, join_mistakes, suggest_path
from stage.manifest.entry import Entry
from stage.manifest.requests import (
    CONVERSIONS,
    DatasetRequest,
    EnvironmentRequest,
    ModelRequest,
    PathRequest,
    Request,
    UrlRequest,
)
from stage.util import paths as util_paths
from stage.util.digests import is_hex
from stage.util.files import read_file
from stage.util.yaml_lines import MAX_SIZE, Lines, Where, check_keys, load_yaml_with_lines

FORMAT = 1


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
            UsageError: with file:line, for each mistake in the manifest.
            PolicyError: two assets would be one folder on some disks.
        """
        path = Path(path)
        if path.suffix == ".lock":
            raise UsageError(
                f"{path}: this is a lock; give its manifest ({path.with_suffix('.yaml').name})."
            )
        data, lines = load_yaml_with_lines(path)
        _check_not_run_file(path, data)
        entry = Entry(data, lines)
        check_keys(data, ("format", "name", "assets", "policy"), (), lines)
        lines.check_format(data.get("format"), FORMAT)
        assets = entry.mapping("assets")
        if not assets:
            raise UsageError(
                f"{lines.place('assets')}: no assets.",
                "Name at least one, as in the README's example.",
            )
        requests = _requests(path, assets, lines)
        for first, second in util_paths.collisions(requests):
            raise PolicyError(
                f"{lines.place('assets', second)}: the assets `{first}` and `{second}` would be "
                "one folder on a disk that ignores case or normalises Unicode.",
                "Rename one of them.",
            )
        return Manifest(
            path=path,
            text=read_file(path, MAX_SIZE),
            name=entry.text("name", default=path.stem),
            requests=requests,
            lines=lines,
            licences=_licences(entry, lines),
        )


_KEYS = {
    "model": ("model", "revision", "include", "exclude", "allow_code", "base", "licence"),
    "tokenizer": ("tokenizer", "revision", "allow_code", "licence"),
    "dataset": ("dataset", "revision", "config", "splits", "separator", "licence"),
    "path": ("path", "include", "exclude", "convert", "separator", "licence"),
    "url": ("url", "sha256", "unpack", "convert", "separator", "licence"),
    "environment": ("environment", "profile"),
}


def _check_not_run_file(path: Path, data: Mapping[str, Any]) -> None:
    """Raises for a run file, which `runner` reads.

    Raises:
        UsageError: it is one.
    """
    if "task" in data and "assets" not in data:
        raise UsageError(
            f"{path}: this is a run file, which `runner` reads; `stage` reads manifests.",
            f"Give the manifest of its assets; or train from a bundle: "
            f"runner check {shlex.quote(str(path))} --bundle BUNDLE",
        )


def _requests(path: Path, assets: Mapping[Any, Any], lines: Lines) -> dict[str, Request]:
    """The request of every asset.

    Raises:
        UsageError: there are mistakes; lists the first mistake of each asset.
    """
    requests: dict[str, Request] = {}
    mistakes: list[UsageError] = []
    for name, value in assets.items():
        try:
            requests[str(name)] = _request(str(name), value, lines)
        except UsageError as mistake:
            mistakes.append(mistake)
    if mistakes:
        raise join_mistakes(str(path), [*mistakes, *_missing(path, requests, lines)])
    return requests


def _missing(path: Path, requests: Mapping[str, Request], lines: Lines) -> list[UsageError]:
    """Errors for missing local files, to report together with other mistakes.

    Empty where there is a lock: the bundle may hold files that are gone here.
    """
    if path.with_suffix(".lock").exists():
        return []
    return [
        UsageError(
            f"{lines.place('assets', name, 'path')}: `{name}`: "
            f"there is no {path.parent / request.path}.",
            suggest_path(
                path.parent / request.path, "Paths are relative to the manifest's folder."
            ),
        )
        for name, request in requests.items()
        if isinstance(request, PathRequest)
        and not request.path.startswith("~")
        and not os.path.lexists(path.parent / request.path)
    ]


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
    return DatasetRequest(
        repository=entry.repository("dataset"),
        revision=entry.text("revision", default="main"),
        config=entry.text("config", default="") or None,
        splits=entry.texts("splits"),
        separator=entry.separator(),
        licence=entry.optional("licence"),
    )


def _path(entry: Entry) -> PathRequest:
    path = entry.text("path")
    _check_not_ftp(entry, "path", path)
    if path.startswith(("http://", "https://")):
        raise UsageError(
            f"{entry.lines.place(*entry.where, 'path')}: `path` names a file or folder "
            "on this machine; this is an address.",
            f"Write `url: {path}`.",
        )
    return PathRequest(
        path=path,
        include=entry.texts("include"),
        exclude=entry.texts("exclude"),
        convert=entry.choice("convert", CONVERSIONS),
        separator=entry.separator(of="csv"),
        licence=entry.optional("licence"),
    )


def _url(entry: Entry) -> UrlRequest:
    url = entry.text("url")
    _check_not_ftp(entry, "url", url)
    if not url.startswith(("http://", "https://")):
        entry.wrong("url", "should begin with https:// or http://")
    if problem := util_paths.problem_with_address(url):
        entry.wrong("url", f"is not a valid address: {problem}")
    sha256 = entry.text("sha256", default="") or None
    if sha256 is not None and not is_hex(sha256.lower(), 64):
        entry.wrong("sha256", "should be 64 hex digits")
    return UrlRequest(
        url=url,
        sha256=sha256.lower() if sha256 else None,
        unpack=entry.flag("unpack"),
        convert=entry.choice("convert", CONVERSIONS),
        separator=entry.separator(of="csv"),
        licence=entry.optional("licence"),
    )


def _check_not_ftp(entry: Entry, key: str, address: str) -> None:
    """Raises for an ftp address. The message omits it, because it may hold a password.

    Raises:
        UsageError: it is one.
    """
    if not address.lower().startswith(("ftp://", "ftps://")):
        return
    _, slash, file = address.partition("://")[2].rpartition("/")
    file = file if slash and file else "FILE"
    raise UsageError(
        f"{entry.lines.place(*entry.where, key)}: `{key}`: ftp addresses are not fetched.",
        f"Download it by hand (curl -O ADDRESS), and name the file: path: {file}. "
        "Or use its https address.",
    )


def _environment(entry: Entry) -> EnvironmentRequest:
    return EnvironmentRequest(
        environment=entry.text("environment"), profile=entry.text("profile", default="") or None
    )


_BUILDERS: Mapping[str, Callable[[Entry], Request]] = {
    "model": _model,
    "tokenizer": _tokenizer,
    "dataset": _dataset,
    "path": _path,
    "url": _url,
    "environment": _environment,
}


def _licences(entry: Entry, lines: Lines) -> tuple[str, ...] | None:
    if "policy" not in entry.data:
        return None
    policy = _one_spelling(entry.mapping("policy"), "licenses", "licences", ("policy",), lines)
    check_keys(policy, ("licences",), ("policy",), lines)
    licences = Entry(policy, lines, ("policy",)).texts("licences")
    if not licences:
        raise UsageError(
            f"{lines.place('policy', 'licences')}: `policy` names no licence, "
            "so nothing could be fetched.",
            "List those you allow: `policy: {licences: [apache-2.0, mit]}`; or omit `policy`.",
        )
    return licences
