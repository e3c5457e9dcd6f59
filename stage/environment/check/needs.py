"""What a locked environment needs from the machine that runs it: `Needs.of(packages)`. Pure.

They come from the packages: wheel tags name the glibc, the CUDA runtime among the packages the
CUDA, and the version of torch the GPUs. `env.json` records them. They are compared with a profile
when the lock is made, and with the real node by `stage env check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stage.environment.check.torch_builds import (
    architectures_of,
    cuda_in,
    is_without_cuda,
    numbers,
)
from stage.environment.check.wheel_tags import glibc_needed
from stage.environment.spec.conda_lock import Package

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
        glibc, glibc_of, unstated = _glibc(packages, machine)
        names = {"pip": "torch", "conda": "pytorch"}
        torch = next((p for p in packages if p.name == names[p.manager]), None)
        cuda, cuda_of, without_cuda = _cuda(packages, torch, machine)
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


def _glibc(packages: Sequence[Package], machine: str) -> tuple[str | None, str, tuple[str, ...]]:
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


def _cuda(
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
