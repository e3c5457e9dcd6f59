"""`environment.yml` and a profile -> `conda-lock.yml`: the whole road, one step after the other.

A lock that still answers its spec and profile is left as it is, byte for byte. Else both halves are solved, keeping of
an older lock what can stay, and what would not run on the cluster is refused before anything is written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stage.disk import human_count, require_folder_of, write_atomically
from stage.environment.addresses import without_secrets
from stage.environment.fit import verdicts
from stage.environment.lockfile import OURS, EnvironmentLock, LockedPackage, made_by_stage
from stage.environment.needs import Needs
from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec, content_hash
from stage.errors import UsageError
from stage.progress import Reporter
from stage.sources.environment.conda import Solver, choose_solver, lock_conda
from stage.sources.environment.contents import Provided, provided
from stage.sources.environment.indexes import choose_indexes
from stage.sources.environment.pip import lock_pip
from stage.sources.environment.private import address_to_ask
from stage.sources.environment.uv import PipRequest

OLDEST_PYTHON = (3, 10)
"""airlift itself is in every environment."""


@dataclass(frozen=True)
class LockOutcome:
    """A lock, where it lies, and whether this run changed it.

    Attributes:
        moved: `name old -> new`, `name new` and `name old -> (gone)`, against the lock that was there.
        notes: what is to be known about the environment on that cluster, in sentences.
    """

    path: Path
    lock: EnvironmentLock
    changed: bool
    moved: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "lock": str(self.path),
            "changed": self.changed,
            "content_hash": self.lock.content_hash,
            "platform": self.lock.platform,
            "conda": len(self.lock.of("conda")),
            "pip": len(self.lock.of("pip")),
            "sdists": [f"{p.name}=={p.version}" for p in self.lock.of("pip") if p.is_sdist],
            "moved": list(self.moved),
            "notes": list(self.notes),
        }


def own_requirements() -> tuple[str, ...]:
    """What airlift itself needs, as its metadata says; sorted.

    Raises:
        UsageError: this airlift is not installed, so nobody can tell.
    """
    try:
        stated = requires("airlift") or []
    except PackageNotFoundError:
        raise UsageError("This airlift is not installed as a package.", "pip install -e . in its folder.") from None
    return tuple(sorted(r for r in stated if "extra" not in str(Requirement(r).marker or "")))


def answers(lock: EnvironmentLock, spec: EnvironmentSpec, profile: Profile) -> bool:
    """Whether a lock was made of this spec and profile as they are now."""
    return lock.content_hash == content_hash(spec, profile, own_requirements()) and lock.platform == profile.platform


def is_stale(lock_path: Path, spec_path: Path, profile_path: Path) -> bool:
    """Whether `environment.yml`, the profile or airlift's own requirements changed since `stage env lock` was run.

    Of a lock that another tool made nobody can tell: it is taken as it is.

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
) -> LockOutcome:
    """Makes the lock, or finds that the one there still answers.

    Args:
        output: where the lock goes; None: beside the spec.
        updates: names of packages that may move to newer versions.
        conda: a conda, mamba or micromamba to solve with; None: chosen, with its reason told.
        write: else the lock is only made, and what it would change is told.

    Raises:
        StageError: a spec that cannot be read, cannot be solved, or would not run on the cluster; with the fix.
    """
    spec, profile = EnvironmentSpec.load(spec_path), Profile.load(profile_path)
    path, solver = output or spec.lock_path, choose_solver(conda, os.environ)
    require_folder_of(path)
    before = EnvironmentLock.load(path) if path.exists() else None
    if spec.platforms and profile.platform not in spec.platforms:
        raise UsageError(
            f"{spec.place('platforms')}: {profile.platform}, which {profile.path} is for, is not among them.",
            f"Add {profile.platform} to `platforms`, or take the list out.",
        )
    if spec.variables:
        reporter.warn(f"{spec.place('variables')}: `variables` do not travel: set them in the run file's slurm.setup")
    _check_updates(updates, before, spec)
    if before is not None and not updates and answers(before, spec, profile):
        reporter.note(f"{path}: still answers {spec.path} and {profile.path}; left as it is")
        return LockOutcome(path, before, changed=False, notes=_check_fit(before.packages, profile, spec, reporter))
    lock = _resolve(spec, profile, before, path, updates, solver, reporter)
    notes = _check_fit(lock.packages, profile, spec, reporter)
    text = lock.to_yaml()
    changed = not path.exists() or path.read_bytes() != text
    if changed and write:
        write_atomically(path, text)
    moved = _moved(before, lock) if before else ()
    for line in moved:
        reporter.note(line)
    counts = f"{human_count(len(lock.of('conda')), 'conda package')}, {human_count(len(lock.of('pip')), 'pip package')}"
    done = "unchanged" if not changed else "written" if write else "would be written"
    reporter.note(f"{path}: {done}: {counts}")
    return LockOutcome(path, lock, changed, moved, notes)


def _check_updates(updates: Sequence[str], before: EnvironmentLock | None, spec: EnvironmentSpec) -> None:
    if updates and before is None:
        raise UsageError(
            f"{spec.lock_path}: there is no lock yet, so nothing to update.", "Run it without --update: all is new."
        )
    names = {p.name for p in before.packages} if before else set()
    for update in updates:
        if update not in names and canonicalize_name(update) not in names:
            nearest = difflib.get_close_matches(update, sorted(names), n=1)
            hint = f"Did you mean `{nearest[0]}`?" if nearest else "`--update` takes the name of a locked package."
            raise UsageError(f"--update {update}: the lock has no such package.", hint)


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
    conda_packages = before.of("conda") if before and answers(before, spec, profile) else []
    if not conda_packages or moving & {p.name for p in conda_packages}:
        reporter.note(f"conda packages: solved by {solver.reason}")
        conda_packages = lock_conda(spec, profile, solver, [p for p in kept if p.manager == "conda"], reporter)
    indexes = choose_indexes(spec.pip, os.environ)
    addresses = {p.url: address_to_ask(p.url, spec, indexes) for p in conda_packages}
    in_conda = provided(conda_packages, addresses)
    if indexes.origin:
        reporter.note(f"pip packages: {indexes.origin}")
    request = PipRequest(
        spec=spec,
        profile=profile,
        own_requirements=own,
        python=_python(conda_packages, spec, reporter),
        provided=tuple(in_conda),
        indexes=indexes,
        kept={p.name: p.version for p in kept if p.manager == "pip"},
        addresses=addresses,
    )
    pip_packages = lock_pip(request)
    _tell(in_conda, [*conda_packages, *pip_packages], reporter)
    return EnvironmentLock(
        platform=profile.platform,
        content_hash=content_hash(spec, profile, own),
        channels=tuple(without_secrets(channel) for channel in spec.channels),
        sources=(Path(os.path.relpath(spec.path, path.parent)).as_posix(),),
        packages=(*conda_packages, *pip_packages),
        notes=dict([OURS]),
    )


def _python(packages: Iterable[LockedPackage], spec: EnvironmentSpec, reporter: Reporter) -> str:
    version = next((p.version for p in packages if p.name == "python"), None)
    if version is None:
        raise UsageError(f"{spec.place('dependencies')}: no Python in it.", "Add python=3.11 to `dependencies`.")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise UsageError(
            f"{spec.place('dependencies')}: Python {version}: airlift, which is in every environment, needs {oldest}.",
            f"Ask for python={oldest} or newer.",
        )
    if not any(dependency.name == "python" for dependency in spec.conda):
        reporter.note(f"python {version}: the newest that the rest takes, as {spec.path} names none")
    return version


def _tell(in_conda: Sequence[Provided], packages: Sequence[LockedPackage], reporter: Reporter) -> None:
    sdists = [f"{p.name} {p.version}" for p in packages if p.is_sdist]
    if sdists:
        reporter.note(f"from source, a wheel of which `stage fetch` builds: {', '.join(sdists)}")
    here = [p.name for p in packages if p.url.startswith("file:")]
    if here:
        listed = ", ".join(here[:5]) + (f" and {len(here) - 5} more" if len(here) > 5 else "")
        reporter.note(f"from a folder of this machine, so that this lock is good here alone: {listed}")
    for distribution in in_conda:
        reporter.detail(f"{distribution.name} {distribution.version}: from conda ({distribution.conda})")


def _check_fit(
    packages: Iterable[LockedPackage], profile: Profile, spec: EnvironmentSpec, reporter: Reporter
) -> tuple[str, ...]:
    """Refuses what would not run on the cluster; returns the notes.

    Raises:
        UsageError: with what would fit.
    """
    packages = list(packages)
    depends = [f"{name} {wanted}" for p in packages for name, wanted in p.dependencies.items() if name == "__glibc"]
    found = verdicts(Needs.of(packages, machine=profile.machine, conda_depends=depends), profile)
    refused = [verdict for verdict in found if verdict.refused]
    if refused:
        problems = " ".join(verdict.problem for verdict in refused)
        place = next((r.place for r in spec.pip.requirements if r.name == "torch"), str(spec.path))
        raise UsageError(
            f"{place}: would not run on {profile.name} ({profile.path}): {problems}",
            " ".join(dict.fromkeys(verdict.remedy for verdict in refused if verdict.remedy)),
        )
    notes = tuple(f"{verdict.problem} {verdict.remedy}".strip() for verdict in found)
    for note in notes:
        reporter.note(note)
    return notes


def _moved(before: EnvironmentLock, after: EnvironmentLock) -> tuple[str, ...]:
    old = {(p.manager, p.name): p.version for p in before.packages}
    new = {(p.manager, p.name): p.version for p in after.packages}
    lines = []
    for key in sorted(old.keys() | new.keys(), key=lambda k: (k[1], k[0])):
        if old.get(key) != new.get(key):
            was = f"{old[key]} -> " if key in old else ""
            lines.append(f"{key[1]} {was}{new.get(key, '(gone)')}")
    return tuple(lines)
