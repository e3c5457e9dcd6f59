"""The pip half of a lock: what uv resolved (`uv`) -> one file for each package, with address and sha256.

The best wheel for the target's Python, machine and glibc, or the source distribution where that is permitted.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from stage.environment import wheels
from stage.environment.addresses import without_secrets
from stage.environment.lockfile import LockedPackage
from stage.environment.spec import EnvironmentSpec
from stage.environment.torch_builds import numbers
from stage.errors import DamageError, StageError, UsageError
from stage.sources.environment.uv import PipRequest, Uv

_LACKS_EXTRA = re.compile(r"The package `([A-Za-z0-9._-]+)[^`]*` does not have an extra named `([^`]+)`")
_ROUNDS = 4  # an extra may bring a package whose extra is asked for in turn


def lock_pip(request: PipRequest) -> list[LockedPackage]:
    """Resolves the pip half.

    Raises:
        UsageError: no solution, in words; uv is not installed; a wheel that does not fit, with the version that would.
        PolicyError: a package without a wheel that is no named exception.
        IncompleteError: an index cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="airlift-lock-") as name:
        run = Uv(Path(name), request)
        extras: dict[str, set[str]] = {}
        for _ in range(_ROUNDS):
            run.write_stubs(extras)
            document, warnings = run.compile()
            lacking = {(canonicalize_name(n), extra) for n, extra in _LACKS_EXTRA.findall(warnings)}
            new = {(n, e) for n, e in lacking if n in run.stubbed and e not in extras.get(n, set())}
            if not new:
                break
            for distribution, extra in new:
                extras.setdefault(distribution, set()).add(extra)
        fitting = wheels.ranks(request.python, request.profile.machine, request.profile.glibc)
        packages = [_package(entry, fitting, request) for entry in document["packages"]]
    _check_hashes(packages, request.spec)
    return sorted(packages, key=lambda p: p.name)


def _package(entry: Mapping[str, Any], fitting: Mapping[Any, int], request: PipRequest) -> LockedPackage:
    """One entry of a pylock -> the one file to take."""
    name = canonicalize_name(entry["name"])
    offered = {_file_name(wheel): wheel for wheel in entry.get("wheels", [])}
    chosen: Mapping[str, Any] | None = offered.get(wheels.best(offered, fitting) or "")
    if chosen is None and "archive" in entry:
        chosen = _direct(entry["archive"], name, fitting, request)
    if chosen is None and name in request.spec.pip.sdists:
        chosen = entry.get("sdist")
    if chosen is None:
        raise _unfitting(entry, name, request)
    sha256 = chosen.get("hashes", {}).get("sha256")
    if not sha256:
        raise UsageError(
            f"{request.spec.path}: {name}: its index publishes no sha256 of {_file_name(chosen)}.",
            "Take it from another index, or write its address with its digest: NAME @ URL#sha256=...",
        )
    return LockedPackage(
        name=name,
        version=str(entry.get("version") or _version_in(_file_name(chosen))),
        manager="pip",
        platform=request.profile.platform,
        url=without_secrets(chosen["url"]),
        sha256=sha256,
    )


def _direct(
    archive: Mapping[str, Any], name: str, fitting: Mapping[Any, int], request: PipRequest
) -> Mapping[str, Any] | None:
    """The file of a `NAME @ URL`, if it may be taken."""
    file_name = _file_name(archive)
    is_wheel = file_name.endswith(".whl")
    return archive if (wheels.best([file_name], fitting) if is_wheel else name in request.spec.pip.sdists) else None


def _unfitting(entry: Mapping[str, Any], name: str, request: PipRequest) -> StageError:
    profile, spec = request.profile, request.spec
    place = next((r.place for r in spec.pip.requirements if r.name == name), str(spec.path))
    names = [_file_name(wheel) for wheel in entry.get("wheels", [])]
    names += [_file_name(entry["archive"])] if "archive" in entry else []
    newest = numbers(profile.glibc)
    needed = next((g for n in names if (g := wheels.glibc_needed(n)) and numbers(g) > newest), None)
    why = f"it needs glibc {needed}" if needed else f"it is for another Python or machine: {', '.join(names[:3])}"
    return UsageError(
        f"{place}: no file of `{name}` fits {profile.name} (Python {request.python}, glibc {profile.glibc}): {why}.",
        "Ask for another version of it.",
    )


def _file_name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or without_secrets(file["url"]).rpartition("/")[2].partition("#")[0])


def _version_in(file_name: str) -> str:
    parsed = parse_wheel_filename(file_name) if file_name.endswith(".whl") else parse_sdist_filename(file_name)
    return str(parsed[1])


def _check_hashes(packages: Iterable[LockedPackage], spec: EnvironmentSpec) -> None:
    """`--hash` lines hold for what was chosen, too.

    Raises:
        DamageError: the index has other bytes than the ones written in the spec.
    """
    asked = {r.name: r for r in (*spec.pip.requirements, *spec.pip.constraints) if r.sha256}
    for package in packages:
        requirement = asked.get(package.name)
        if requirement and package.sha256 not in requirement.sha256:
            raise DamageError(
                f"{requirement.place}: {package.file_name} has sha256 {package.sha256}, which is none of those written "
                "there.",
                "If several files of that version are published, write the digest of this one too.",
            )
