"""Reads `conda-lock.yml` (schema version 1) into the packages of one platform, believing nothing.

A lock names files to download and folders to put them in, and may come from anywhere. So every package must have a
sha256 (md5 alone proves nothing today), its file name must say the name and version that the lock says, an address may
hold no password, and where the file will lie in the asset is decided here:

    channel/<channel>/<subdir>/x.conda    wheels/x.whl    sdists/x.tar.gz
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
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

from stage import names
from stage.digest import is_hex, sha256_of_bytes
from stage.errors import PolicyError, UsageError

LOCK_NAME = "conda-lock.yml"
SCHEMA = 1
CONDA_ENDINGS = (".conda", ".tar.bz2")
SCHEMES = ("https", "http", "file")
_SUBDIRS = ("linux-64", "linux-aarch64", "linux-ppc64le", "osx-64", "osx-arm64", "noarch")
_REMEDY = "Make the lock anew: stage env lock ENVIRONMENT.yml --profile PROFILE"


@dataclass(frozen=True, kw_only=True)
class Package:
    """One locked package.

    Attributes:
        manager: `conda` or `pip`.
        sha256: hex, of the file at `url`.
        path: where the file lies in the asset's folder.
    """

    name: str
    version: str
    manager: str
    url: str
    sha256: str
    path: str

    @property
    def is_sdist(self) -> bool:
        """Whether a wheel has to be built of it before it travels."""
        return self.path.startswith("sdists/")


@dataclass(frozen=True)
class LockedPackages:
    """What a lock says for one platform.

    Attributes:
        platform: conda's name of it, `linux-64`.
        packages: sorted by path.
    """

    platform: str
    packages: tuple[Package, ...]

    @property
    def conda(self) -> list[Package]:
        """Those that conda made."""
        return [package for package in self.packages if package.manager == "conda"]

    @property
    def pip(self) -> list[Package]:
        """Those from a Python index: wheels and sdists."""
        return [package for package in self.packages if package.manager == "pip"]

    @property
    def python(self) -> str:
        """Version of the interpreter, `3.10.13`."""
        return next(package.version for package in self.conda if package.name == "python")


def lock_beside(spec: Path) -> Path:
    """The lock of an environment file: `environment.yml` -> `conda-lock.yml`, `x.yml` -> `x.conda-lock.yml`."""
    return spec.with_name(LOCK_NAME if spec.stem == "environment" else f"{spec.stem}.{LOCK_NAME}")


def read_packages(data: bytes, where: str, platform: str | None = None) -> LockedPackages:
    """Reads a lock.

    Args:
        where: the file's name, for messages.
        platform: which of the lock's platforms; None: the only one it has.

    Raises:
        UsageError: not such a lock, or a field that is missing or not what it should be.
        PolicyError: a package without sha256, an address with a secret in it, a name that may not be in a bundle.
    """
    document = _document(data, where)
    entries = document.get("package")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where}: the lock lists no packages.", _REMEDY)
    reader = _Reader(where)
    platform = _platform(entries, where, platform)
    fields = [reader.fields(entry, f"package[{i}]") for i, entry in enumerate(entries)]
    fields = [field for field in fields if field["platform"] == platform]
    channels = _channel_folders({_base(field["url"]) for field in fields if field["manager"] == "conda"})
    packages = [reader.package(field, channels) for field in fields]
    _check_together(packages, where)
    return LockedPackages(platform, tuple(sorted(packages, key=lambda package: package.path)))


def _document(data: bytes, where: str) -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a lock has thousands of lines
    try:
        document = yaml.load(data, Loader=loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not a lock: it is not YAML ({_first_line(error)}).", _REMEDY) from None
    if not isinstance(document, dict) or "version" not in document:
        raise UsageError(f"{where}: not a lock: it has no `version`.", _REMEDY)
    if document["version"] != SCHEMA or isinstance(document["version"], bool):
        raise UsageError(
            f"{where}: schema version {document['version']!r}; this version of airlift reads version {SCHEMA}.", _REMEDY
        )
    return document


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _platform(entries: list[Any], where: str, wanted: str | None) -> str:
    found = sorted({str(entry.get("platform")) for entry in entries if isinstance(entry, dict)})
    if wanted is not None and wanted not in found:
        raise UsageError(f"{where}: locked for {', '.join(found)}; the profile's platform is {wanted}.", _REMEDY)
    if wanted is None and len(found) > 1:
        raise UsageError(
            f"{where}: locked for {', '.join(found)}: which of them?", "Name the cluster's `profile:` in the manifest."
        )
    return wanted or found[0]


class _Reader:
    """Takes packages out of a parsed lock; failures name the file and the package."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, place: str, problem: str) -> NoReturn:
        raise UsageError(f"{self.where}: {place} {problem}.", _REMEDY)

    def fields(self, entry: Any, place: str) -> dict[str, str]:
        """The texts of one entry; its digest under `sha256`."""
        if not isinstance(entry, dict):
            self.fail(place, "should be a mapping")
        fields: dict[str, str] = {}
        for key in ("name", "version", "manager", "platform", "url"):
            value = entry.get(key)
            if not isinstance(value, str) or not value:
                self.fail(f"{place} ({names.printable(fields.get('name', '?'))})", f"should have a text `{key}`")
            fields[key] = value
        digests = entry.get("hash")
        sha256 = digests.get("sha256") if isinstance(digests, dict) else None
        if not sha256:
            raise PolicyError(
                f"{self.where}: {names.printable(fields['name'])} has no sha256 (an md5 alone proves nothing).", _REMEDY
            )
        if not isinstance(sha256, str) or not is_hex(sha256, 64):
            self.fail(names.printable(fields["name"]), f"should have a sha256 of 64 hex digits, found {sha256!r}")
        try:
            urlsplit(fields["url"])
        except ValueError as error:
            self.fail(names.printable(fields["name"]), f"has an address that is none: {error}")
        return {**fields, "sha256": sha256}

    def package(self, field: Mapping[str, str], channels: Mapping[str, str]) -> Package:
        """One package, with its place in the asset."""
        url, what = field["url"], f"{self.where}: {names.printable(field['name'])}"
        self._check_address(url, what)
        file = unquote(urlsplit(url).path.rpartition("/")[2])
        match field["manager"]:
            case "conda":
                subdir = urlsplit(url).path.split("/")[-2]
                if subdir not in (field["platform"], "noarch") or subdir not in _SUBDIRS:
                    self.fail(names.printable(field["name"]), f"is for {names.printable(subdir)}")
                self._check_conda_name(file, field)
                path = f"channel/{channels[_base(url)]}/{subdir}/{file}"
            case "pip":
                path = f"{'wheels' if self._is_wheel(file, field) else 'sdists'}/{file}"
            case other:
                self.fail(names.printable(field["name"]), f"has the unknown manager {other!r}")
        names.check_path(path, what)
        return Package(
            name=field["name"],
            version=field["version"],
            manager=field["manager"],
            url=url,
            sha256=field["sha256"],
            path=path,
        )

    def _check_address(self, url: str, what: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or "\\" in url:
            raise PolicyError(f"{what}: {names.printable(url)} is no {', '.join(SCHEMES)} address.", _REMEDY)
        if parts.username or parts.password or "/t/" in parts.path or parts.query:
            raise PolicyError(
                f"{what}: its address has a password or token in it, and would travel in the bundle.",
                "Keep the secret in ~/.netrc, or use a mirror that needs none, and lock again.",
            )
        if len(parts.path.split("/")) < 3 and parts.scheme == "file":
            raise PolicyError(f"{what}: {names.printable(url)} names no file.", _REMEDY)

    def _check_conda_name(self, file: str, field: Mapping[str, str]) -> None:
        stem = next((file.removesuffix(ending) for ending in CONDA_ENDINGS if file.endswith(ending)), None)
        if stem is None or stem.rsplit("-", 2)[:-1] != [field["name"], field["version"]]:
            self._not_what_it_says(file, field)

    def _is_wheel(self, file: str, field: Mapping[str, str]) -> bool:
        try:
            if file.endswith(".whl"):
                name, version, _, _ = parse_wheel_filename(file)
            else:
                name, version = parse_sdist_filename(file)
            same = name == canonicalize_name(field["name"]) and version == Version(field["version"])
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            same = False
        if not same:
            self._not_what_it_says(file, field)
        return file.endswith(".whl")

    def _not_what_it_says(self, file: str, field: Mapping[str, str]) -> NoReturn:
        self.fail(
            names.printable(field["name"]),
            f"{field['version']} is to be found in {names.printable(file)}, which is another package or no package",
        )


def _base(url: str) -> str:
    """A conda package's channel: its address without subdir and file."""
    return url.rsplit("/", 2)[0]


def _channel_folders(bases: Iterable[str]) -> dict[str, str]:
    """Channel address -> its folder's name: the last part of the address, with a digest where two would share it."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for base in sorted(bases):
        by_name[names.folded(_last_part(base))].append(base)
    return {
        base: _last_part(base) if len(shared) == 1 else f"{_last_part(base)}-{sha256_of_bytes(base.encode())[:8]}"
        for shared in by_name.values()
        for base in shared
    }


def _last_part(base: str) -> str:
    return unquote(urlsplit(base).path.rstrip("/").rpartition("/")[2]) or "channel"


def _check_together(packages: list[Package], where: str) -> None:
    """What holds for all packages of a platform: a Python, no package twice, no two files of one name.

    Raises:
        UsageError, PolicyError: with the names.
    """
    seen: dict[tuple[str, str], Package] = {}
    for package in packages:
        key = (package.manager, canonicalize_name(package.name) if package.manager == "pip" else package.name)
        if key in seen:
            raise UsageError(f"{where}: {names.printable(package.name)} is there twice.", _REMEDY)
        seen[key] = package
    if ("conda", "python") not in seen:
        raise UsageError(
            f"{where}: no conda package `python`.",
            "Name it in the environment file, such as `python=3.10`, and lock again.",
        )
    names.check_collisions([package.path for package in packages], where)
