"""The lock of an environment, `conda-lock.yml`: conda-lock's own schema, version 1, to and from its text.

Every package, of conda and of pip, with address and sha256. `conda-lock install`, micromamba and py-rattler read the
same file. The text is deterministic (sorted; no date, host or tool version), so the same answer is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from stage.digest import is_hex
from stage.errors import UsageError

VERSION = 1
OURS = ("made_by", "stage env lock")
MANAGERS = ("conda", "pip")

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
        """Reads a lock, ours or conda-lock's own.

        Raises:
            UsageError: no such file, or not a lock of schema version 1 for one platform with sha256 throughout.
        """
        path = Path(path)
        document = _read(path)
        if not isinstance(document, dict) or document.get("version") != VERSION:
            found = document.get("version") if isinstance(document, dict) else None
            raise _broken(path, f"`version` should be {VERSION}, found {found!r}")
        return _from_document(document, path)


def made_by_stage(path: Path) -> bool:
    """Whether `stage env lock` made a lock; another tool's `content_hash` is not comparable with ours.

    Raises:
        UsageError: no such file, or not YAML.
    """
    document = _read(path)
    metadata = document.get("metadata") if isinstance(document, dict) else None
    notes = metadata.get("custom_metadata") if isinstance(metadata, dict) else None
    return isinstance(notes, dict) and notes.get(OURS[0]) == OURS[1]


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), Loader=_LOADER)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file.", "Make it: stage env lock ENVIRONMENT.yml --profile P") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(path, f"it is not YAML: {str(error).splitlines()[0]}") from None


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


def _from_document(document: Mapping[str, Any], path: Path) -> EnvironmentLock:
    try:
        metadata = document["metadata"]
        platforms = metadata["platforms"]
        if len(platforms) != 1:
            raise _broken(path, f"it is for {len(platforms)} platforms ({', '.join(platforms)}), expected one")
        entries = {(e["manager"], e["name"]): e for e in document["package"]}  # one entry a category: the same package
        return EnvironmentLock(
            platform=platforms[0],
            content_hash=str(metadata["content_hash"][platforms[0]]),
            channels=tuple(str(channel["url"]) for channel in metadata["channels"]),
            sources=tuple(str(source) for source in metadata["sources"]),
            packages=tuple(_package(entry, path) for entry in entries.values()),
            notes={str(key): str(value) for key, value in (metadata.get("custom_metadata") or {}).items()},
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise _broken(path, f"{type(error).__name__} {error} while reading it") from None


def _package(entry: Mapping[str, Any], path: Path) -> LockedPackage:
    package = LockedPackage(
        name=str(entry["name"]),
        version=str(entry["version"]),
        manager=str(entry["manager"]),
        platform=str(entry["platform"]),
        url=str(entry["url"]),
        sha256=str(entry["hash"].get("sha256") or ""),
        md5=entry["hash"].get("md5"),
        dependencies={str(name): str(spec) for name, spec in (entry.get("dependencies") or {}).items()},
    )
    if package.manager not in MANAGERS:
        raise _broken(path, f"{package.name}: manager {package.manager!r}, expected conda or pip")
    if not is_hex(package.sha256, 64):
        raise _broken(path, f"{package.name} {package.version} has no sha256: nothing could prove its bytes")
    if not package.file_name or "://" not in package.url:
        raise _broken(path, f"{package.name}: its address {package.url!r} names no file")
    return package


def _broken(path: Path, problem: str) -> UsageError:
    return UsageError(
        f"{path}: not a lock that can be used: {problem}.", "Make it anew: stage env lock ENVIRONMENT.yml --profile P"
    )
