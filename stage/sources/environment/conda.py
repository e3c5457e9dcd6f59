"""The conda half of a lock: conda-lock, with the user's own conda behind it, or py-rattler where there is none.

Match specs and a profile -> locked conda packages with sha256. conda-lock runs in a folder of its own, on a file that
has the conda half alone; it never gets to look for an executable on the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

from stage.environment.addresses import without_secrets
from stage.environment.conflicts import conda_conflict, is_network_problem
from stage.environment.lockfile import LockedPackage
from stage.environment.profile import Profile
from stage.environment.spec import EnvironmentSpec
from stage.errors import IncompleteError, StageError, UsageError
from stage.progress import Reporter
from stage.sources.environment import lookalike

EXECUTABLES = ("micromamba", "mamba", "conda")
_EXTRA = "pip install 'airlift[env]'"


@dataclass(frozen=True)
class Solver:
    """Who solves the conda half.

    Attributes:
        executable: a conda, mamba or micromamba; None: py-rattler.
        reason: why this one, for the user.
    """

    executable: Path | None
    reason: str


def choose_solver(asked: str | None, environment: Mapping[str, str]) -> Solver:
    """The user's `--conda`, else the conda their shell is set up for, else one on the PATH, else py-rattler.

    Raises:
        UsageError: `--conda` names nothing that can be run.
    """
    path = environment.get("PATH", "")
    if asked is not None:
        found = shutil.which(asked, path=path)
        if found is None:
            raise UsageError(f"--conda {asked}: no such program.", "Give its path, or leave the option out.")
        return Solver(Path(found).absolute(), f"{found}, as --conda says")
    for variable in ("MAMBA_EXE", "CONDA_EXE"):
        if (named := environment.get(variable)) and os.access(named, os.X_OK):
            return Solver(Path(named).absolute(), f"{named}, as ${variable} says")
    for name in EXECUTABLES:
        if found := shutil.which(name, path=path):
            return Solver(Path(found).absolute(), f"{found}, on your PATH")
    return Solver(None, f"py-rattler: there is no {', '.join(EXECUTABLES[:-1])} or {EXECUTABLES[-1]} here")


def lock_conda(
    spec: EnvironmentSpec, profile: Profile, solver: Solver, kept: Iterable[LockedPackage], reporter: Reporter
) -> list[LockedPackage]:
    """Solves the conda half.

    Args:
        kept: packages of an earlier lock, to stay as they are where that is possible.

    Raises:
        UsageError: no solution, with the conflict in words; or conda-lock is not installed.
        IncompleteError: a channel cannot be reached.
    """
    _require_tools()
    kept = list(kept)
    dependencies = _with_pip(spec)
    if solver.executable is None:
        packages = _solve(spec, profile, None, dependencies, kept)
    elif not kept:
        packages = _solve(spec, profile, solver.executable, dependencies, [])
    else:
        packages = _solve_pinned(spec, profile, solver.executable, kept, reporter)
    return [with_sha256(package, spec) for package in packages]


def _with_pip(spec: EnvironmentSpec) -> list[str]:
    """The conda half, with pip, as conda-lock itself has it: `conda-lock install` needs it for the other half."""
    return [d.text for d in spec.conda] + ([] if any(d.name == "pip" for d in spec.conda) else ["pip"])


def _require_tools() -> None:
    for module, name in (("conda_lock", "conda-lock"), ("rattler", "py-rattler")):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"{name} is not installed here, and locking an environment needs it.", _EXTRA)


def _solve_pinned(
    spec: EnvironmentSpec, profile: Profile, executable: Path, kept: list[LockedPackage], reporter: Reporter
) -> list[LockedPackage]:
    """conda and its kin know no soft preference: everything kept is pinned, and if that does not go, nothing is.

    conda-lock takes one requirement a name, so a pin stands in place of the spec's own, where it answers that.
    """
    asked = {dependency.name: dependency.text for dependency in spec.conda}
    kept = _answering(asked, kept)
    pins = [f"{p.name}={p.version}={_build(p)}" for p in kept]
    pinned = {p.name for p in kept}
    dependencies = [d.text for d in spec.conda if d.name not in pinned]
    try:
        packages = _solve(spec, profile, executable, [*dependencies, *pins], [])
    except UsageError:
        reporter.note(f"{spec.path}: what was locked cannot all stay: the conda packages are solved anew")
        return _solve(spec, profile, executable, _with_pip(spec), [])
    return _reachable(packages, [dependency.name for dependency in spec.conda] + ["pip"])


def _answering(asked: Mapping[str, str], kept: list[LockedPackage]) -> list[LockedPackage]:
    """Those locked packages that still answer what the spec says of them, if it says anything."""
    said = [[asked[p.name], p.name, p.version, _build(p)] for p in kept if p.name in asked]
    command = [sys.executable, "-m", lookalike.__name__, "matches"]
    done = subprocess.run(command, input=json.dumps(said), capture_output=True, text=True, check=True)
    answers = dict(zip((name for _, name, _, _ in said), json.loads(done.stdout), strict=True))
    return [p for p in kept if answers.get(p.name, True)]


def _reachable(packages: list[LockedPackage], roots: Iterable[str]) -> list[LockedPackage]:
    """Without what was there only because it was pinned."""
    by_name = {p.name: p for p in packages}
    found: set[str] = set()
    waiting = [name for name in roots if name in by_name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [d for d in by_name[name].dependencies if d in by_name]
    return [p for p in packages if p.name in found]


def _build(package: LockedPackage) -> str:
    return package.file_name.removesuffix(".conda").removesuffix(".tar.bz2").rpartition("-")[2]


def _solve(
    spec: EnvironmentSpec, profile: Profile, executable: Path | None, dependencies: list[str], kept: list[LockedPackage]
) -> list[LockedPackage]:
    with tempfile.TemporaryDirectory(prefix="airlift-lock-") as name:
        folder = Path(name)
        environment = {**os.environ}
        if executable is None:
            executable = write_lookalike(folder)
            locked = folder / "locked.json"
            locked.write_text(json.dumps([p.url for p in kept]))
            environment[lookalike.LOCKED] = str(locked)
        source, virtual, lock = folder / "environment.yml", folder / "virtual.yml", folder / "lock.yml"
        source.write_text(yaml.safe_dump({"channels": list(spec.channels), "dependencies": dependencies}))
        source.chmod(0o600)
        virtual.write_text(yaml.safe_dump({"subdirs": {profile.platform: {"packages": profile.virtual_packages()}}}))
        command = [sys.executable, "-m", "conda_lock", "lock", "--conda", str(executable), "--file", str(source)]
        command += ["--platform", profile.platform, "--virtual-package-spec", str(virtual), "--lockfile", str(lock)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not lock.exists():
            raise _failure(done.stdout + done.stderr, spec, profile)
        return _read(lock)


def write_lookalike(folder: Path) -> Path:
    """Writes the program that conda-lock may take for conda; it runs py-rattler in this very Python."""
    program = folder / "conda"
    python, module = shlex.quote(sys.executable), lookalike.__name__
    program.write_text(f'#!/bin/sh\nexec {python} -m {module} "$@"\n')
    program.chmod(0o755)
    return program


def _read(path: Path) -> list[LockedPackage]:
    """conda-lock's own file; here a package may still be without a sha256."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["package"]
    packages = [
        LockedPackage(
            name=entry["name"],
            version=str(entry["version"]),
            manager="conda",
            platform=entry["platform"],
            url=entry["url"],
            sha256=entry["hash"].get("sha256") or "",
            md5=entry["hash"].get("md5"),
            dependencies=entry.get("dependencies") or {},
        )
        for entry in entries
        if entry["manager"] == "conda"
    ]
    return sorted(packages, key=lambda p: p.name)


def with_sha256(package: LockedPackage, spec: EnvironmentSpec) -> LockedPackage:
    """A solved package with its sha256, and without secrets in its address.

    Raises:
        UsageError: its channel publishes none, and it does not lie on this machine.
    """
    sha256 = package.sha256
    parts = urlsplit(package.url)
    if not sha256 and parts.scheme == "file":
        sha256 = hashlib.sha256(Path(unquote(parts.path)).read_bytes()).hexdigest()
    if not sha256:
        raise UsageError(
            f"{spec.path}: {package.name} {package.version}: {without_secrets(package.url)} is published without a "
            "sha256, and md5 alone proves nothing.",
            "Index that channel again with a tool of this decade (rattler-index, conda-index), or take another.",
        )
    return LockedPackage(
        name=package.name,
        version=package.version,
        manager="conda",
        platform=package.platform,
        url=without_secrets(package.url),
        sha256=sha256,
        md5=package.md5,
        dependencies=package.dependencies,
    )


def _failure(said: str, spec: EnvironmentSpec, profile: Profile) -> StageError:
    """conda-lock's output -> words. It prints what the solver said between two lines of its own."""
    match = re.search(
        r"Could not lock the environment for platform [^\n]*\n(.*?)(?:\n    Command:|\Z)", said, re.DOTALL
    )
    message = (match[1] if match else said).strip()
    for channel in spec.channels:
        message = message.replace(channel, without_secrets(channel))
    if is_network_problem(message):
        return IncompleteError(
            f"{spec.path}: a conda channel cannot be reached: {' '.join(message.split())[:400]}",
            "Check the network and `channels:`, then run the same command again.",
        )
    return conda_conflict(message, spec, profile)
