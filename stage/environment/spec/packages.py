"""The packages of a lock (`EnvironmentLock`), each with its path in an environment's asset.

A lock names files to download, and may come from anyone. So a file's name must have the name and
version of the lock, and its path is decided here:

    channel/<channel>/<subdir>/x.conda    wheels/x.whl    sdists/x.tar.gz
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from stage import paths as util_paths
from stage.digests import sha256_of_bytes
from stage.environment.spec.conda_lock import REMEDY, EnvironmentLock, LockedPackage
from stage.environment.spec.profile import MACHINES
from stage.errors import UsageError

LOCK_NAME = "conda-lock.yml"
CONDA_ENDINGS = (".conda", ".tar.bz2")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One locked package.

    Attributes:
        manager: `conda` or `pip`.
        sha256: hex, of the file at `url`.
        path: of the file in the asset's folder.
    """

    name: str
    version: str
    manager: str
    url: str
    sha256: str
    path: str

    @property
    def is_sdist(self) -> bool:
        """Whether a wheel must be built from it before it travels."""
        return self.path.startswith("sdists/")


@dataclass(frozen=True)
class LockedPackages:
    """The packages of a lock for one platform.

    Attributes:
        platform: conda's name, `linux-64`.
        packages: sorted by path.
    """

    platform: str
    packages: tuple[Package, ...]

    @property
    def conda(self) -> list[Package]:
        """The conda packages."""
        return [package for package in self.packages if package.manager == "conda"]

    @property
    def pip(self) -> list[Package]:
        """The packages of a Python index: wheels and sdists."""
        return [package for package in self.packages if package.manager == "pip"]

    @property
    def python(self) -> str:
        """Version of the interpreter, `3.10.13`."""
        return next(package.version for package in self.conda if package.name == "python")


def lock_beside(spec: Path) -> Path:
    """The lock of `environment.yml` is `conda-lock.yml`, that of `x.yml` is `x.conda-lock.yml`."""
    return spec.with_name(LOCK_NAME if spec.stem == "environment" else f"{spec.stem}.{LOCK_NAME}")


def read_packages(data: bytes, where: str, platform: str | None = None) -> LockedPackages:
    """Reads a lock.

    Args:
        where: the file's name, for messages.
        platform: which of the lock's platforms; None: the only one it has.

    Raises:
        UsageError: no such lock, a field that is missing or invalid, or another platform than
            `MACHINES`.
        PolicyError: a package without sha256, a URL with a secret, a name that may not be in a
            bundle.
    """
    lock = EnvironmentLock.parse(data, where, platform)
    if lock.platform not in MACHINES:
        raise UsageError(
            f"{where}: locked for {util_paths.printable(lock.platform)}; a cluster's nodes are "
            f"{' or '.join(MACHINES)}.",
            REMEDY,
        )
    channels = _channel_folders({_base(package.url) for package in lock.of("conda")})
    packages = [_place(package, channels, where) for package in lock.packages]
    _check_together(packages, where)
    return LockedPackages(lock.platform, tuple(sorted(packages, key=lambda package: package.path)))


def _place(package: LockedPackage, channels: Mapping[str, str], where: str) -> Package:
    """A package with its path in the asset.

    Raises:
        UsageError: the file's name is of another package or version, or for another platform.
        PolicyError: a name that may not be in a bundle.
    """
    what = f"{where}: {util_paths.printable(package.name)}"
    file, subdir = package.file_name, package.subdir
    is_named_so = {"conda": _is_of_conda, "pip": _is_of_pip}[package.manager]
    if not is_named_so(file, package):
        raise UsageError(
            f"{what} {package.version}: its address ends in {util_paths.printable(file)}, which is "
            "another package, or none.",
            REMEDY,
        )
    if package.manager == "conda":
        if subdir not in (package.platform, "noarch"):
            raise UsageError(f"{what} is for the platform {util_paths.printable(subdir)}.", REMEDY)
        path = f"channel/{channels[_base(package.url)]}/{subdir}/{file}"
    else:
        path = f"{'sdists' if package.is_sdist else 'wheels'}/{file}"
    util_paths.check_path(path, what)
    return Package(
        name=package.name,
        version=package.version,
        manager=package.manager,
        url=package.url,
        sha256=package.sha256,
        path=path,
    )


def _is_of_conda(file: str, package: LockedPackage) -> bool:
    stems = (file.removesuffix(ending) for ending in CONDA_ENDINGS if file.endswith(ending))
    return any(stem.rsplit("-", 2)[:-1] == [package.name, package.version] for stem in stems)


def _is_of_pip(file: str, package: LockedPackage) -> bool:
    try:
        parse = parse_sdist_filename if package.is_sdist else parse_wheel_filename
        name, version = parse(file)[:2]
        return name == canonicalize_name(package.name) and version == Version(package.version)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return False


def _base(url: str) -> str:
    """A conda package's channel: its URL without subdir and file."""
    return url.rsplit("/", 2)[0]


def _channel_folders(bases: Iterable[str]) -> dict[str, str]:
    """URL of a channel -> its folder: the last part, and a digest where that is not unique."""
    names = {base: _last_part(base) for base in sorted(bases)}
    shared = Counter(map(util_paths.folded, names.values()))
    for base, name in names.items():
        if shared[util_paths.folded(name)] > 1:
            names[base] = f"{name}-{sha256_of_bytes(base.encode())[:8]}"
    return names


def _last_part(base: str) -> str:
    return unquote(urlsplit(base).path.rstrip("/").rpartition("/")[2]) or "channel"


def _check_together(packages: list[Package], where: str) -> None:
    """Checks the packages of a platform: a Python, no package twice, no two files of one name.

    Raises:
        UsageError, PolicyError: with the names.
    """
    seen: set[tuple[str, str]] = set()
    for package in packages:
        name = canonicalize_name(package.name) if package.manager == "pip" else package.name
        if (package.manager, name) in seen:
            shown = util_paths.printable(package.name)
            raise UsageError(f"{where}: {shown} is listed twice.", REMEDY)
        seen.add((package.manager, name))
    if ("conda", "python") not in seen:
        raise UsageError(
            f"{where}: no conda package `python`.",
            "Name it in the environment file, such as `python=3.10`, and lock again.",
        )
    util_paths.check_collisions([package.path for package in packages], where)
