"""Builds a wheel of airlift from the running installation, for each environment.

The same installation gives the same bytes on any machine: sorted, without dates, and without
compression, because compressors differ between versions. An editable installation works too: the
files come from the folder that Python imports.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from importlib import metadata
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stage.environment.spec.conda_lock import EnvironmentLock
from stage.errors import UsageError
from stage.installation import DISTRIBUTION, install_command
from stage.version import __version__

PACKAGES = ("runner", "stage")
_TAG = "py3-none-any"
_FROM_METADATA = ("METADATA", "entry_points.txt", "top_level.txt")


def airlift_wheel(folder: Path) -> Path:
    """Writes `airlift_hpc-<version>-py3-none-any.whl` into `folder`.

    Raises:
        UsageError: airlift is not installed here, or its metadata is of another version than its
            code.
    """
    distribution = _distribution()
    texts = {name: distribution.read_text(name) for name in _FROM_METADATA}
    texts["METADATA"] = texts["METADATA"] or distribution.read_text("PKG-INFO")
    info = {name: text.encode() for name, text in texts.items() if text}
    return pure_wheel(folder, DISTRIBUTION, __version__, dict(_package_files()), info)


def pure_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes], info: Mapping[str, bytes]
) -> Path:
    """Writes the wheel of a package for any platform.

    Args:
        folder: made where it is missing.
        files: path in the wheel -> content.
        info: the same in the dist-info folder, without WHEEL and RECORD.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    generator = f"Wheel-Version: 1.0\nGenerator: {DISTRIBUTION} ({__version__})\n"
    kind = f"{generator}Root-Is-Purelib: true\nTag: {_TAG}\n".encode()
    inside = {f"{stem}.dist-info/{key}": text for key, text in {**info, "WHEEL": kind}.items()}
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-{_TAG}.whl"
    write_wheel(wheel, {**files, **inside}, f"{stem}.dist-info/RECORD")
    return wheel


def write_wheel(wheel: Path | BytesIO, files: Mapping[str, bytes], record: str) -> None:
    """Writes a wheel: the files in sorted order, then their RECORD."""
    lines: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            encoded = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest())
            digest = encoded.rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(files[name])}\n")
            archive.writestr(zipfile.ZipInfo(name), files[name])  # of 1980
        archive.writestr(zipfile.ZipInfo(record), "".join([*lines, f"{record},,\n"]))


def check_holds_airlift(lock: EnvironmentLock, where: str) -> None:
    """Checks that a lock has the requirements of airlift, before anything is downloaded.

    Without them `stage` does not start on the cluster.

    Raises:
        UsageError: with the requirements to add.
    """
    packages = {str(canonicalize_name(p.name)): p.version for p in lock.packages}
    packages |= lock.provides
    if unmet := unmet_requirements(packages, lock.python):
        raise UsageError(
            f"{where}: `stage` and `runner` will be in the environment, and the lock does not meet "
            f"their requirements: {', '.join(unmet)}.",
            "stage env lock adds them; with another tool, add them to the pip section and lock "
            "again.",
        )


def own_requirements() -> tuple[str, ...]:
    """The requirements of airlift without extras, from its metadata; sorted.

    Raises:
        UsageError: this airlift is not installed, so it has no metadata.
    """
    stated = _distribution().requires or []
    return tuple(sorted(r for r in stated if "extra" not in str(Requirement(r).marker or "")))


def unmet_requirements(versions: Mapping[str, str], python: str) -> list[str]:
    """The requirements of airlift that a lock does not meet, in pip's notation.

    Args:
        versions: normalised name of every locked package -> its version.
        python: version of the environment's interpreter, `3.10.13`.
    """
    target: dict[str, str | AbstractSet[str]] = {
        **{key: str(value) for key, value in default_environment().items()},
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "sys_platform": "linux",
    }
    stated = map(Requirement, own_requirements())
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in stated
        if requirement.marker is None or requirement.marker.evaluate(target)
        if not _is_met(requirement, versions.get(canonicalize_name(requirement.name), ""))
    ]


def _is_met(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _distribution() -> metadata.Distribution:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise UsageError(
            "airlift is not installed here (it runs from a folder), so no wheel of it can be "
            "made for the environment.",
            install_command(),
        ) from None
    if distribution.version != __version__:
        raise UsageError(
            f"airlift is installed as version {distribution.version}, and its code is version "
            f"{__version__}.",
            f"Install it again: {install_command()}",
        )
    return distribution


def _package_files() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        spec = find_spec(package)  # `stage` must not import `runner`
        if spec is None or not spec.submodule_search_locations:
            problem = f"airlift's package `{package}` is not here."
            raise UsageError(problem, f"Install it again: {install_command()}")
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root.parent)
            if path.is_file() and not any(_is_litter(part) for part in relative.parts):
                yield relative.as_posix(), path.read_bytes()


def _is_litter(name: str) -> bool:
    """Whether an interpreter or an editor left this file in a source folder."""
    return name == "__pycache__" or name.startswith(".") or name.endswith(("~", ".orig", ".rej"))
