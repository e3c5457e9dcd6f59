"""What each kind of asset can be asked for: one frozen request a manifest entry, and its form in the lock.

`stage.manifest` reads them, `stage.sources` resolves them; the lock keeps them to see whether it still answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

CONVERSIONS = ("csv", "json", "jsonl", "text", "arrow", "imagefolder", "cifar")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A Hub model repository; with `tokenizer_only`, just its tokenizer and config.

    `base`: whether the base model of an adapter comes too.
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
    """A Hub dataset repository: one config (None: the only or the default one) and some splits (none named: all)."""

    repository: str
    revision: str = "main"
    config: str | None = None
    splits: tuple[str, ...] = ()
    separator: str | None = None
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
    """A file at an http, https or ftp address."""

    url: str
    sha256: str | None = None
    unpack: bool = False
    convert: str | None = None
    separator: str | None = None
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest:
    """An `environment.yml` and the profile of the cluster it is for, both beside the manifest."""

    environment: str
    profile: str | None = None


Request: TypeAlias = ModelRequest | DatasetRequest | PathRequest | UrlRequest | EnvironmentRequest


_OPTIONAL = (
    "config",
    "splits",
    "include",
    "exclude",
    "convert",
    "separator",
    "sha256",
    "unpack",
    "allow_code",
    "profile",
    "licence",
)


_WITHOUT_A_FILE = {
    "model": "Leave it out: add it to `exclude` in that entry.",
    "tokenizer": "A `model:` entry of that repository can leave it out: it takes `exclude`.",
    "dataset": "Choose another `config`; or get the files yourself (hf download), and bring them with `path:`, which "
    "takes `exclude`.",
    "path": "Rename it, or leave it out: add it to `exclude` in that entry.",
    "url": "Get the file yourself, and bring it with `path:` under another name.",
    "environment": "Take that package out of the environment file.",
}


def way_without(request: Mapping[str, Any]) -> str:
    """How an asset can do without one of its files: which entries take `exclude`.

    Args:
        request: as the lock records it.
    """
    return next((way for kind, way in _WITHOUT_A_FILE.items() if kind in request), "Resolve it anew: stage lock.")


def as_lock_request(request: Request) -> dict[str, Any]:
    """A request as the lock records it: the keys a person would write, defaults left out except the revision."""
    match request:
        case ModelRequest():
            kind = "tokenizer" if request.tokenizer_only else "model"
            document: dict[str, Any] = {kind: request.repository, "revision": request.revision}
        case DatasetRequest():
            document = {"dataset": request.repository, "revision": request.revision}
        case PathRequest():
            document = {"path": request.path}
        case UrlRequest():
            document = {"url": request.url}
        case EnvironmentRequest():
            document = {"environment": request.environment}
    for key in _OPTIONAL:
        if value := getattr(request, key, None):
            document[key] = list(value) if isinstance(value, tuple) else value
    if isinstance(request, ModelRequest) and not request.base:
        document["base"] = False
    return document
