"""What an entry of a manifest asks for: a class per kind of asset, the table of its keys.

To add a source of assets: a class here, its `AssetSource` in `stage.staging.sources`, and their
line in `SOURCES` (`stage.staging.resolve`). The lock stores the requests, to find out whether it
still answers the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from stage.errors import without_secrets
from stage.files import is_hex
from stage.lock.reader import HIDDEN, WrongValueError, keys_of, setting
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
class AssetRequest:
    """An entry of a manifest.

    The first field of a class is the location: the repository, path or address. Its key in the
    manifest says what the asset is; its name is the key of the location in the lock.

    Attributes:
        source_type: `type` of the asset's source in the lock.
        without_a_file: how a user can omit one file of the asset: the text of a remedy.
    """

    source_type: ClassVar[str]
    without_a_file: ClassVar[str]

    @property
    def kind(self) -> str:
        """The key in the manifest that says what the asset is."""
        return _kind_of(type(self))

    @property
    def location(self) -> str:
        """The repository, path or address."""
        return str(getattr(self, fields(self)[0].name))


def _kind_of(table: type[AssetRequest]) -> str:
    return next(iter(keys_of(table)))


@dataclass(frozen=True, kw_only=True)
class ModelRequest(AssetRequest):
    """A Hub model repository.

    Attributes:
        base: whether an adapter needs its base model in the manifest.
        tokenizer_only: fetch only the tokenizer and the config.
    """

    source_type = "hub"
    without_a_file = "Omit it: add it to `exclude` in that entry."
    repository: str = setting(key="model")
    revision: str = "main"
    include: tuple[str, ...] = setting((), is_one=True)
    exclude: tuple[str, ...] = setting((), is_one=True)
    allow_code: bool = False
    base: bool = True
    tokenizer_only: bool = field(default=False, metadata=HIDDEN)
    licence: str | None = setting(None, also="license")

    @property
    def kind(self) -> str:
        """As in the base class."""
        return _kind_of(TokenizerEntry if self.tokenizer_only else ModelRequest)


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry(AssetRequest):
    """The keys of a tokenizer; its request is a `ModelRequest`."""

    source_type = "hub"
    without_a_file = "A `model:` entry of that repository can omit it: it accepts `exclude`."
    repository: str = setting(key="tokenizer")
    revision: str = "main"
    allow_code: bool = False
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class DatasetRequest(AssetRequest):
    """A Hub dataset repository: splits of one config, or the files as published.

    Attributes:
        include, exclude: patterns of files. If any is given, these files travel as they are
            published, and there is no config.
        allow_code: whether they may contain Python code.
        config: None: the only config, or the default one.
        splits: empty: all.
        separator: between the cells of a CSV; None: as the file's suffix says.
    """

    source_type = "hub"
    without_a_file = (
        "Choose another `config`; or get the files yourself (hf download), and name them with "
        "`path:`, which accepts `exclude`."
    )
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
class MetricRequest(AssetRequest):
    """A metric of `evaluate`: `accuracy`, or `owner/name` of a Space."""

    source_type = "hub"
    without_a_file = "Take another revision, or another metric."
    repository: str = setting(key="metric")
    revision: str = "main"
    allow_code: bool = False
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class PathRequest(AssetRequest):
    """A file or folder beside the manifest."""

    source_type = "path"
    without_a_file = "Rename it, or omit it: add it to `exclude` in that entry."
    path: str = setting(convert=_local_path)
    include: tuple[str, ...] = setting((), is_one=True)
    exclude: tuple[str, ...] = setting((), is_one=True)
    convert: Conversion | None = None
    separator: str | None = setting(None, convert=_separator)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class UrlRequest(AssetRequest):
    """A file at an http or https address."""

    source_type = "url"
    without_a_file = "Download the file yourself, and name it with `path:` under another name."
    url: str = setting(convert=_address)
    sha256: str | None = setting(None, convert=_sha256)
    unpack: bool = False
    convert: Conversion | None = None
    separator: str | None = setting(None, convert=_separator)
    licence: str | None = setting(None, also="license")


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest(AssetRequest):
    """An `environment.yml` and the profile of its cluster, both beside the manifest."""

    source_type = "environment"
    without_a_file = "Take that package out of the environment file."
    environment: str
    profile: str | None = None


# In the order of their definitions above, in which messages list them.
KINDS: Mapping[str, type[AssetRequest]] = {
    _kind_of(table): table for table in AssetRequest.__subclasses__()
}
"""The key that says what an asset is -> the table of its keys."""
LOCATION_KEYS: Mapping[str, str] = {
    table.source_type: fields(table)[0].name for table in KINDS.values()
}
"""Type of a source -> its key in the lock that holds the location."""


def way_without(request: Mapping[str, Any]) -> str:
    """How a user can omit one file of an asset: the text of a remedy.

    Args:
        request: as the lock records it.
    """
    return next(
        (table.without_a_file for kind, table in KINDS.items() if kind in request),
        "Resolve it again: stage lock.",
    )


def as_lock_request(request: AssetRequest) -> dict[str, Any]:
    """A request as the lock records it: the keys of the manifest, without defaults.

    The revision is always recorded.
    """
    location, *others = keys_of(type(request)).values()
    document: dict[str, Any] = {request.kind: getattr(request, location.field)}
    for key in others:
        value = getattr(request, key.field)
        if value != key.default or key.field == "revision":
            document[key.field] = list(value) if isinstance(value, tuple) else value
    return document
