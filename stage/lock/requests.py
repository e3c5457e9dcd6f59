"""One frozen request per manifest entry, one class per kind of asset, and its form in the lock.

`stage.lock.manifest` reads them and `stage.staging.sources` resolves them. The lock stores
them, to find out whether it still answers the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

CONVERSIONS = ("csv", "json", "jsonl", "text", "arrow", "parquet", "imagefolder", "cifar")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A Hub model repository.

    Attributes:
        base: whether an adapter needs its base model in the manifest.
        tokenizer_only: fetch only the tokenizer and the config.
    """

    repository: str
    revision: str = "main"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_code: bool = False
    base: bool = True
    tokenizer_only: bool = False
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """A Hub dataset repository: splits of one config, or the files as published.

    Attributes:
        include, exclude: patterns of files. If any is given, these files travel as they are
            published, and there is no config.
        allow_code: whether they may contain Python code.
        config: None: the only config, or the default one.
        splits: empty: all.
        separator: between the cells of a CSV; None: as the file's suffix says.
    """

    repository: str
    revision: str = "main"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_code: bool = False
    config: str | None = None
    splits: tuple[str, ...] = ()
    separator: str | None = None
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class MetricRequest:
    """A metric of `evaluate`: `accuracy`, or `owner/name` of a Space."""

    repository: str
    revision: str = "main"
    allow_code: bool = False
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class PathRequest:
    """A file or folder beside the manifest."""

    path: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    convert: str | None = None
    separator: str | None = None
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class UrlRequest:
    """A file at an http or https address."""

    url: str
    sha256: str | None = None
    unpack: bool = False
    convert: str | None = None
    separator: str | None = None
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest:
    """An `environment.yml` and the profile of its cluster, both beside the manifest."""

    environment: str
    profile: str | None = None


Request: TypeAlias = (
    ModelRequest | DatasetRequest | MetricRequest | PathRequest | UrlRequest | EnvironmentRequest
)


_KINDS: Mapping[type, str] = {
    ModelRequest: "model",
    DatasetRequest: "dataset",
    MetricRequest: "metric",
    PathRequest: "path",
    UrlRequest: "url",
    EnvironmentRequest: "environment",
}


_WITHOUT_A_FILE = {
    "model": "Omit it: add it to `exclude` in that entry.",
    "tokenizer": "A `model:` entry of that repository can omit it: it accepts `exclude`.",
    "dataset": "Choose another `config`; or get the files yourself (hf download), and name them "
    "with `path:`, which accepts `exclude`.",
    "metric": "Take another revision, or another metric.",
    "path": "Rename it, or omit it: add it to `exclude` in that entry.",
    "url": "Download the file yourself, and name it with `path:` under another name.",
    "environment": "Take that package out of the environment file.",
}


def way_without(request: Mapping[str, Any]) -> str:
    """How a user can omit one file of an asset: the text of a remedy.

    Args:
        request: as the lock records it.
    """
    return next(
        (way for kind, way in _WITHOUT_A_FILE.items() if kind in request),
        "Resolve it again: stage lock.",
    )


def as_lock_request(request: Request) -> dict[str, Any]:
    """A request as the lock records it: the keys of the manifest, without defaults.

    The revision is always recorded.
    """
    location, *others = fields(request)
    is_tokenizer = isinstance(request, ModelRequest) and request.tokenizer_only
    kind = "tokenizer" if is_tokenizer else _KINDS[type(request)]
    document = {kind: getattr(request, location.name)}
    for field in others:
        value = getattr(request, field.name)
        is_told = value != field.default or field.name == "revision"
        if is_told and field.name != "tokenizer_only":
            document[field.name] = list(value) if isinstance(value, tuple) else value
    return document
