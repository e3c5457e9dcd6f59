"""What a locked environment needs of the machine that runs it: `Needs.of(packages)`. Pure.

They come from the packages: wheel tags name the glibc, the CUDA runtime among the packages the
CUDA, and the version of torch the GPUs. `env.json` records them. They are compared with a profile
when the lock is made, and with the real node by `stage env check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from stage.environment.check.torch_builds import architectures_of, is_without_cuda, numbers

_LEGACY_TAGS = {"manylinux1": "2.5", "manylinux2010": "2.12", "manylinux2014": "2.17"}
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
_LOCAL_CUDA = re.compile(r"\+cu(\d{2,3})(?:$|\.)")
_CONDA_CUDA = re.compile(r"cuda(\d{2,3}|\d+\.\d+)(?=_|$|py)")
_RUNTIMES = (
    re.compile(r"nvidia-cuda-runtime(-cu\d+)?"),
    re.compile(r"cuda-toolkit"),
    re.compile(r"cuda-version|pytorch-cuda|cuda-cudart|cudatoolkit"),
)


class Package(Protocol):
    """The fields of a locked package that are read here; `manager` is `conda` or `pip`."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def manager(self) -> str: ...
    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class WheelTag:
    """The platform in a wheel's name.

    Attributes:
        glibc: the oldest glibc; None: any, or not stated.
        stated: whether the name states it.
    """

    glibc: str | None
    stated: bool = True


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of an environment.

    Attributes:
        glibc: the oldest it runs with, from the package `glibc_of`; None: no package states it.
        torch: its version ("2.8.0"); None: it has no torch.
        torch_manager: `pip` or `conda`.
        cuda: version of the CUDA runtime ("12.8"), from the package `cuda_of`; None: no CUDA is
            known. Then `cuda_of` is the torch that is known to be a build without CUDA, if any.
        architectures: GPUs that torch is compiled for; None: not known, or no CUDA.
        unstated: wheels whose names do not state which glibc they need.
    """

    glibc: str | None = None
    glibc_of: str = ""
    torch: str | None = None
    torch_manager: str = ""
    cuda: str | None = None
    cuda_of: str = ""
    architectures: tuple[str, ...] | None = None
    unstated: tuple[str, ...] = ()

    @staticmethod
    def of(
        packages: Iterable[Package], machine: str = "x86_64", conda_depends: Iterable[str] = ()
    ) -> Needs:
        """Reads the needs from the packages of one platform.

        Args:
            machine: `uname -m` of the target.
            conda_depends: known `depends` of conda packages, such as `__glibc >=2.17,<3.0.a0`.
        """
        packages = sorted(packages, key=lambda package: (package.name, package.version))
        glibc, glibc_of, unstated = _glibc(packages, machine, conda_depends)
        names = {"pip": "torch", "conda": "pytorch"}
        torch = next((p for p in packages if p.name == names[p.manager]), None)
        cuda, cuda_of = _cuda(packages, torch, machine)
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


def wheel_tag(file_name: str, machine: str) -> WheelTag | None:
    """The easiest of a wheel's platform tags for this machine, on Linux; None: it has none.

    `a-1-py3-none-manylinux2014_x86_64.manylinux_2_28_x86_64.whl` runs where either tag does.
    """
    platforms = file_name.removesuffix(".whl").rpartition("-")[2].split(".")
    tags = [tag for platform in platforms if (tag := _tag(platform, machine)) is not None]
    if not tags:
        return None
    return min(tags, key=lambda tag: (not tag.stated, numbers(tag.glibc or "0.0")))


def _tag(tag: str, machine: str) -> WheelTag | None:
    if tag == "any":
        return WheelTag(None)
    if match := _MANYLINUX.fullmatch(tag):
        return WheelTag(f"{match[1]}.{match[2]}") if match[3] == machine else None
    name, _, rest = tag.partition("_")
    if rest != machine:
        return None
    if name in _LEGACY_TAGS:
        return WheelTag(_LEGACY_TAGS[name])
    return WheelTag(None, stated=False) if name == "linux" else None


def file_name(package: Package) -> str:
    """The last part of a package's URL."""
    return unquote(urlsplit(package.url).path).rpartition("/")[2]


def _glibc(
    packages: Sequence[Package], machine: str, conda_depends: Iterable[str]
) -> tuple[str | None, str, tuple[str, ...]]:
    """The newest glibc that a package needs, that package, and the wheels that do not state it."""
    asked: list[tuple[str, str]] = []
    unstated = []
    for package in packages:
        name = file_name(package)
        tag = wheel_tag(name, machine) if name.endswith(".whl") else None
        if tag and tag.glibc:
            asked.append((tag.glibc, f"{package.name} {package.version}"))
        if tag and not tag.stated:
            unstated.append(f"{package.name} {package.version}")
    for depend in conda_depends:
        if match := re.match(r"__glibc\s+>=\s*(\d+\.\d+)", depend):
            asked.append((match[1], "a conda package"))
    glibc, of = max(asked, key=lambda item: numbers(item[0]), default=(None, ""))
    return glibc, of, tuple(unstated)


def _cuda(
    packages: Sequence[Package], torch: Package | None, machine: str
) -> tuple[str | None, str]:
    """The CUDA runtime and its source: torch's version or build string, else a runtime package."""
    if torch is not None:
        if torch.manager == "pip" and is_without_cuda(torch.version, machine):
            return None, f"torch {torch.version}"
        if match := _LOCAL_CUDA.search(torch.version):
            return _dotted(match[1]), f"torch {torch.version}"
        build = file_name(torch).removesuffix(".conda").removesuffix(".tar.bz2").rpartition("-")[2]
        if torch.manager == "conda" and (match := _CONDA_CUDA.search(build)):
            return _dotted(match[1]), f"pytorch {torch.version} ({build})"
        if torch.manager == "conda" and "cpu" in build:
            return None, f"pytorch {torch.version} ({build})"
    for pattern in _RUNTIMES:
        for package in packages:
            if pattern.fullmatch(package.name):
                major, minor = numbers(package.version)
                return f"{major}.{minor}", f"{package.name} {package.version}"
    return None, ""


def _dotted(digits: str) -> str:
    """`126` (as in `+cu126`) -> `12.6`; `12.6` is unchanged."""
    return digits if "." in digits else f"{digits[:-1]}.{digits[-1]}"
