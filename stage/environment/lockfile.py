"""The lock of an environment, `conda-lock.yml`: conda-lock's own schema, version 1, to and from its text.

Every package, of conda and of pip, with address and sha256. `conda-lock install`, micromamba and py-rattler read the
same file. The text is deterministic (sorted; no date, host or tool version), so the same answer is the same bytes.

Reading believes nothing, for a lock may come from anywhere: fields are what they should be, every package has a sha256
(md5 alone proves nothing today), and no address holds a password. `stage.environment.packages` says which file names
are believed, and where each package lies in an asset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from stage.digest import is_hex
from stage.errors import PolicyError, UsageError
from stage.names import printable

VERSION = 1
OURS = ("made_by", "stage env lock")
MANAGERS = ("conda", "pip")
SCHEMES = ("https", "http", "file")
REMEDY = "Make the lock anew: stage env lock ENVIRONMENT.yml --profile PROFILE"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One package, exactly.

    Attributes:
        manager: `conda` or `pip`.
        platform: the platform locked for (also for packages that fit any).
        url: of the conda package, the wheel, or, where no wheel is published, the sdist. Never with credentials.
        sha256: hex.
        md5: hex; conda-lock wants it of conda packages, nothing is ever checked by it alone.
        dependencies: name -> version spec, as the package states them; empty for pip.
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
        """The last part of its address."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def subdir(self) -> str:
        """Of a conda package, the folder of its channel it lies in: `linux-64` or `noarch`."""
        return PurePosixPath(urlsplit(self.url).path).parent.name

    @property
    def is_sdist(self) -> bool:
        """Whether a wheel of it has to be built first."""
        return self.manager == "pip" and not self.file_name.endswith(".whl")


@dataclass(frozen=True, kw_only=True)
class EnvironmentLock:
    """What `environment.yml` resolved to for one platform.

    Attributes:
        content_hash: sha256 of what was asked (`stage.environment.spec.content_hash`): tells a stale lock.
        channels: of conda, in order of priority, without credentials.
        sources: names of the files it was made from.
        notes: conda-lock's `custom_metadata`. `OURS` among them says what kind of digest `content_hash` is.
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
        """The lock's one true text."""
        metadata: dict[str, Any] = {
            "content_hash": {self.platform: self.content_hash},
            "channels": [{"url": url, "used_env_vars": []} for url in self.channels],
            "platforms": [self.platform],
            "sources": list(self.sources),
        }
        if self.notes:
            metadata["custom_metadata"] = dict(sorted(self.notes.items()))
        packages = sorted(self.packages, key=lambda p: (p.manager, p.name))
        document = {"version": VERSION, "metadata": metadata, "package": [_to_document(p) for p in packages]}
        body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
        return (_HEADER + body).encode()

    @staticmethod
    def load(path: Path | str) -> EnvironmentLock:
        """Reads the lock in a file, as `parse` does.

        Raises:
            UsageError, PolicyError: no such file; else as for `parse`.
        """
        return EnvironmentLock.parse(_read(Path(path)), str(path))

    @staticmethod
    def parse(data: bytes, where: str, platform: str | None = None) -> EnvironmentLock:
        """Reads a lock, ours or another tool's.

        Args:
            where: the file's name, for messages.
            platform: which of the lock's platforms; None: the only one it has.

        Raises:
            UsageError: not such a lock, or a field that is missing or not what it should be.
            PolicyError: a package without sha256, an address with a secret in it or of a kind that is never asked.
        """
        document = _document(data, where)
        entries = document.get("package")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{where}: the lock lists no packages.", REMEDY)
        metadata = _mapping(document.get("metadata"))
        found = [_Entry(entry, f"package[{i}]", where) for i, entry in enumerate(entries)]
        stated = metadata.get("platforms") or [entry.text("platform") for entry in found]
        platform = _platform(sorted({str(name) for name in stated}), where, platform)
        packages = [entry.package() for entry in found if entry.text("platform") == platform]
        return EnvironmentLock(
            platform=platform,
            content_hash=str(_mapping(metadata.get("content_hash")).get(platform) or ""),
            channels=tuple(str(_mapping(channel).get("url", channel)) for channel in metadata.get("channels") or ()),
            sources=tuple(str(source) for source in metadata.get("sources") or ()),
            packages=_each_once(packages, where),
            notes={str(key): str(value) for key, value in _mapping(metadata.get("custom_metadata")).items()},
        )


def made_by_stage(path: Path) -> bool:
    """Whether `stage env lock` made a lock; another tool's `content_hash` is not comparable with ours.

    Raises:
        UsageError: no such file, or no such lock.
    """
    metadata = _mapping(_document(_read(path), str(path)).get("metadata"))
    return _mapping(metadata.get("custom_metadata")).get(OURS[0]) == OURS[1]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file.", "Make it: stage env lock ENVIRONMENT.yml --profile P") from None


def _document(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        document = yaml.load(data, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{where}: not a lock: it is not YAML ({line}).", REMEDY) from None
    if not isinstance(document, dict) or "version" not in document:
        raise UsageError(f"{where}: not a lock: it has no `version`.", REMEDY)
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise UsageError(
            f"{where}: schema version {document['version']!r}; this version of airlift reads version {VERSION}.", REMEDY
        )
    return document


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _platform(found: Sequence[str], where: str, wanted: str | None) -> str:
    if wanted is not None and wanted not in found:
        raise UsageError(f"{where}: locked for {', '.join(found)}; the profile's platform is {wanted}.", REMEDY)
    if wanted is None and len(found) > 1:
        raise UsageError(
            f"{where}: locked for {', '.join(found)}: which of them?",
            f"Name the cluster's `profile:` in the manifest. {REMEDY}",
        )
    return wanted or found[0]


def _each_once(packages: Sequence[LockedPackage], where: str) -> tuple[LockedPackage, ...]:
    """conda-lock writes an entry for each category that a package is in: the same file, so one package."""
    once: dict[tuple[str, str], LockedPackage] = {}
    for package in packages:
        known = once.setdefault((package.manager, package.name), package)
        if (known.url, known.sha256) != (package.url, package.sha256):
            raise UsageError(f"{where}: {printable(package.name)} is there twice, from two addresses.", REMEDY)
    return tuple(once.values())


class _Entry:
    """One entry of a parsed lock; failures name the file and the package."""

    def __init__(self, entry: Any, place: str, where: str) -> None:
        self.where, self.place = where, place
        if not isinstance(entry, dict):
            raise self.failure("should be a mapping")
        self.fields = entry
        if isinstance(entry.get("name"), str):
            self.place = f"{place} ({printable(entry['name'])})"

    def failure(self, problem: str) -> UsageError:
        return UsageError(f"{self.where}: {self.place} {problem}.", REMEDY)

    def text(self, key: str) -> str:
        """A field that must be a text."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not value:
            raise self.failure(f"should have a text `{key}`")
        return value

    def package(self) -> LockedPackage:
        """The entry, checked."""
        md5 = _mapping(self.fields.get("hash")).get("md5")
        package = LockedPackage(
            name=self.text("name"),
            version=self.text("version"),
            manager=self.text("manager"),
            platform=self.text("platform"),
            url=self.text("url"),
            sha256=self._sha256(),
            md5=md5 if isinstance(md5, str) else None,
            dependencies={str(n): str(spec) for n, spec in _mapping(self.fields.get("dependencies")).items()},
        )
        if package.manager not in MANAGERS:
            raise self.failure(f"has the unknown manager {package.manager!r}")
        self._check_address(package.url)
        return package

    def _sha256(self) -> str:
        sha256 = _mapping(self.fields.get("hash")).get("sha256")
        if not sha256:
            raise PolicyError(f"{self.where}: {self.place} has no sha256 (an md5 alone proves nothing).", REMEDY)
        if not isinstance(sha256, str) or not is_hex(sha256, 64):
            raise self.failure(f"should have a sha256 of 64 hex digits, found {sha256!r}")
        return sha256

    def _check_address(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise self.failure(f"has an address that is none: {error}") from None
        what = f"{self.where}: {self.place}"
        if parts.scheme not in SCHEMES or "\\" in url:
            raise PolicyError(f"{what}: {printable(url)} is no {', '.join(SCHEMES)} address.", REMEDY)
        if parts.username or parts.password or "/t/" in parts.path or parts.query:
            raise PolicyError(
                f"{what}: its address has a password or token in it, and would travel in the bundle.",
                "Keep the secret in ~/.netrc, or use a mirror that needs none, and lock again.",
            )
        if parts.path.rpartition("/")[2] == "" or (parts.scheme == "file" and len(parts.path.split("/")) < 3):
            raise PolicyError(f"{what}: {printable(url)} names no file.", REMEDY)


_HEADER = """\
# Made by `stage env lock`; not meant to be edited. The schema is conda-lock's, version 1:
#   conda-lock install --prefix PREFIX conda-lock.yml
"""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes what a reader of YAML 1.2 would take for a number: `1e5` in a digest."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_.]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _to_document(package: LockedPackage) -> dict[str, Any]:
    digests = {"md5": package.md5, "sha256": package.sha256} if package.md5 else {"sha256": package.sha256}
    return {
        "name": package.name,
        "version": package.version,
        "manager": package.manager,
        "platform": package.platform,
        "dependencies": dict(sorted(package.dependencies.items())),
        "url": package.url,
        "hash": digests,
        "category": "main",
        "optional": False,
    }
