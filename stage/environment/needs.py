"""What a locked environment needs of the machine it will run on: `Needs.of(packages)`. Pure.

Read off the packages themselves: wheel tags say which glibc, the CUDA runtime among the packages says which CUDA, and
the version of torch which GPUs. Recorded in the environment's `env.json`; compared with a profile when the lock is
made, and with the real node by `stage env check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from stage.environment.torch_builds import architectures_of, numbers

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
    """What is looked at of a locked package; `manager` is `conda` or `pip`."""

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
    """What a wheel's name says about the platform: `glibc` None means any, or (`stated` False) that it does not say."""

    glibc: str | None
    stated: bool = True


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an environment needs.

    Attributes:
        glibc: the oldest it runs with, and `glibc_of`, the package that says so; None: none says.
        torch: its version ("2.8.0"); None: no torch in it.
        torch_manager: `pip` or `conda`.
        cuda: version of the CUDA runtime ("12.8"), and `cuda_of`, the package that says so; None: no CUDA.
        architectures: what torch is compiled for; None: not known, or no CUDA.
        unstated: wheels whose names do not say which glibc they need.
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
    def of(packages: Iterable[Package], machine: str = "x86_64", conda_depends: Iterable[str] = ()) -> Needs:
        """Reads it off the packages of one platform.

        Args:
            machine: `uname -m` of the target.
            conda_depends: the `depends` of the conda packages, as `__glibc >=2.17,<3.0.a0`, where they are known.
        """
        packages = sorted(packages, key=lambda package: (package.name, package.version))
        glibc, glibc_of, unstated = _glibc(packages, machine, conda_depends)
        torch = next((p for p in packages if p.name == ("torch" if p.manager == "pip" else "pytorch")), None)
        cuda, cuda_of = _cuda(packages, torch)
        known = None
        if torch and cuda and torch.manager == "pip" and machine == "x86_64":
            known = architectures_of(torch.version, cuda)
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
        """Fields for `env.json`, flat and as text: `env-check.sh` reads them with sed."""
        return {
            "architectures": " ".join(self.architectures) if self.architectures else None,
            "cuda": self.cuda,
            "glibc": self.glibc,
            "torch": self.torch,
        }


def wheel_tag(file_name: str, machine: str) -> WheelTag | None:
    """What a wheel's platform tags need on Linux; None: not for this machine at all.

    `a-1-py3-none-manylinux2014_x86_64.manylinux_2_28_x86_64.whl` has two tags and runs where either does.
    """
    needed = [_tag(tag, machine) for tag in file_name.removesuffix(".whl").rpartition("-")[2].split(".")]
    tags = [tag for tag in needed if tag is not None]
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
    """The last part of a package's address."""
    return unquote(urlsplit(package.url).path).rpartition("/")[2]


def _glibc(
    packages: Sequence[Package], machine: str, conda_depends: Iterable[str]
) -> tuple[str | None, str, tuple[str, ...]]:
    """The newest glibc that any package needs, which one does, and the wheels that do not say."""
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


def _cuda(packages: Sequence[Package], torch: Package | None) -> tuple[str | None, str]:
    """The CUDA runtime and what says so: torch's own version or build string, else the runtime packages."""
    if torch is not None:
        if torch.version.endswith("+cpu"):
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
    """`126` -> 12.6, as in `+cu126`; what has a dot stays."""
    return digits if "." in digits else f"{digits[:-1]}.{digits[-1]}"
