"""The pip half of a lock: a resolution of uv -> one file per package, with URL and sha256.

The file is the best wheel for the target's Python, machine and glibc, or the sdist of a package
that is published as source only. uv takes wheels only, so it goes back to old versions, even to
empty placeholders, where a newer version has only a source. `_catch_up` looks for that.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stage.environment.check.check import best_wheel, glibc_needed, tag_ranks
from stage.environment.check.torch_builds import numbers
from stage.environment.solve.advice import advice_for
from stage.environment.solve.uv import PipRequest, Uv
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.errors import DamageError, StageError, UsageError, without_secrets

Document = Mapping[str, Any]

_NO_EXTRA = re.compile(
    r"The package `([A-Za-z0-9._-]+)[^`]*` does not have an extra named `([^`]+)`"
)
_YANKED = re.compile(r"`([^`]+)` is yanked(?: \(reason: \"([^\"]*)\"\))?")
_ROUNDS = 4  # an extra may require a package with an extra
_MOST_SOURCES = 20  # rounds, each of which permits at least one more package to come as source
# A release up to 0.0.1 reserves a name or is a stub.
_PLACEHOLDER = (0, 0, 1)


def lock_pip(request: PipRequest) -> list[Package]:
    """Resolves the pip half.

    Raises:
        UsageError: no solution; uv is not installed; a wheel that does not fit, with the version
            that does; an extra that the version does not have.
        PolicyError: a package that has to be compiled.
        IncompleteError: an index cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="airlift-lock-") as name:
        run = Uv(Path(name), request)
        document, said = _with_extras(run)
        document, said = _catch_up(run, document, said)
        _check_extras(run, document, said)
        _check_placeholders(run, document)
        fitting = tag_ranks(request.python, request.profile.machine, request.profile.glibc)
        packages = [
            _package(entry, fitting, run.sources, request) for entry in document["packages"]
        ]
    for requirement, reason in _YANKED.findall(said):
        why = f" ({' '.join(reason.split())})" if reason else ""
        request.say(
            f"{requirement}: its authors withdrew this version{why}; it is locked as requested"
        )
    _check_hashes(packages, request.spec)
    return sorted(packages, key=lambda p: p.name)


def _with_extras(run: Uv) -> tuple[Document, str]:
    """Resolves until the required extras of conda's distributions are known.

    Such an extra may require packages that conda does not provide.
    """
    extras: dict[str, set[str]] = {name: set() for name in run.stubbed}
    for _ in range(_ROUNDS):
        run.write_stubs(extras)
        attempt, said = _attempt(run)
        if attempt is None:
            raise run.failure(said)
        document = attempt
        new = {(n, e) for n, e in _missing_extras(said) if e not in extras.get(n, {e})}
        if not new:
            break
        for distribution, extra in new:
            extras[distribution].add(extra)
    return document, said


def _attempt(run: Uv, *constraints: str) -> tuple[Document | None, str]:
    """Resolves; permits packages that are published as source only when they turn out needed."""
    for _ in range(_MOST_SOURCES):
        document, said = run.compile(*constraints)
        if document is not None or not run.permit_sources(said):
            break
    return document, said


def _catch_up(run: Uv, document: Document, said: str) -> tuple[Document, str]:
    """Resolves again where a version is old only because newer ones need sources."""
    for name, newest in _behind(run, document):
        before = set(run.sources)
        _attempt(run, f"{name}>={newest}")
        if run.sources == before:
            continue
        again, output = run.compile()
        if again is not None:
            document, said = again, output
        else:
            run.sources = before
            run.request.say(
                f"{name}: older than the newest, {newest}, which could not be built from source "
                "here"
            )
    return document, said


def _behind(run: Uv, document: Document) -> list[tuple[str, str]]:
    """Requirements of the spec that have less than their newest version: name, newest.

    Requirements that an earlier lock or a constraint of airlift holds back are left out.
    """
    chosen = _versions(document)
    held = {Requirement(text).name for text in run.request.constraints} | run.stubbed.keys()
    moving = {
        r.name: f"{r.name}{Requirement(r.text).specifier}"
        for r in run.request.spec.pip.requirements
        if r.name in chosen and r.name not in held and not r.is_pinned
        if run.request.kept.get(r.name) != chosen[r.name]
    }
    newest = _versions({"packages": run.newest_anywhere(moving.values()) if moving else []})
    return [(name, v) for name, v in newest.items() if _is_older(chosen.get(name, v), v)]


def _versions(document: Document) -> dict[str, str]:
    return {
        str(canonicalize_name(entry["name"])): str(entry.get("version", ""))
        for entry in document["packages"]
    }


def _is_older(version: str, other: str) -> bool:
    try:
        return Version(version) < Version(other)
    except InvalidVersion:
        return False


def _missing_extras(said: str) -> set[tuple[str, str]]:
    return {(canonicalize_name(name), extra) for name, extra in _NO_EXTRA.findall(said)}


def _check_extras(run: Uv, document: Document, said: str) -> None:
    """Refuses an extra of the spec that the version does not have; prints one of another package.

    Raises:
        UsageError: with the version, and what to write.
    """
    versions = _versions(document)
    versions |= {name: distribution.version for name, distribution in run.stubbed.items()}
    for name, extra in sorted(_missing_extras(said)):
        what, version = f"`{name}[{extra}]`", versions.get(name, "")
        if _asks_for(run.request, name, extra):
            raise UsageError(
                f"{run.request.place_of(name)}: {what}: {name} {version} has no extra `{extra}`: "
                "nothing would be installed for it.",
                f"Take `[{extra}]` out, or ask for a version that has it. "
                f"{advice_for(name, run.request.advice_target()) or ''}".strip(),
            )
        run.request.say(
            f"{what}: a package asks for this; {name} {version} has no such extra, so nothing is "
            "installed for it"
        )


def _asks_for(request: PipRequest, name: str, extra: str) -> bool:
    wanted = canonicalize_name(extra)
    return any(
        r.name == name and wanted in map(canonicalize_name, Requirement(r.text).extras)
        for r in request.spec.pip.requirements
    )


def _check_placeholders(run: Uv, document: Document) -> None:
    """Refuses a version 0.0.0 or 0.0.1 where a newer one is published: it is a placeholder.

    Raises:
        UsageError: with the newest version.
    """
    request = run.request
    accepted = {r.name for r in request.spec.pip.requirements if r.is_pinned} | run.stubbed.keys()
    for entry in document["packages"]:
        name, version = canonicalize_name(entry["name"]), str(entry.get("version", ""))
        if name in accepted or not _is_placeholder(version):
            continue
        newest = run.newest_fitting(name)
        if newest and _is_older(version, newest) and not _is_placeholder(newest):
            advice = advice_for(name, request.advice_target())
            raise UsageError(
                f"{request.place_of(name)}: of `{name}` only {version}, a placeholder, fits the "
                f"rest; the newest is {newest}.",
                f"Write `{name}=={newest}`: locking again prints the conflict. "
                f"{advice or ''}".strip(),
            )


def _is_placeholder(version: str) -> bool:
    try:
        return (*Version(version).release, 0, 0)[:3] <= _PLACEHOLDER
    except InvalidVersion:
        return False


def _package(
    entry: Mapping[str, Any], fitting: Mapping[Any, int], sources: set[str], request: PipRequest
) -> Package:
    """One entry of a pylock -> the one file to lock."""
    name = canonicalize_name(entry["name"])
    offered = {_file_name(wheel): wheel for wheel in entry.get("wheels", [])}
    chosen: Mapping[str, Any] | None = offered.get(best_wheel(offered, fitting) or "")
    if chosen is None and "archive" in entry:
        chosen = _direct(entry["archive"], fitting)
    if chosen is None and name in sources:
        chosen = entry.get("sdist")
    if chosen is None:
        raise _unfitting(entry, name, request)
    sha256 = chosen.get("hashes", {}).get("sha256")
    if not sha256:
        raise UsageError(
            f"{request.spec.path}: {name}: its index publishes no sha256 of {_file_name(chosen)}.",
            "Take it from another index, or write its address with its digest: "
            "NAME @ URL#sha256=...",
        )
    return Package(
        name=name,
        version=str(entry["version"]),
        manager="pip",
        platform=request.profile.platform,
        url=without_secrets(chosen["url"]),
        sha256=sha256,
    )


def _direct(archive: Mapping[str, Any], fitting: Mapping[Any, int]) -> Mapping[str, Any] | None:
    """The file of a `NAME @ URL`, if it is a source or a wheel that fits."""
    name = _file_name(archive)
    return None if name.endswith(".whl") and not best_wheel([name], fitting) else archive


def _unfitting(entry: Mapping[str, Any], name: str, request: PipRequest) -> StageError:
    profile = request.profile
    names = [_file_name(wheel) for wheel in entry.get("wheels", [])]
    if "archive" in entry:
        names.append(_file_name(entry["archive"]))
    why = f"it is for another Python or machine: {', '.join(names[:3])}"
    for file_name in names:
        needed = glibc_needed(file_name, profile.machine)
        if needed and numbers(needed) > numbers(profile.glibc):
            why = f"it needs glibc {needed}"
            break
    return UsageError(
        f"{request.place_of(name)}: no file of `{name}` fits {profile.name} (Python "
        f"{request.python}, glibc {profile.glibc}): {why}.",
        "Ask for another version of it.",
    )


def _file_name(file: Mapping[str, Any]) -> str:
    return str(
        file.get("name") or without_secrets(file["url"]).rpartition("/")[2].partition("#")[0]
    )


def _check_hashes(packages: Iterable[Package], spec: EnvironmentSpec) -> None:
    """Compares the chosen files with the `--hash` options of the spec.

    Raises:
        DamageError: the index has other bytes than those that the spec names.
    """
    asked = {r.name: r for r in (*spec.pip.requirements, *spec.pip.constraints) if r.sha256}
    for package in packages:
        requirement = asked.get(package.name)
        if requirement and package.sha256 not in requirement.sha256:
            raise DamageError(
                f"{requirement.place}: {package.file_name} has sha256 {package.sha256}, which is "
                "not among those written there.",
                "If several files of that version are published, write the digest of this one too.",
            )
