"""Reads and writes an environment's lock, `conda-lock.yml`: conda-lock's schema, version 1.

It has each package of conda and pip, with URL and sha256. `conda-lock install`, micromamba and
py-rattler read the same file. The text is deterministic (sorted; no date, host or tool version).

A lock may come from anyone, so reading checks everything: the types of fields, a sha256 for each
package (md5 alone proves nothing today), and no password in a URL.
`stage.environment.spec.packages` checks file names, and decides the path of each package in an
asset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from stage.errors import PolicyError, UsageError
from stage.file_kinds import CONDA_LOCK, check_kind, suggest_file
from stage.lock.fields import Fields
from stage.paths import printable

VERSION = 1
OURS = ("made_by", "stage env lock")
MANAGERS = ("conda", "pip")
SCHEMES = ("https", "http", "file")
REMEDY = "Make the lock again: stage env lock ENVIRONMENT.yml --profile PROFILE"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One locked package.

    Attributes:
        manager: `conda` or `pip`.
        platform: the platform of the lock (also for packages that fit any).
        url: of the conda package, the wheel, or the sdist where no wheel is published. Without
            credentials.
        sha256: hex.
        md5: hex; conda-lock needs it for conda packages. Nothing is checked by it alone.
        dependencies: name -> version spec of the package; empty for pip.
    """

    name: str
    version: str
    manager: str
    platform: str
    url: str
    sha256: str
    md5: str | None = None
    dependencies: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The last part of its URL."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def subdir(self) -> str:
        """The folder of a conda package in its channel: `linux-64` or `noarch`."""
        return PurePosixPath(urlsplit(self.url).path).parent.name

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
        notes: conda-lock's `custom_metadata`. With `OURS`, `content_hash` is airlift's digest.
    """

    platform: str
    content_hash: str
    channels: tuple[str, ...]
    sources: tuple[str, ...]
    packages: tuple[LockedPackage, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    def of(self, manager: str) -> list[LockedPackage]:
        """The packages of `conda` or `pip`, sorted by name."""
        return sorted((p for p in self.packages if p.manager == manager), key=lambda p: p.name)

    def find(self, name: str, manager: str) -> LockedPackage | None:
        """A package by name."""
        return next((p for p in self.packages if p.name == name and p.manager == manager), None)

    def to_yaml(self) -> bytes:
        """The text of the lock."""
        metadata: dict[str, Any] = {
            "content_hash": {self.platform: self.content_hash},
            "channels": [{"url": url, "used_env_vars": []} for url in self.channels],
            "platforms": [self.platform],
            "sources": list(self.sources),
        }
        if self.notes:
            metadata["custom_metadata"] = dict(sorted(self.notes.items()))
        packages = sorted(self.packages, key=lambda p: (p.manager, p.name))
        entries = [_to_document(package) for package in packages]
        document = {"version": VERSION, "metadata": metadata, "package": entries}
        body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
        return (_HEADER + body).encode()

    @staticmethod
    def load(path: Path | str) -> EnvironmentLock:
        """Reads the lock in a file, see `parse`.

        Raises:
            UsageError, PolicyError: no such file; else as for `parse`.
        """
        return EnvironmentLock.parse(_read(Path(path)), str(path))

    @staticmethod
    def parse(data: bytes, where: str, platform: str | None = None) -> EnvironmentLock:
        """Reads a lock of airlift or another tool.

        Args:
            where: the file's name, for messages.
            platform: which of the lock's platforms; None: the only one it has.

        Raises:
            UsageError: no such lock, or a field that is missing or invalid.
            PolicyError: a package without sha256, a URL with a secret or of another scheme than
                `SCHEMES`.
        """
        document = _document(data, where)
        entries = document.get("package")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{where}: the lock lists no packages.", REMEDY)
        metadata = _mapping(document.get("metadata"))
        found = [_entry(entry, number, where) for number, entry in enumerate(entries)]
        stated = metadata.get("platforms") or [entry.text("platform") for entry in found]
        platform = _platform(sorted({str(name) for name in stated}), where, platform)
        packages = [_package(entry) for entry in found if entry.text("platform") == platform]
        channels = (str(_mapping(c).get("url", c)) for c in metadata.get("channels") or ())
        notes = _mapping(metadata.get("custom_metadata"))
        return EnvironmentLock(
            platform=platform,
            content_hash=str(_mapping(metadata.get("content_hash")).get(platform) or ""),
            channels=tuple(channels),
            sources=tuple(str(source) for source in metadata.get("sources") or ()),
            packages=_each_once(packages, where),
            notes={str(key): str(value) for key, value in notes.items()},
        )


def made_by_stage(path: Path) -> bool:
    """Whether `stage env lock` made a lock; the `content_hash` of another tool is another digest.

    Raises:
        UsageError: no such file, or no such lock.
    """
    metadata = _mapping(_document(_read(path), str(path)).get("metadata"))
    return _mapping(metadata.get("custom_metadata")).get(OURS[0]) == OURS[1]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file.",
            suggest_file(path, CONDA_LOCK, "Make it: stage env lock ENVIRONMENT.yml --profile P"),
        ) from None


def _document(data: bytes, where: str) -> Mapping[str, Any]:
    check_kind(where, data, CONDA_LOCK)
    try:
        document = yaml.load(data, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{where}: not a lock: it is not YAML ({line}).", REMEDY) from None
    if not isinstance(document, dict) or "version" not in document:
        raise UsageError(f"{where}: not a lock: it has no `version`.", REMEDY)
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise UsageError(
            f"{where}: schema version {document['version']!r}; this version of airlift reads "
            f"version {VERSION}.",
            REMEDY,
        )
    return document


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _platform(found: Sequence[str], where: str, wanted: str | None) -> str:
    if wanted is not None and wanted not in found:
        raise UsageError(
            f"{where}: locked for {', '.join(found)}; the profile's platform is {wanted}.", REMEDY
        )
    if wanted is None and len(found) > 1:
        raise UsageError(
            f"{where}: locked for {', '.join(found)}: which of them?",
            f"Name the cluster's `profile:` in the manifest. {REMEDY}",
        )
    return wanted or found[0]


def _each_once(packages: Sequence[LockedPackage], where: str) -> tuple[LockedPackage, ...]:
    """Merges equal entries: conda-lock writes one for each category of a package."""
    once: dict[tuple[str, str], LockedPackage] = {}
    for package in packages:
        known = once.setdefault((package.manager, package.name), package)
        if (known.url, known.sha256) != (package.url, package.sha256):
            name = printable(package.name)
            raise UsageError(f"{where}: {name} is listed twice, with two addresses.", REMEDY)
    return tuple(once.values())


def _entry(data: Any, number: int, where: str) -> Fields:
    """One entry of `package`; its messages name the package."""
    name = data.get("name") if isinstance(data, dict) else None
    file = f"{where}: {printable(name)}" if isinstance(name, str) else where
    return Fields(data, file, REMEDY, ("package", number))


def _package(entry: Fields) -> LockedPackage:
    digests, dependencies = entry.maybe_inside("hash"), entry.maybe("dependencies", dict) or {}
    if digests is None or not digests.data.get("sha256"):
        raise PolicyError(f"{entry.place()} has no sha256 (an md5 alone proves nothing).", REMEDY)
    url = entry.text("url")
    _check_address(url, entry)
    return LockedPackage(
        name=entry.text("name"),
        version=entry.text("version"),
        manager=entry.choice("manager", MANAGERS) or entry.missing("manager"),
        platform=entry.text("platform"),
        url=url,
        sha256=digests.hex("sha256"),
        md5=digests.maybe("md5", str),
        dependencies={str(name): str(spec) for name, spec in dependencies.items()},
    )


def _check_address(url: str, entry: Fields) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        entry.fail(f"is not an address: {error}", "url")
    what = entry.place("url")
    if parts.scheme not in SCHEMES or "\\" in url:
        raise PolicyError(f"{what}: {printable(url)} is no {', '.join(SCHEMES)} address.", REMEDY)
    if parts.username or parts.password or "/t/" in parts.path or parts.query:
        raise PolicyError(
            f"{what} has a password or token in it, and would travel in the bundle.",
            "Keep the secret in ~/.netrc, or use a mirror that needs none, and lock again.",
        )
    is_bare = parts.scheme == "file" and len(parts.path.split("/")) < 3
    if parts.path.rpartition("/")[2] == "" or is_bare:
        raise PolicyError(f"{what}: {printable(url)} names no file.", REMEDY)


_HEADER = """\
# Made by `stage env lock`; not meant to be edited. The schema is conda-lock's, version 1:
#   conda-lock install --prefix PREFIX conda-lock.yml
"""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes numbers of YAML 1.2, such as `1e5` in a digest."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_.]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _to_document(package: LockedPackage) -> dict[str, Any]:
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
