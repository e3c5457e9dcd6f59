"""`environment.yml` and a profile -> `conda-lock.yml`.

A lock that still matches its spec and profile is left unchanged, byte for byte. Else both halves
are solved, with as many packages of the older lock as possible. An environment that would not run
on the cluster is refused before anything is written.

An environment may be on a site's own torch. What the site provides is checked, and never locked:
the solver takes it for installed (`Provided`). A requirement of the environment file that it does
not meet is refused here, with both files' lines: uv's own message does not have the version.

The pip half is a resolution of uv: one file per package, with URL and sha256. The file is the best
wheel for the target's Python, machine and glibc, or the sdist of a package that is published as
source only. uv takes wheels only, so it goes back to old versions, even to empty placeholders,
where a newer version has only a source. `_catch_up` looks for that.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stage.environment.check.check import Needs, best_wheel, glibc_needed, tag_ranks, verdicts
from stage.environment.check.torch_builds import numbers, torch_limit, what_fits
from stage.environment.image.image import own_requirements
from stage.environment.solve.advice import advice_for
from stage.environment.solve.conda import (
    OLDEST_PYTHON,
    Provided,
    Solver,
    choose_solver,
    lock_conda,
    provided_by_conda,
    python_too_old,
)
from stage.environment.solve.uv import PipRequest, Uv, address_to_ask, choose_indexes, index_names
from stage.environment.spec.conda_lock import EnvironmentLock, Package, made_by_stage
from stage.environment.spec.environment_yml import EnvironmentSpec, content_hash
from stage.environment.spec.profile import Profile
from stage.errors import (
    DamageError,
    Mistakes,
    Place,
    PolicyError,
    StageError,
    UsageError,
    suggest,
    without_secrets,
)
from stage.files import check_folder_of, human_count, join_limited, write_atomically
from stage.progress import Reporter


def answers(lock: EnvironmentLock, spec: EnvironmentSpec, profile: Profile) -> bool:
    """Whether a lock was made from this spec and profile as they are now."""
    return (
        lock.content_hash == content_hash(spec, profile, own_requirements())
        and lock.platform == profile.platform
    )


def is_stale(lock_path: Path, spec_path: Path, profile_path: Path) -> bool:
    """Whether spec, profile or airlift's requirements changed since `stage env lock`.

    A lock of another tool does not record its inputs: it counts as current.

    Raises:
        UsageError: one of the three cannot be read.
    """
    if not made_by_stage(lock_path):
        return False
    spec, profile = EnvironmentSpec.load(spec_path), Profile.load(profile_path)
    return not answers(EnvironmentLock.load(lock_path), spec, profile)


def lock_environment(
    spec_path: Path,
    profile_path: Path,
    *,
    reporter: Reporter,
    output: Path | None = None,
    updates: Sequence[str] = (),
    conda: str | None = None,
    write: bool = True,
) -> tuple[EnvironmentLock, bool]:
    """Makes the lock, or finds that the existing one still matches.

    Args:
        output: path of the lock; None: beside the spec.
        updates: names of packages that may move to newer versions.
        conda: a conda, mamba or micromamba to solve with; None: chosen, with its reason printed.
        write: False: nothing is written, and only the changes are printed.

    Returns:
        The lock, and whether this run changed it.

    Raises:
        StageError: a spec that cannot be read, cannot be solved, or would not run on the cluster;
            with the fix.
    """
    spec, profile = EnvironmentSpec.load(spec_path), Profile.load(profile_path)
    path, solver = output or spec.lock_path, choose_solver(conda, os.environ)
    check_folder_of(path)
    before = EnvironmentLock.load(path) if path.exists() else None
    if spec.platforms and profile.platform not in spec.platforms:
        raise UsageError(
            f"{spec.place('platforms')}: {profile.platform}, the platform of {profile.path}, is "
            "not among them.",
            f"Add {profile.platform} to `platforms`, or take the list out.",
        )
    if spec.variables:
        reporter.warn(
            f"{spec.place('variables')}: `variables` do not travel: set them in the run file's "
            "slurm.setup"
        )
    _check_updates(updates, before, spec)
    if before is not None and not updates and answers(before, spec, profile):
        reporter.note(f"{path}: still matches {spec.path} and {profile.path}; unchanged")
        _check_fit(before.packages, profile, spec, reporter)
        return before, False
    lock = _resolve(spec, profile, before, path, updates, solver, reporter)
    _check_fit(lock.packages, profile, spec, reporter)
    text = lock.to_yaml()
    changed = not path.exists() or path.read_bytes() != text
    if changed and write:
        write_atomically(path, text)
    for line in _moved(before, lock) if before else ():
        reporter.note(line)
    counts = [human_count(len(lock.of(half)), f"{half} package") for half in ("conda", "pip")]
    done = "unchanged" if not changed else "written" if write else "would be written"
    reporter.note(f"{path}: {done}: {', '.join(counts)}")
    return lock, changed


def _check_updates(
    updates: Sequence[str], before: EnvironmentLock | None, spec: EnvironmentSpec
) -> None:
    if updates and before is None:
        raise UsageError(
            f"{spec.lock_path}: there is no lock yet, so nothing to update.",
            "Run it without --update: all is new.",
        )
    names = {p.name for p in before.packages} if before else set()
    for update in updates:
        if update not in names and canonicalize_name(update) not in names:
            raise UsageError(
                f"--update {update}: the lock has no such package.",
                suggest(update, sorted(names), "`--update` takes the name of a locked package."),
            )


def _resolve(
    spec: EnvironmentSpec,
    profile: Profile,
    before: EnvironmentLock | None,
    path: Path,
    updates: Sequence[str],
    solver: Solver,
    reporter: Reporter,
) -> EnvironmentLock:
    moving = {*updates, *(canonicalize_name(name) for name in updates)}
    earlier = before.packages if before and before.platform == profile.platform else ()
    kept = [p for p in earlier if p.name not in moving]
    own = own_requirements()
    indexes = choose_indexes(spec.pip, os.environ)
    conda_packages: list[Package] = []
    if profile.provides:
        there = provided_by_site(spec, profile)
    else:
        if before and answers(before, spec, profile):
            conda_packages = before.of("conda")
        if not conda_packages or moving & {p.name for p in conda_packages}:
            reporter.note(f"conda packages: solved by {solver[1]}")
            kept_conda = [p for p in kept if p.manager == "conda"]
            conda_packages = lock_conda(spec, profile, solver, kept_conda, reporter)
        addresses = {p.url: address_to_ask(p.url, spec, indexes) for p in conda_packages}
        there = provided_by_conda(conda_packages, addresses)
    if indexes.origin:
        reporter.note(f"pip packages: {indexes.origin}")
    request = PipRequest(
        spec=spec,
        profile=profile,
        own_requirements=own,
        python=_python(conda_packages, spec, profile, reporter),
        provided=tuple(there),
        indexes=indexes,
        constraints=_old_numpy(profile),
        kept={p.name: p.version for p in kept if p.manager == "pip"},
        say=reporter.note,
    )
    pip_packages = _with_torch_that_runs(request, conda_packages)
    if profile.provides:
        check_compiled(pip_packages, spec, profile)
    _report_origins(there, [*conda_packages, *pip_packages], reporter)
    return EnvironmentLock(
        platform=profile.platform,
        content_hash=content_hash(spec, profile, own),
        channels=tuple(without_secrets(channel) for channel in spec.channels),
        sources=(Path(os.path.relpath(spec.path, path.parent)).as_posix(),),
        packages=(*conda_packages, *pip_packages),
        provides=profile.provides,
    )


def _with_torch_that_runs(request: PipRequest, conda_packages: Sequence[Package]) -> list[Package]:
    """Resolves the pip half with the newest torch that runs on the cluster, if the spec pins none.

    If no such torch fits the rest, the result has one that does not run: `_check_fit` refuses it.
    """
    packages, profile = lock_pip(request), request.profile
    problem = _torch_problem([*conda_packages, *packages], profile)
    limit = torch_limit(profile, index_names(request.indexes))
    pinned = any(r.name == "torch" and r.is_pinned for r in request.spec.pip.requirements)
    if problem is None or limit is None or pinned:
        return packages
    constraint = f"torch<{limit}"
    try:
        fitting = lock_pip(replace(request, constraints=(constraint,)))
    except (UsageError, PolicyError):
        return packages
    versions = {p.name: p.version for p in fitting}
    if "torch" not in versions or _torch_problem([*conda_packages, *fitting], profile):
        return packages
    newest = next(p.version for p in packages if p.name == "torch")
    request.say(
        f"torch {versions['torch']}: the newest that runs on {profile.name} ({constraint}); not "
        f"{newest}: {problem} {what_fits(profile)}"
    )
    return fitting


def _torch_problem(packages: Iterable[Package], profile: Profile) -> str | None:
    """Why pip's torch would not run on the cluster; None: it runs, or nothing is known."""
    needs = Needs.of(packages, machine=profile.machine)
    if needs.torch_manager != "pip":
        return None
    return next((verdict.problem for verdict in verdicts(needs, profile) if verdict.refused), None)


def _old_numpy(profile: Profile) -> tuple[str, ...]:
    numpy = profile.provides.get("numpy")
    return OLDER_THAN_ITS_NUMPY if numpy and Version(numpy) < Version("2") else ()


def _python(
    packages: Iterable[Package], spec: EnvironmentSpec, profile: Profile, reporter: Reporter
) -> str:
    place, version = spec.place("dependencies"), profile.provides.get("python", "")
    if version:
        place = profile.lines.place("provides", "python")
    else:
        version = next(package.version for package in packages if package.name == "python")
    if numbers(version) < OLDEST_PYTHON:
        raise python_too_old(place, f"Python {version}")
    if packages and not any(dependency.name == "python" for dependency in spec.conda):
        reporter.note(f"python {version}: the newest that fits the rest: {spec.path} names none")
    return version


def _report_origins(
    there: Sequence[Provided], packages: Sequence[Package], reporter: Reporter
) -> None:
    sdists = [f"{p.name} {p.version}" for p in packages if p.is_sdist]
    if sdists:
        reporter.note(f"from source (`stage fetch` builds a wheel): {', '.join(sdists)}")
    here = [p.name for p in packages if p.url.startswith("file:")]
    if here:
        listed = join_limited(here, 5)
        reporter.note(f"from a folder of this machine, so this lock works only here: {listed}")
    for found in there:
        reporter.detail(found.origin)


def _check_fit(
    packages: Iterable[Package], profile: Profile, spec: EnvironmentSpec, reporter: Reporter
) -> None:
    """Checks that the packages run on the cluster; prints the notes.

    Raises:
        UsageError: they do not; with versions that do.
    """
    found = verdicts(Needs.of(packages, machine=profile.machine), profile)
    refused = [verdict for verdict in found if verdict.refused]
    if refused:
        problems = " ".join(verdict.problem for verdict in refused)
        place = next((r.place for r in spec.pip.requirements if r.name == "torch"), spec.place())
        raise UsageError(
            f"{place}: would not run on {profile.name} ({profile.path}): {problems}",
            " ".join(dict.fromkeys(verdict.remedy for verdict in refused if verdict.remedy)),
        )
    for verdict in found:
        reporter.note(f"{verdict.problem} {verdict.remedy}".strip())


def _moved(before: EnvironmentLock, after: EnvironmentLock) -> list[str]:
    old, new = ({(p.name, p.manager): p.version for p in lock.packages} for lock in (before, after))
    return [
        f"{key[0]} {f'{old[key]} -> ' if key in old else ''}{new.get(key, '(gone)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


FOR_ONE_TORCH = (
    "torchvision", "torchaudio", "torchtext", "torchcodec", "torch-npu", "xformers", "vllm",
    "flash-attn", "torch-scatter", "torch-sparse", "torch-cluster", "torch-spline-conv", "pyg-lib",
    "mamba-ssm", "causal-conv1d", "intel-extension-for-pytorch", "transformer-engine-torch",
)  # fmt: skip
"""Compiled against one torch: what an index has does not go with a torch that a site built."""

OLDER_THAN_ITS_NUMPY = ("pyarrow<26",)
"""For a numpy below 2. pyarrow 26 declares nothing, and refuses that numpy when it is imported."""

_PRINT_AGAIN = "print the profile again (sh env-probe.sh)."


def provided_by_site(spec: EnvironmentSpec, profile: Profile) -> list[Provided]:
    """The site's distributions, for the solver.

    Raises:
        UsageError: a conda package; requirements that the site's versions do not meet.
    """
    mistakes = Mistakes()
    for dependency in spec.conda:
        with mistakes:
            if dependency.name == "python":
                asked = _as_specifier(dependency.text)
                _check(profile, "python", asked, dependency.text, dependency.place)
            elif dependency.name != "pip":
                raise UsageError(
                    f"{dependency.place}: `{dependency.name}` is a conda package; on the site's "
                    "Python there are pip packages only.",
                    "Take it out: the site's modules bring it.",
                )
    for requirement in (*spec.pip.requirements, *spec.pip.constraints):
        with mistakes:
            if requirement.name in profile.provides:
                specifier = Requirement(requirement.text).specifier
                _check(profile, requirement.name, specifier, requirement.text, requirement.place)
    mistakes.check(str(spec.path))
    return [
        Provided(name, version, place=profile.lines.place("provides", name))
        for name, version in sorted(profile.provides.items())
        if name != "python"
    ]


def _as_specifier(text: str) -> SpecifierSet | None:
    """conda's `python=3.11` as pip writes it; of a full version, X.Y counts. None: it cannot be."""
    asked = re.sub(r"^(\S+::)?python", "", text).replace(" ", "")
    pinned = re.fullmatch(r"=*(\d+\.\d+)[.\d*]*(=.*)?", asked)
    try:
        return SpecifierSet(f"=={pinned[1]}.*" if pinned else asked)
    except InvalidSpecifier:
        return None


def _check(
    profile: Profile, name: str, asked: SpecifierSet | None, text: str, place: Place
) -> None:
    version = profile.provides[name]
    if asked is not None and asked.contains(version, prereleases=True):
        return
    site = f"{name} {version} ({profile.lines.place('provides', name)})"
    base = Version(version).base_version
    if asked is not None and asked.contains(base):
        raise UsageError(
            f"{place}: `{text}`, and the site has {site}, which comes before {base} by PEP 440.",
            f"Write {name}>={Version(version).public}.",
        )
    again = f"load a module with another {name} and {_PRINT_AGAIN}"
    raise UsageError(f"{place}: `{text}`, and the site has {site}.", f"Loosen it, or {again}")


def check_compiled(packages: list[Package], spec: EnvironmentSpec, profile: Profile) -> None:
    """Refuses what an index has compiled for its own torch; an address of a wheel is the user's.

    Raises:
        UsageError: there is some.
    """
    asked = {requirement.name: requirement for requirement in spec.pip.requirements}
    for package in packages:
        requirement = asked.get(package.name)
        if package.name in FOR_ONE_TORCH and not (requirement and "@" in requirement.text):
            raise UsageError(
                f"{requirement.place if requirement else spec.path}: `{package.name}` "
                f"{package.version} is compiled for PyPI's torch, not for the site's "
                f"{profile.provides['torch']} ({profile.lines.place('provides', 'torch')}).",
                f"Take it out, or load the module that has it and {_PRINT_AGAIN} A wheel that was "
                f"built for that torch: {package.name} @ ADDRESS",
            )


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
