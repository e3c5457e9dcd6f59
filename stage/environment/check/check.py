"""Whether an environment runs on a cluster: what its packages need, and what a `Profile` has. Pure.

`Needs.of(packages)` come from the packages: wheel tags name the glibc (PEP 600: manylinux_2_28
needs 2.28 or newer), the CUDA runtime among the packages the CUDA, and the version of torch the
GPUs. `env.json` records them. They are compared with a profile when the lock is made, and with the
real node by `stage env check`. A refusal names versions that fit. Something that is not known is a
note, never a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, parse_wheel_filename

from stage.environment.check.torch_builds import (
    architectures_of,
    cuda_in,
    is_without_cuda,
    newest_toolkit,
    numbers,
    runs_on,
    toolkit_dropped,
    what_fits,
)
from stage.environment.spec.conda_lock import Package
from stage.environment.spec.profile import Profile

_OLDEST_MINOR = 5  # manylinux1
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def tag_ranks(python: str, machine: str, glibc: str) -> dict[Tag, int]:
    """Each tag that fits -> its rank, 0 the best.

    Args:
        python: "3.11" or "3.11.7", CPython.
        machine: "x86_64" or "aarch64".
        glibc: "2.28".
    """
    major, minor = (int(part) for part in python.split(".")[:2])
    platforms = list(_platforms(machine, glibc))
    name = f"cp{major}{minor}"
    tags = [
        *cpython_tags((major, minor), abis=[name], platforms=platforms),
        *compatible_tags((major, minor), name, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _platforms(machine: str, glibc: str) -> Iterable[str]:
    major, newest = (int(part) for part in glibc.split("."))
    for minor in range(newest, _OLDEST_MINOR - 1, -1):
        yield f"manylinux_{major}_{minor}_{machine}"
        if minor in _LEGACY:
            yield f"{_LEGACY[minor]}_{machine}"
    yield f"linux_{machine}"


def best_wheel(file_names: Iterable[str], fitting: Mapping[Tag, int]) -> str | None:
    """The best of the wheels; None if none fits.

    Of equal ranks the higher build tag wins, and any against none: it is a later build (PEP 427).
    """
    rated: list[tuple[tuple[int, BuildTag], str]] = []
    for file_name in file_names:
        try:
            _, _, build, tags = parse_wheel_filename(file_name)
        except InvalidWheelFilename:
            continue
        if found := [fitting[tag] for tag in tags if tag in fitting]:
            rated.append(((-min(found), build), file_name))
    if not rated:
        return None
    top = max(rating for rating, _ in rated)
    return min(file_name for rating, file_name in rated if rating == top)


def glibc_needed(file_name: str, machine: str) -> str | None:
    """The oldest glibc that a wheel states for a machine; "": it needs none; None: it is not said.

    >>> glibc_needed("torch-2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl", "x86_64")
    '2.28'
    """
    platforms = file_name.removesuffix(".whl").rpartition("-")[2].split(".")
    versions = [version for platform in platforms if (version := _glibc_in(platform, machine))]
    if versions:
        return min(versions, key=lambda version: int(version.partition(".")[2]))
    return None if f"linux_{machine}" in platforms else ""


def _glibc_in(platform: str, machine: str) -> str | None:
    for minor, legacy in _LEGACY.items():
        if platform == f"{legacy}_{machine}":
            return f"2.{minor}"
    match = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", platform)
    return f"2.{match[1]}" if match else None


_RUNTIMES = (
    re.compile(r"nvidia-cuda-runtime(-cu\d+)?"),
    re.compile(r"cuda-toolkit"),
    re.compile(r"cuda-version|pytorch-cuda|cuda-cudart|cudatoolkit"),
)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of an environment.

    Attributes:
        glibc: the oldest it runs with, from the package `glibc_of`; None: no package states it.
        torch: its version ("2.8.0"); None: it has no torch.
        torch_manager: `pip` or `conda`.
        cuda: version of the CUDA runtime ("12.8"), from the package `cuda_of`; None: no CUDA is
            known.
        without_cuda: the torch, if it is known to be a build without CUDA; empty: it is not.
        architectures: GPUs that torch is compiled for; None: not known, or no CUDA.
        unstated: wheels whose names do not state which glibc they need.
    """

    glibc: str | None = None
    glibc_of: str = ""
    torch: str | None = None
    torch_manager: str = ""
    cuda: str | None = None
    cuda_of: str = ""
    without_cuda: str = ""
    architectures: tuple[str, ...] | None = None
    unstated: tuple[str, ...] = ()

    @staticmethod
    def of(packages: Iterable[Package], machine: str = "x86_64") -> Needs:
        """Reads the needs from the packages of one platform.

        Args:
            machine: `uname -m` of the target.
        """
        packages = sorted(packages, key=lambda package: (package.name, package.version))
        glibc, glibc_of, unstated = _oldest_glibc(packages, machine)
        names = {"pip": "torch", "conda": "pytorch"}
        torch = next((p for p in packages if p.name == names[p.manager]), None)
        cuda, cuda_of, without_cuda = _needed_cuda(packages, torch, machine)
        known = None
        if torch and cuda and torch.manager == "pip":
            known = architectures_of(torch.version, cuda, machine)
        return Needs(
            glibc=glibc,
            glibc_of=glibc_of,
            torch=torch.version.partition("+")[0] if torch else None,
            torch_manager=torch.manager if torch else "",
            cuda=cuda,
            cuda_of=cuda_of,
            without_cuda=without_cuda,
            architectures=known,
            unstated=unstated,
        )

    def facts(self) -> dict[str, str | None]:
        """Fields of `env.json`, flat and as text: `env-check.sh` reads them with sed."""
        return {
            "architectures": " ".join(self.architectures) if self.architectures else None,
            "cuda": self.cuda,
            "glibc": self.glibc,
            "torch": self.torch,
        }


def _oldest_glibc(
    packages: Sequence[Package], machine: str
) -> tuple[str | None, str, tuple[str, ...]]:
    """The newest glibc that a package needs, that package, and the wheels that do not state it."""
    needed: list[tuple[str, str]] = []
    unstated = []
    for package in packages:
        what, glibc = f"{package.name} {package.version}", None
        if package.file_name.endswith(".whl"):
            glibc = glibc_needed(package.file_name, machine)
            if glibc is None:
                unstated.append(what)
        elif match := re.match(r">=\s*(\d+\.\d+)", package.dependencies.get("__glibc", "")):
            glibc = match[1]
        if glibc:
            needed.append((glibc, what))
    glibc, of = max(needed, key=lambda item: numbers(item[0]), default=(None, ""))
    return glibc, of, tuple(unstated)


def _needed_cuda(
    packages: Sequence[Package], torch: Package | None, machine: str
) -> tuple[str | None, str, str]:
    """`cuda`, `cuda_of` and `without_cuda`: as torch says, else as a runtime package does."""
    if torch is not None and torch.manager == "pip":
        what = f"torch {torch.version}"
        if is_without_cuda(torch.version, machine):
            return None, "", what
        if named := cuda_in(torch.version):
            return named, what, ""
    elif torch is not None:
        what = f"pytorch {torch.version} ({torch.build})"
        if named := cuda_in(torch.build):
            return named, what, ""
        if "cpu" in torch.build:
            return None, "", what
    for pattern in _RUNTIMES:
        for package in packages:
            if pattern.fullmatch(package.name):
                major, minor = numbers(package.version)
                return f"{major}.{minor}", f"{package.name} {package.version}", ""
    return None, "", ""


DRIVERS = {11: "450", 12: "525", 13: "580"}
"""CUDA major version -> the oldest driver that runs it.

Source: CUDA Compatibility guide, "Minor Version Compatibility".
"""


@dataclass(frozen=True)
class Verdict:
    """One thing about an environment on a cluster.

    Attributes:
        refused: it would not run; False: a note.
        problem: one sentence.
        remedy: versions that fit; empty for most notes.
    """

    refused: bool
    problem: str
    remedy: str = ""


def verdicts(needs: Needs, profile: Profile) -> list[Verdict]:
    """All verdicts on an environment on a kind of node; empty: it runs."""
    found = [*_judge_glibc(needs, profile), *_judge_cuda(needs, profile)]
    if not any(verdict.refused for verdict in found):
        found += _judge_architectures(needs, profile)
    return found


def _judge_glibc(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    if needs.glibc and numbers(needs.glibc) > numbers(profile.glibc):
        package, has = needs.glibc_of, profile.glibc
        problem = f"{package} needs glibc {needs.glibc}; {profile.name} has {has}."
        older = f"Ask for an older {package.split()[0]}, one with a wheel for glibc {has} or older."
        is_torch = needs.torch is not None and package.startswith("torch ")
        yield Verdict(True, problem, _what_fits(needs, profile) if is_torch else older)
    if needs.unstated:
        wheels = ", ".join(needs.unstated)
        yield Verdict(False, f"{wheels}: the wheel does not say which glibc it needs.")


def _judge_cuda(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    gpu = profile.gpu or "the GPU"
    if needs.cuda is not None and profile.cuda is not None:
        yield from _judge_driver(needs, needs.cuda, profile, profile.cuda)
    elif needs.cuda is not None:
        cuda = f"{needs.cuda_of} brings CUDA {needs.cuda}"
        yield Verdict(False, f"{cuda}, which nodes without a GPU do not use.")
    elif needs.without_cuda and profile.cuda:
        yield Verdict(
            True,
            f"{needs.without_cuda} is a build without CUDA: it does not use {gpu}.",
            _what_fits(needs, profile),
        )
    elif needs.torch and profile.cuda:
        yield Verdict(
            False,
            f"Not known whether torch {needs.torch} uses {gpu}: nothing in the lock says which "
            "CUDA it has.",
            _what_fits(needs, profile),
        )


def _judge_driver(needs: Needs, cuda: str, profile: Profile, driver_cuda: str) -> Iterator[Verdict]:
    runtime, driver = numbers(cuda), numbers(driver_cuda)
    if runtime[0] > driver[0]:
        oldest = DRIVERS.get(runtime[0])
        needed = f"CUDA {runtime[0]}.0 or newer" + (f" (driver {oldest}+)" if oldest else "")
        yield Verdict(
            True,
            f"CUDA {cuda} ({needs.cuda_of}) needs a driver with {needed}; the driver of "
            f"{profile.name} has CUDA {driver_cuda}.",
            _what_fits(needs, profile),
        )
    elif runtime[0] == driver[0] and runtime > driver:
        yield Verdict(
            False,
            f"CUDA {cuda} ({needs.cuda_of}) on a driver with CUDA {driver_cuda} runs by CUDA's "
            "minor-version compatibility: machine code does, intermediate code (PTX) does not.",
        )


def _judge_architectures(needs: Needs, profile: Profile) -> Iterator[Verdict]:
    capability = profile.compute_capability
    if needs.torch is None or needs.cuda is None or capability is None or profile.cuda is None:
        return
    gpu = f"{profile.gpu or profile.name} (compute capability {capability})"
    torch = f"torch {needs.torch} with CUDA {needs.cuda}"
    if oldest := toolkit_dropped(needs.cuda, capability):
        yield Verdict(
            True,
            f"torch {needs.torch} is built with CUDA {needs.cuda}, which knows no GPU older than"
            f" {oldest}: not {gpu}.",
            _what_fits(needs, profile),
        )
    elif needs.architectures is None:
        yield Verdict(
            False,
            f"Not known whether {torch} was built for {gpu}.",
            "On such a node: python -c 'import torch; print(torch.cuda.get_arch_list())'",
        )
    # PTX, the intermediate code, is compiled by the driver: one that knows this CUDA.
    elif not runs_on(
        needs.architectures, capability, ptx=numbers(needs.cuda) <= numbers(profile.cuda)
    ):
        compiled_for = ", ".join(needs.architectures)
        yield Verdict(
            True,
            f"{torch} has no code for {gpu}, only for {compiled_for}.",
            _what_fits(needs, profile),
        )


def _what_fits(needs: Needs, profile: Profile) -> str:
    """Advice for a torch that does not run there, or does not use the GPU."""
    if needs.torch_manager == "conda" and profile.cuda and profile.compute_capability:
        major = newest_toolkit(profile.cuda, profile.compute_capability)
        return f"Write `pytorch=*=cuda*` and `cuda-version {major}.*` in the conda dependencies."
    return what_fits(profile)
