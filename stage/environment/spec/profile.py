"""The properties of a cluster's nodes: `envs/profiles/NAME.yml` -> `Profile`.

A profile is written once for each kind of node (`stage env probe` prints it there), and read on the
laptop, where the lock is made: the conda solver gets `virtual_packages()`; wheels are checked
against the other fields. `starter` is a first `environment.yml` for such nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stage.errors import UsageError
from stage.file_kinds import PROFILE, suggest_file
from stage.lock.reader import HIDDEN, REQUIRED, Lines, Reader, WrongValueError, setting
from stage.lock.yaml_lines import reading_yaml

FORMAT = 1
MACHINES = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
"""conda's name for a platform -> `uname -m`, which is also the end of a wheel's tag."""

OLDEST_LINUX = "3.10"
"""The kernel for a profile without `linux`: the oldest that is still in use (CentOS 7)."""

_EXAMPLES = {"glibc": "2.28", "linux": "4.18", "cuda": "12.2", "compute_capability": "8.0"}
_HOW_TO_SEE = {
    "glibc": "ldd --version",
    "linux": "uname -r",
    "cuda": "nvidia-smi, top right",
    "compute_capability": "nvidia-smi --query-gpu=compute_cap --format=csv",
}
_PROBE = "`stage env probe`, run on the cluster, prints a profile."
_PRINTS_IT = "`sh env-probe.sh`, run after `module load` or in the container, prints them."


def _version(key: str, default: Any) -> Any:
    """A key with `MAJOR.MINOR` as text: YAML would read 12.10 as the number 12.1."""

    def check(text: str) -> str:
        if not re.fullmatch(r"\d{1,4}\.\d{1,4}", text):
            raise WrongValueError(
                "must be MAJOR.MINOR",
                f'For example {key}: "{_EXAMPLES[key]}" ({_HOW_TO_SEE[key]}).',
            )
        return text

    return setting(default, _PROBE if default is REQUIRED else "", convert=check)


PROVIDED = re.compile(r"[a-z0-9][a-z0-9-]*==[0-9][A-Za-z0-9.+!_-]*")
"""`NAME==VERSION` of what a site provides, as the shell scripts of its environment have it."""


def _provided(found: dict[str, str]) -> dict[str, str]:
    """What the site provides: normalised name (PEP 503) -> version."""
    from packaging.utils import canonicalize_name  # clusters read this file without it
    from packaging.version import InvalidVersion, Version

    named = {str(canonicalize_name(name)): version for name, version in found.items()}
    for name, version in named.items():
        is_sound = PROVIDED.fullmatch(f"{name}=={version}")
        try:
            Version(version if is_sound else "")
        except InvalidVersion:
            raise WrongValueError(f": `{name}`: {version} is no version", _PRINTS_IT) from None
    if named and not {"python", "torch"} <= named.keys():
        raise WrongValueError("needs `python` and `torch`", _PRINTS_IT)
    return named


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of node.

    Attributes:
        path: of its file.
        platform: `linux-64` or `linux-aarch64`.
        glibc: version of the C library, such as "2.28".
        linux: version of the kernel.
        cuda: the newest CUDA that the driver runs ("12.2"); None: no GPU.
        compute_capability: of the GPU ("8.0"); None: no GPU.
        gpu, mpi: their names, for messages.
        modules: names for `module load` in the site's jobs.
        provides: name -> version of what the site's own Python has: `python` itself, `torch`,
            `numpy` and what is compiled against them. Empty: environments bring their own.
        lines: of its file.
    """

    path: Path = field(default=Path(), metadata=HIDDEN)
    format: int = FORMAT
    name: str
    platform: Literal["linux-64", "linux-aarch64"] = setting(
        why=_PROBE,
        like="platform: linux-64. `uname -m` on the cluster says which: x86_64 is linux-64, "
        "aarch64 is linux-aarch64.",
    )
    glibc: str = _version("glibc", REQUIRED)
    linux: str = _version("linux", OLDEST_LINUX)
    cuda: str | None = _version("cuda", None)
    compute_capability: str | None = _version("compute_capability", None)
    gpu: str | None = None
    mpi: str | None = None
    modules: tuple[str, ...] = setting((), is_one=True)
    provides: dict[str, str] = setting(
        dict, like='provides: {python: "3.11.9", torch: "2.7.1+rocm6.3"}', convert=_provided
    )
    lines: Lines = field(
        default_factory=lambda: Lines(Path()), metadata=HIDDEN, compare=False, repr=False
    )

    @property
    def machine(self) -> str:
        """`uname -m` there: "x86_64" or "aarch64"."""
        return MACHINES[self.platform]

    def virtual_packages(self) -> dict[str, str]:
        """conda's virtual packages there: name -> "version" or "version build", sorted.

        The form of conda-lock's `--virtual-package-spec`. Without a GPU there is no `__cuda`.
        """
        packages = {
            "__archspec": f"1 {self.machine}",
            "__glibc": self.glibc,
            "__linux": self.linux,
            "__unix": "0",
        }
        if self.cuda is not None:
            packages["__cuda"] = self.cuda
        return dict(sorted(packages.items()))

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Reads a profile.

        Raises:
            UsageError: with file:line, for each deviation from docs/environments.md.
        """
        path = Path(path)
        if not path.exists():
            raise UsageError(f"{path}: no such profile.", suggest_file(path, PROFILE))
        with reading_yaml(path, PROFILE) as (data, lines):
            lines.check_format(data, FORMAT)
            given = {key: value for key, value in data.items() if value is not None}
            with lines.mistakes:
                _check_gpu(given, lines)
            profile = Reader(lines).read(Profile, {"name": path.stem, **given})
            return replace(profile, path=path, lines=lines)


def _check_gpu(data: Mapping[str, Any], lines: Lines) -> None:
    """Refuses one of the two without the other: half of the checks would be skipped silently."""
    given = [key for key in ("cuda", "compute_capability") if data.get(key) is not None]
    if len(given) == 1:
        (missing,) = {"cuda", "compute_capability"} - set(given)
        raise UsageError(
            f"`{given[0]}` without `{missing}`: a node with a GPU has both.",
            f'Add `{missing}: "{_EXAMPLES[missing]}"` as on the GPU node ({_HOW_TO_SEE[missing]}), '
            "or omit both.",
            place=lines.place(given[0]),
        )


_PACKAGES = (
    "deepspeed>=0.19.8,<0.20",
    "transformers>=5,<6",
    "datasets>=4,<6",
    "peft>=0.18",
    "accelerate",
    "safetensors>=0.5",
    "tensorboard>=2.15",
)
_INDEX = "--extra-index-url https://download.pytorch.org/whl"


def starter(profile: Profile) -> str:
    """The text of an `environment.yml`, with a torch that the profile's driver runs."""
    python, lines = "3.11", _torch(profile)
    if profile.provides:
        python = ".".join(profile.provides["python"].split(".")[:2])
        lines = ["# torch, numpy and what is compiled against torch are the site's"]
    pip = "".join(
        f"      {line}\n" if line.startswith("#") else f"      - {line}\n"
        for line in (*lines, *_PACKAGES)
    )
    return (
        f"# For the nodes of {profile.path.name}. Add what your own code imports; versions are "
        "pinned in the lock beside it.\n"
        f"name: {profile.path.stem}\n"
        + ("" if profile.provides else "channels: [conda-forge]\n")
        + f"dependencies:\n  - python={python}\n  - pip\n  - pip:\n{pip}"
    )


def _torch(profile: Profile) -> list[str]:
    if profile.cuda is None:
        return [
            "# the builds of PyPI bring 3 GB of CUDA, which these nodes have no GPU for",
            f"{_INDEX}/cpu",
            "torch>=2.6,<2.14",
            "numpy>=1.26",
        ]
    major = int(profile.cuda.partition(".")[0])
    if major < 12:
        return [f"{_INDEX}/cu118", "torch==2.6.0+cu118", "numpy>=1.26"]
    newest = "2.11" if major == 12 else "2.14"
    return [
        f"# the newest of PyPI that a driver with CUDA {profile.cuda} runs",
        f"torch>=2.6,<{newest}",
        "numpy>=1.26",
    ]
