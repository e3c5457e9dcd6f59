"""Reads and writes an environment's lock, `conda-lock.yml`: conda-lock's schema, version 1.

It has each package of conda and pip, with URL and sha256. `conda-lock install`, micromamba and
py-rattler read the same file. The text is deterministic (sorted; no date, host or tool version).

A lock may come from anyone, and names files to download. So reading checks everything: the types
of fields, a sha256 for each package (md5 alone proves nothing today), no password in a URL, and
that a file's name has the name and version of the lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import yaml
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from stage.environment.spec.profile import MACHINES, PROVIDED
from stage.errors import PolicyError, UsageError, about
from stage.file_kinds import CONDA_LOCK, check_kind, suggest_file
from stage.lock.document import DocumentReader, sha256_digits
from stage.lock.reader import setting
from stage.paths import check_collisions, check_path, printable

LOCK_NAME = "conda-lock.yml"
VERSION = 1
OURS = {"made_by": "stage env lock"}
INSTALLED = ("main", "dev")
"""The categories that `conda-lock install` installs; the others only where it is asked for them."""
SCHEMES = ("https", "http", "file")
REMEDY = "Make the lock again: stage env lock ENVIRONMENT.yml --profile PROFILE"
_READER = DocumentReader(REMEDY)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _as_texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class _EntryKeys:
    """The keys that decide whether an entry of a lock is of its environment."""

    platform: str
    category: str = "main"


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package of an environment.

    Attributes:
        manager: `conda` or `pip`.
        platform: the platform of the lock (also for packages that fit any).
        url: of the conda package, the wheel, or the sdist where no wheel is published. Without
            credentials.
        sha256: hex, of that file.
        md5: hex; conda-lock needs it for conda packages. Nothing is checked by it alone.
        dependencies: name -> version spec of the package; empty for pip.
    """

    name: str
    version: str
    manager: str = setting(takes=Literal["conda", "pip"])
    platform: str
    url: str
    sha256: str = setting(takes=Any, convert=sha256_digits)
    md5: str | None = None
    dependencies: Mapping[str, str] = setting(dict, takes=dict[str, Any], convert=_as_texts)

    @staticmethod
    def prepared(data: dict[str, Any]) -> dict[str, Any]:
        """The mapping in a lock, which has the digests in `hash`."""
        digests = _mapping(data.get("hash"))
        return {**data, "sha256": digests.get("sha256"), "md5": digests.get("md5")}

    @property
    def file_name(self) -> str:
        """The last part of its URL."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def build(self) -> str:
        """The build string of a conda package."""
        return self.file_name.removesuffix(".conda").removesuffix(".tar.bz2").rpartition("-")[2]

    @property
    def is_sdist(self) -> bool:
        """Whether a wheel must be built from it."""
        return self.manager == "pip" and not self.file_name.endswith(".whl")


@dataclass(frozen=True, kw_only=True)
class EnvironmentLock:
    """The resolution of an `environment.yml` for one platform.

    Attributes:
        content_hash: sha256 of its inputs (`stage.environment.spec.environment_yml.content_hash`).
            Another one now: the lock is stale.
        channels: of conda, in order of priority, without credentials.
        sources: names of its input files.
        provides: name -> version of what is not in it, because the site's own Python has it:
            `python` itself, `torch` and others. Empty: it is whole.
    """

    platform: str
    content_hash: str
    channels: tuple[str, ...]
    sources: tuple[str, ...]
    packages: tuple[Package, ...]
    provides: Mapping[str, str] = field(default_factory=dict)

    def of(self, manager: str) -> list[Package]:
        """The packages of `conda` or `pip`, sorted by name."""
        return sorted((p for p in self.packages if p.manager == manager), key=lambda p: p.name)

    @property
    def python(self) -> str:
        """Version of the interpreter, `3.10.13`."""
        site = self.provides.get("python")
        return site or next(p.version for p in self.of("conda") if p.name == "python")

    def to_yaml(self) -> bytes:
        """The text of the lock."""
        metadata: dict[str, Any] = {
            "content_hash": {self.platform: self.content_hash},
            "channels": [{"url": url, "used_env_vars": []} for url in self.channels],
            "platforms": [self.platform],
            "sources": list(self.sources),
            "custom_metadata": dict(OURS),
        }
        if self.provides:  # conda-lock's schema has texts there
            first = sorted(self.provides, key=lambda name: (name not in ("python", "torch"), name))
            listed = " ".join(f"{name}=={self.provides[name]}" for name in first)
            metadata["custom_metadata"] |= {"provides": listed}
        packages = sorted(self.packages, key=lambda p: (p.manager, p.name))
        entries = [_to_document(package) for package in packages]
        document = {"version": VERSION, "metadata": metadata, "package": entries}
        body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
        return (_HEADER + body).encode()

    @staticmethod
    def load(path: Path | str, platform: str | None = None) -> EnvironmentLock:
        """Reads the lock in a file, see `parse`.

        Raises:
            UsageError, PolicyError: no such file; else as for `parse`.
        """
        return EnvironmentLock.parse(_bytes_of(Path(path)), str(path), platform)

    @staticmethod
    def parse(data: bytes, file: str, platform: str | None = None) -> EnvironmentLock:
        """Reads a lock of airlift or another tool.

        Args:
            file: its name, for messages.
            platform: which of the lock's platforms; None: the only one it has.

        Raises:
            UsageError: no such lock, a field that is missing or invalid, another platform than
                `MACHINES`, or no Python.
            PolicyError: a package without sha256, a URL with a secret or of another scheme than
                `SCHEMES`, or a file's name that may not be on every disk.
        """
        with about(file):
            document = _document(data, file)
            entries = document.get("package")
            if not isinstance(entries, list) or not entries:
                raise UsageError("the lock lists no packages.", REMEDY)
            metadata = _mapping(document.get("metadata"))
            rows = [_READER.read(_EntryKeys, e, ("package", n)) for n, e in enumerate(entries)]
            stated = metadata.get("platforms") or [row.platform for row in rows]
            platform = _platform(sorted({str(n) for n in stated}), platform, metadata)
            packages = [
                _package(number, entry)
                for number, (entry, row) in enumerate(zip(entries, rows, strict=True))
                if row.platform == platform and row.category in INSTALLED
            ]
            lock = EnvironmentLock(
                platform=platform,
                content_hash=str(_mapping(metadata.get("content_hash")).get(platform) or ""),
                channels=tuple(
                    str(_mapping(channel).get("url", channel))
                    for channel in metadata.get("channels") or ()
                ),
                sources=tuple(str(source) for source in metadata.get("sources") or ()),
                packages=_each_once(packages),
                provides=_provides(metadata),
            )
            if not lock.provides and not any(p.name == "python" for p in lock.of("conda")):
                raise UsageError(
                    "no conda package `python`.",
                    "Name it in the environment file, such as `python=3.10`, and lock again.",
                )
            check_collisions([package.file_name for package in lock.packages])
        return lock


def _provides(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What the site provides. Checked: it gets into shell scripts."""
    words = str(_mapping(metadata.get("custom_metadata")).get("provides") or "").split()
    found = dict(word.split("==", 1) for word in words if PROVIDED.fullmatch(word))
    if len(found) != len(words) or (words and not {"python", "torch"} <= found.keys()):
        raise UsageError("`provides` is not NAME==VERSION with python and torch.", REMEDY)
    return found


def made_by_stage(path: Path) -> bool:
    """Whether `stage env lock` made a lock; the `content_hash` of another tool is another digest.

    Raises:
        UsageError: no such file, or no such lock.
    """
    with about(str(path)):
        document = _document(_bytes_of(path), str(path))
    return _is_ours(_mapping(document.get("metadata")))


def _is_ours(metadata: Mapping[str, Any]) -> bool:
    return _mapping(metadata.get("custom_metadata")).items() >= OURS.items()


def lock_beside(spec: Path) -> Path:
    """The lock of `environment.yml` is `conda-lock.yml`, that of `x.yml` is `x.conda-lock.yml`."""
    return spec.with_name(LOCK_NAME if spec.stem == "environment" else f"{spec.stem}.{LOCK_NAME}")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        make = "Make it: stage env lock ENVIRONMENT.yml --profile P"
        remedy = suggest_file(path, CONDA_LOCK, make)
        raise UsageError(f"{path}: no such file.", remedy) from None


def _document(data: bytes, file: str) -> Mapping[str, Any]:
    check_kind(file, data, CONDA_LOCK)
    try:
        document = yaml.load(data, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"not a lock: it is not YAML ({line}).", REMEDY) from None
    if not isinstance(document, dict) or "version" not in document:
        raise UsageError("not a lock: it has no `version`.", REMEDY)
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise UsageError(
            f"schema version {document['version']!r}; this version of airlift reads "
            f"version {VERSION}.",
            REMEDY,
        )
    return document


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _platform(stated: Sequence[str], wanted: str | None, metadata: Mapping[str, Any]) -> str:
    listed = ", ".join(map(printable, stated))
    again = REMEDY
    if not _is_ours(metadata):  # locking here would replace it
        again = "Lock it for that platform with the tool that made it: conda-lock lock --platform "
        again += wanted or next(iter(MACHINES))
    if wanted is not None and wanted not in stated:
        raise UsageError(
            f"locked for {listed}; the profile's platform is {wanted}.",
            again,
        )
    if wanted is None and len(stated) > 1:
        raise UsageError(
            f"locked for {listed}: which of them?",
            "Name the cluster's `profile:` in the manifest (stage env probe prints one there): "
            "that platform is taken. To lock anew with stage env lock, move this file away first.",
        )
    platform = wanted or stated[0]
    if platform not in MACHINES:
        raise UsageError(
            f"locked for {printable(platform)}; a cluster's nodes are {' or '.join(MACHINES)}.",
            again,
        )
    return platform


def _each_once(packages: Sequence[Package]) -> tuple[Package, ...]:
    """Merges equal entries: conda-lock writes one for each category of a package."""
    once: dict[tuple[str, str], Package] = {}
    for package in packages:
        name = canonicalize_name(package.name) if package.manager == "pip" else package.name
        known = once.setdefault((package.manager, name), package)
        if (known.url, known.sha256) != (package.url, package.sha256):
            shown = printable(package.name)
            raise UsageError(f"{shown} is listed twice, with two addresses.", REMEDY)
    return tuple(once.values())


def _package(number: int, entry: Mapping[str, Any]) -> Package:
    """A package; messages name it."""
    name, where = entry.get("name"), ("package", number)
    with about(printable(name) if isinstance(name, str) else ""):
        if not _mapping(entry.get("hash")).get("sha256"):
            named = _READER.named(where)
            raise PolicyError(f"{named} has no sha256 (an md5 alone proves nothing).", REMEDY)
        package = _READER.read(Package, entry, where)
        _check_address(package.url, _READER.named((*where, "url")))
        check_path(package.file_name)
        _check_file_name(package)
    return package


def _check_address(url: str, named: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{named} is not an address: {error}.", REMEDY) from None
    if parts.scheme not in SCHEMES or "\\" in url:
        raise PolicyError(f"{named}: {printable(url)} is no {', '.join(SCHEMES)} address.", REMEDY)
    if parts.username or parts.password or "/t/" in parts.path or parts.query:
        raise PolicyError(
            f"{named} has a password or token in it, and would travel in the bundle.",
            "Keep the secret in ~/.netrc, or use a mirror that needs none, and lock again.",
        )
    is_bare = parts.scheme == "file" and len(parts.path.split("/")) < 3
    if parts.path.rpartition("/")[2] == "" or is_bare:
        raise PolicyError(f"{named}: {printable(url)} names no file.", REMEDY)


def _check_file_name(package: Package) -> None:
    """Checks that the file is the package that the lock says: a file's name decides what it is."""
    if not _is_named_so(package):
        raise UsageError(
            f"version {package.version}: its address ends in {printable(package.file_name)}, which "
            "is another package, or none.",
            REMEDY,
        )
    subdir = PurePosixPath(urlsplit(package.url).path).parent.name
    if package.manager == "conda" and subdir not in (package.platform, "noarch"):
        raise UsageError(f"it is for the platform {printable(subdir)}.", REMEDY)


def _is_named_so(package: Package) -> bool:
    file = package.file_name
    if package.manager == "conda":
        stem = file.removesuffix(".conda").removesuffix(".tar.bz2")
        return stem != file and stem.rsplit("-", 2)[:-1] == [package.name, package.version]
    try:
        parse = parse_sdist_filename if package.is_sdist else parse_wheel_filename
        name, version = parse(file)[:2]
        return name == canonicalize_name(package.name) and version == Version(package.version)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return False


_HEADER = """\
# Made by `stage env lock`; not meant to be edited. The schema is conda-lock's, version 1:
#   conda-lock install --prefix PREFIX conda-lock.yml
"""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes numbers of YAML 1.2, such as `1e5` in a digest."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_.]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _to_document(package: Package) -> dict[str, Any]:
    md5 = {"md5": package.md5} if package.md5 else {}
    return {
        "name": package.name,
        "version": package.version,
        "manager": package.manager,
        "platform": package.platform,
        "dependencies": dict(sorted(package.dependencies.items())),
        "url": package.url,
        "hash": {**md5, "sha256": package.sha256},
        "category": "main",
        "optional": False,
    }
