"""The conda half of a lock: match specs and a profile -> locked conda packages with sha256.

conda-lock does it, with the user's conda, or with py-rattler where there is none. It runs in a
temporary folder, on a file with the conda half only. It gets an executable, so it downloads none.

The Python distributions inside conda packages are found too: pip must not install them a second
time. There is no table of names: each package lists its files, and a distribution has a
`NAME-VERSION.dist-info` (or `.egg-info`) among them. So conda's `pytorch` is found to be pip's
`torch`. Only that list is read from a remote package (range requests).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

from stage.environment.solve.advice import conda_conflict, is_network_problem
from stage.environment.spec.conda_lock import EnvironmentLock, Package
from stage.environment.spec.environment_yml import CondaDependency, EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.errors import (
    IncompleteError,
    Place,
    PolicyError,
    StageError,
    UsageError,
    without_secrets,
)
from stage.files import hash_file
from stage.progress import Reporter
from stage.sandbox import ask_child, isolated, last_words

EXECUTABLES = ("micromamba", "mamba", "conda")
_RATTLER = "stage.environment.solve.rattler"  # only in a child process: see `run_and_exit`
OLDEST_PYTHON = (3, 10)
"""airlift itself is in every environment."""

Solver = tuple[Path | None, str]
"""A conda, mamba or micromamba, or None for py-rattler; and the reason for the choice."""


def choose_solver(asked: str | None, environment: Mapping[str, str]) -> Solver:
    """Chooses `--conda`, else the conda of the user's shell, else one on the PATH, else py-rattler.

    Raises:
        UsageError: `--conda` names nothing that can be run.
    """
    path = environment.get("PATH", "")
    if asked is not None:
        found = shutil.which(asked, path=path)
        if found is None:
            raise UsageError(f"--conda {asked}: no such program.", "Give its path, or omit it.")
        return Path(found).absolute(), f"{found}, as --conda says"
    for variable in ("MAMBA_EXE", "CONDA_EXE"):
        if (named := environment.get(variable)) and os.access(named, os.X_OK):
            return Path(named).absolute(), f"{named}, as ${variable} says"
    for name in EXECUTABLES:
        if found := shutil.which(name, path=path):
            return Path(found).absolute(), f"{found}, on your PATH"
    *names, last = EXECUTABLES
    return None, f"py-rattler: there is no {', '.join(names)} or {last} here"


def lock_conda(
    spec: EnvironmentSpec,
    profile: Profile,
    solver: Solver,
    kept: Iterable[Package],
    reporter: Reporter,
) -> list[Package]:
    """Solves the conda half, with all kept packages pinned; if there is no solution, with none.

    conda, mamba and micromamba know no soft preference. conda-lock accepts one requirement per
    name, so a pin replaces the requirement of the spec that it satisfies.

    Args:
        kept: packages of an earlier lock, kept where that is possible.

    Raises:
        UsageError: no channels; a Python that is too old; two requirements on one package that
            cannot be joined; no solution, with the solver's message.
        IncompleteError: a channel cannot be reached.
    """
    if not spec.channels:
        raise UsageError(
            f"{spec.place('channels')}: no channels.",
            "For example channels: [conda-forge]. For a site's own torch, the profile has to say "
            "what it provides: run env-probe.sh with the site's module loaded.",
        )
    asked = _asked(spec)
    if "python" in asked:
        _check_python(asked["python"], spec)
    asked.setdefault("pip", "pip")  # `conda-lock install` needs it for the other half
    if kept := _answering(asked, list(kept)):
        pins = {
            package.name: f"{package.name}={package.version}={package.build}" for package in kept
        }
        try:
            return _reachable(_solve(spec, profile, solver, {**asked, **pins}), asked)
        except UsageError:
            reporter.note(
                f"{spec.path}: the locked versions conflict now: the conda packages are solved "
                "again"
            )
    return _solve(spec, profile, solver, asked)


def python_too_old(place: Place, what: str) -> UsageError:
    """The error for an environment whose Python is older than airlift's oldest."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return UsageError(
        f"{place}: {what}: airlift, which is in every environment, needs {oldest}.",
        f"Ask for python={oldest} or newer.",
    )


def _asked(spec: EnvironmentSpec) -> dict[str, str]:
    """Name -> requirement; of several on one package, which conda holds together, one is made.

    Raises:
        UsageError: one is not a requirement, or some on one package cannot be held together.
    """
    found: dict[str, list[CondaDependency]] = {}
    for dependency in spec.conda:
        found.setdefault(dependency.name, []).append(dependency)
    answers = _ask("join", [[one.text for one in listed] for listed in found.values()])
    for listed, (_, problem) in zip(found.values(), answers, strict=True):
        if problem:
            written = " and ".join(f"`{one.text}`" for one in listed)
            raise UsageError(
                f"{listed[-1].place}: {written}: {problem}.",
                "Keep one of them." if len(listed) > 1 else "Write name, name=1.2 or name>=1,<2.",
            )
    return {
        name: joined if len(listed) > 1 else listed[0].text
        for (name, listed), (joined, _) in zip(found.items(), answers, strict=True)
    }


def _check_python(wanted: str, spec: EnvironmentSpec) -> None:
    """Refuses a requirement that only Pythons older than airlift's oldest meet.

    Raises:
        UsageError: it is one.
    """
    # A version of Python that may exist one day: conda's specs are matched, not taken apart.
    versions = [(minor, patch) for minor in range(OLDEST_PYTHON[1] + 20) for patch in range(30)]
    questions = [[wanted, "python", f"3.{minor}.{patch}", "0"] for minor, patch in versions]
    fitting = [v for v, fits in zip(versions, _ask("matches", questions), strict=True) if fits]
    if fitting and fitting[-1] < (OLDEST_PYTHON[1], 0):
        place = next(d.place for d in spec.conda if d.name == "python")
        raise python_too_old(place, f"`{wanted}`")


def _ask(what: str, questions: list[list[str]]) -> list[Any]:
    """The answers of `rattler`, in a child process."""
    answers, done = ask_child(_RATTLER, json.dumps(questions), what)
    if not isinstance(answers, list):
        raise IncompleteError(
            f"py-rattler could not read the conda packages: {last_words(done)}",
            "Run the same command again.",
        )
    return answers


def _answering(asked: Mapping[str, str], kept: list[Package]) -> list[Package]:
    """The locked packages that still satisfy the spec's requirement on them, or have none."""
    pairs = [[asked[p.name], p.name, p.version, p.build] for p in kept if p.name in asked]
    if not pairs:
        return kept
    matches = dict(zip((name for _, name, _, _ in pairs), _ask("matches", pairs), strict=True))
    return [p for p in kept if matches.get(p.name, True)]


def _reachable(packages: list[Package], roots: Iterable[str]) -> list[Package]:
    """Drops the packages that were there only because they were pinned."""
    by_name = {p.name: p for p in packages}
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in found:
            found.add(name)
            waiting += by_name[name].dependencies
    return [p for p in packages if p.name in found]


def _solve(
    spec: EnvironmentSpec, profile: Profile, solver: Solver, asked: Mapping[str, str]
) -> list[Package]:
    with tempfile.TemporaryDirectory(prefix="airlift-lock-") as name:
        folder = Path(name)
        source, virtual = folder / "environment.yml", folder / "virtual.yml"
        lock = folder / "lock.yml"
        half = {"channels": list(spec.channels), "dependencies": list(asked.values())}
        source.write_text(yaml.safe_dump(half))
        source.chmod(0o600)
        subdirs = {profile.platform: {"packages": profile.virtual_packages()}}
        virtual.write_text(yaml.safe_dump({"subdirs": subdirs}))
        executable = solver[0] or write_lookalike(folder)
        command = isolated("conda_lock", "lock", "--conda", str(executable), "--file", str(source))
        command += ["--platform", profile.platform, "--lockfile", str(lock)]
        command += ["--virtual-package-spec", str(virtual)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not lock.exists():
            raise _failure(done.stdout + done.stderr, spec, profile)
        document = yaml.safe_load(lock.read_text(encoding="utf-8"))
    for entry in document["package"]:
        entry["url"] = url = without_secrets(entry["url"])
        if url.startswith("file:") and not entry["hash"].get("sha256"):
            entry["hash"]["sha256"] = hash_file(Path(unquote(urlsplit(url).path))).sha256
    text = yaml.safe_dump(document).encode()
    try:
        return EnvironmentLock.parse(text, str(spec.path), profile.platform).of("conda")
    except PolicyError as error:  # most often: without a sha256
        raise UsageError(
            error.message,
            "Index that channel again with a current tool (rattler-index, conda-index), or take "
            "another channel.",
        ) from None


def write_lookalike(folder: Path) -> Path:
    """Writes the program that conda-lock uses as conda; it runs py-rattler in this Python."""
    program = folder / "conda"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(isolated(_RATTLER))} "$@"\n')
    program.chmod(0o755)
    return program


def _failure(said: str, spec: EnvironmentSpec, profile: Profile) -> StageError:
    """conda-lock's output -> an error with the solver's message, which is in the middle of it."""
    match = re.search(
        r"Could not lock the environment for platform [^\n]*\n(.*?)(?:\n    Command:|\Z)",
        said,
        re.DOTALL,
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


@dataclass(frozen=True)
class Provided:
    """A Python distribution inside a conda package, or of the site's own Python.

    Attributes:
        name: normalised (PEP 503).
        conda: the package's name; empty: it is the site's.
        url: the address to ask for the package, perhaps with a token: kept out of `repr`.
        metadata: path of its METADATA inside the package.
        place: file:line of the profile that names it.
    """

    name: str
    version: str
    conda: str = ""
    url: str = field(default="", repr=False)
    metadata: str = ""
    place: Place | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, in a sentence."""
        if self.conda:
            return f"{self.name} {self.version} (`{self.conda}`) comes from conda."
        found = Version(self.version)
        early = f" By PEP 440 it comes before {found.base_version}." if found.is_prerelease else ""
        return f"{self.name} {self.version} is the site's ({self.place}).{early}"


def provided_by_conda(packages: Iterable[Package], addresses: Mapping[str, str]) -> list[Provided]:
    """The Python distributions in those conda packages that need Python, sorted by name.

    Args:
        addresses: locked URL -> URL to fetch from, where the two differ (see `indexes`).

    Raises:
        IncompleteError: a package cannot be reached.
    """
    wanted = {p.sha256: p for p in packages if {"python", "python_abi"} & p.dependencies.keys()}
    urls = [addresses.get(p.url, p.url) for p in wanted.values()]
    found = [
        Provided(canonicalize_name(name), version, package.name, url, path)
        for package, url, inside in zip(wanted.values(), urls, _contents(urls), strict=True)
        for path, name, version in inside["distributions"]
    ]
    return sorted(found, key=lambda d: d.name)


def metadata_of(distribution: Provided) -> str:
    """The METADATA of a distribution in a conda package; streams the package up to that file.

    Empty for one of the site.

    Raises:
        IncompleteError: the package cannot be reached.
    """
    if not distribution.conda:
        return ""
    (inside,) = _contents([distribution.url], distribution.metadata)
    return str(inside["texts"].get(distribution.metadata) or "")


def _contents(urls: list[str], *read: str) -> list[Any]:
    """The distributions in each package, and the texts of the files to read."""
    answers = _ask("contents", [[url, *read] for url in urls]) if urls else []
    for url, answer in zip(urls, answers, strict=True):
        if problem := answer.get("problem"):
            raise IncompleteError(
                f"{without_secrets(url)}: its list of files cannot be read: {problem}.",
                "Run the same command again.",
            )
    return answers
