"""One frozen request per manifest entry: the table of keys of each kind, and its form in the lock.

`stage.lock.manifest` reads them and `stage.staging.sources` resolves them. The lock stores
them, to find out whether it still answers the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from stage.digests import is_hex
from stage.errors import without_secrets
from stage.lock.reader import HIDDEN, WrongValueError, setting
from stage.paths import problem_with_address

Conversion = Literal["csv", "json", "jsonl", "text", "arrow", "parquet", "imagefolder", "cifar"]
CONVERSIONS: tuple[str, ...] = get_args(Conversion)


def _separator(text: str) -> str:
    if len(text.encode()) != 1 or text in '"\r\n':
        raise WrongValueError('must be one character, such as ";" or "\\t"')
    return text


def _local_path(text: str) -> str:
    if "://" in text:
        raise WrongValueError(
            "names a file or folder on this machine; this is an address",
            f"Write `url: {without_secrets(text)}`.",
        )
    return text


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise WrongValueError(
            "must begin with https:// or http://",
            "Or download it by hand, and name the file: path: FILE.",
        )
    if problem := problem_with_address(text):
        raise WrongValueError(f"is not a valid address: {problem}")
    return text


def _sha256(text: str) -> str:
    if not is_hex(text.lower(), 64):
        raise WrongValueError("must be 64 hex digits")
    return text.lower()


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A Hub model repository.

    Attributes:
        base: whether an adapter needs its base model in the manifest.
        tokenizer_only: fetch only the tokenizer and the config.
    """

    repository: str = setting(key="model")
    revision: str = "main"
    include: tuple[str, ...] = setting((), is_one=True)
    exclude: tuple[str, ...] = setting((), is_one=True)
    allow_code: bool = False
    base: bool = True
    tokenizer_only: bool = field(default=False, metadata=HIDDEN)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    """The keys of a tokenizer; its request is a `ModelRequest`."""

    repository: str = setting(key="tokenizer")
    revision: str = "main"
    allow_code: bool = False
    licence: str | None = setting(None, also="license")


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

    repository: str = setting(key="dataset")
    revision: str = "main"
    include: tuple[str, ...] = setting((), is_one=True)
    exclude: tuple[str, ...] = setting((), is_one=True)
    allow_code: bool = False
    config: str | None = None
    splits: tuple[str, ...] = setting((), is_one=True)
    separator: str | None = setting(None, convert=_separator)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class MetricRequest:
    """A metric of `evaluate`: `accuracy`, or `owner/name` of a Space."""

    repository: str = setting(key="metric")
    revision: str = "main"
    allow_code: bool = False
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class PathRequest:
    """A file or folder beside the manifest."""

    path: str = setting(convert=_local_path)
    include: tuple[str, ...] = setting((), is_one=True)
    exclude: tuple[str, ...] = setting((), is_one=True)
    convert: Conversion | None = None
    separator: str | None = setting(None, convert=_separator)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class UrlRequest:
    """A file at an http or https address."""

    url: str = setting(convert=_address)
    sha256: str | None = setting(None, convert=_sha256)
    unpack: bool = False
    convert: Conversion | None = None
    separator: str | None = setting(None, convert=_separator)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest:
    """An `environment.yml` and the profile of its cluster, both beside the manifest."""

    environment: str
    profile: str | None = None


Request: TypeAlias = (
    ModelRequest | DatasetRequest | MetricRequest | PathRequest | UrlRequest | EnvironmentRequest
)

KINDS: Mapping[str, type] = {
    "model": ModelRequest,
    "tokenizer": TokenizerEntry,
    "dataset": DatasetRequest,
    "metric": MetricRequest,
    "path": PathRequest,
    "url": UrlRequest,
    "environment": EnvironmentRequest,
}
"""The key that says what an asset is -> the table of its keys."""


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
    kinds = {table: key for key, table in KINDS.items()}
    kind = "tokenizer" if is_tokenizer else kinds[type(request)]
    document = {kind: getattr(request, location.name)}
    for item in others:
        value = getattr(request, item.name)
        if (value != item.default or item.name == "revision") and item.name != "tokenizer_only":
            document[item.name] = list(value) if isinstance(value, tuple) else value
    return document
