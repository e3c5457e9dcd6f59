"""The packages of a lock (`EnvironmentLock`), each with its place in an environment's asset.

A lock names files to download and folders to put them in, and may come from anywhere. So a file's name must say the
name and version that the lock says, and where the file will lie is decided here:

    channel/<channel>/<subdir>/x.conda    wheels/x.whl    sdists/x.tar.gz
"""

from __future__ import annotations

from collections import defaultdict
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

from stage import names
from stage.digest import sha256_of_bytes
from stage.environment.lockfile import REMEDY, EnvironmentLock, LockedPackage
from stage.errors import UsageError

LOCK_NAME = "conda-lock.yml"
CONDA_ENDINGS = (".conda", ".tar.bz2")
_SUBDIRS = ("linux-64", "linux-aarch64", "linux-ppc64le", "osx-64", "osx-arm64", "noarch")


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
    lock = EnvironmentLock.parse(data, where, platform)
    channels = _channel_folders({_base(package.url) for package in lock.of("conda")})
    packages = [_place(package, channels, where) for package in lock.packages]
    _check_together(packages, where)
    return LockedPackages(lock.platform, tuple(sorted(packages, key=lambda package: package.path)))


def _place(package: LockedPackage, channels: Mapping[str, str], where: str) -> Package:
    """A package with its place in the asset; its file must be of the name and version that the lock says.

    Raises:
        UsageError: it is not, or is for another platform.
        PolicyError: a name that may not be in a bundle.
    """
    what = f"{where}: {names.printable(package.name)}"
    file, subdir = package.file_name, package.subdir
    if not (_is_of_conda(file, package) if package.manager == "conda" else _is_of_pip(file, package)):
        raise UsageError(
            f"{what} {package.version} is to be found in {names.printable(file)}, which is another package or no "
            "package.",
            REMEDY,
        )
    if package.manager == "conda":
        if subdir not in (package.platform, "noarch") or subdir not in _SUBDIRS:
            raise UsageError(f"{what} is for {names.printable(subdir)}.", REMEDY)
        path = f"channel/{channels[_base(package.url)]}/{subdir}/{file}"
    else:
        path = f"{'sdists' if package.is_sdist else 'wheels'}/{file}"
    names.check_path(path, what)
    return Package(
        name=package.name,
        version=package.version,
        manager=package.manager,
        url=package.url,
        sha256=package.sha256,
        path=path,
    )


def _is_of_conda(file: str, package: LockedPackage) -> bool:
    stem = next((file.removesuffix(ending) for ending in CONDA_ENDINGS if file.endswith(ending)), None)
    return stem is not None and stem.rsplit("-", 2)[:-1] == [package.name, package.version]


def _is_of_pip(file: str, package: LockedPackage) -> bool:
    try:
        name, version = parse_sdist_filename(file) if package.is_sdist else parse_wheel_filename(file)[:2]
        return name == canonicalize_name(package.name) and version == Version(package.version)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return False


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
            raise UsageError(f"{where}: {names.printable(package.name)} is there twice.", REMEDY)
        seen[key] = package
    if ("conda", "python") not in seen:
        raise UsageError(
            f"{where}: no conda package `python`.",
            "Name it in the environment file, such as `python=3.10`, and lock again.",
        )
    names.check_collisions([package.path for package in packages], where)
