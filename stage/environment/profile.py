"""What a cluster offers to an environment: `envs/profiles/NAME.yml` -> `Profile`.

A profile is written once for each kind of node (`stage env probe` prints it there) and read on the laptop, where
the lock is made: `virtual_packages()` is what the conda solver is told, the rest is what wheels are checked against.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import UsageError
from stage.yamlfile import Lines, check_keys, load_yaml_with_lines

FORMAT = 1
MACHINES = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
"""conda's name for a platform -> `uname -m`, which is also the end of a wheel's tag."""

OLDEST_LINUX = "3.10"
"""The kernel a profile without `linux` is taken to have: the oldest still met (CentOS 7); nothing newer is assumed."""

_KEYS = ("format", "name", "platform", "glibc", "linux", "cuda", "compute_capability", "gpu", "mpi", "modules")
_EXAMPLES = {"glibc": "2.28", "linux": "4.18", "cuda": "12.2", "compute_capability": "8.0"}
_HOW_TO_SEE = {
    "glibc": "ldd --version",
    "linux": "uname -r",
    "cuda": "nvidia-smi, top right",
    "compute_capability": "nvidia-smi --query-gpu=compute_cap --format=csv",
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of node.

    Attributes:
        path: the file it was read from.
        platform: `linux-64` or `linux-aarch64`.
        glibc: version of the C library, such as "2.28".
        linux: version of the kernel.
        cuda: the newest CUDA the driver runs ("12.2"); None: no GPU.
        compute_capability: of the GPU ("8.0"); None: no GPU.
        gpu, mpi: what they are called, for messages.
        modules: `module load` lines the site's jobs need.
    """

    path: Path
    name: str
    platform: str
    glibc: str
    linux: str = OLDEST_LINUX
    cuda: str | None = None
    compute_capability: str | None = None
    gpu: str | None = None
    mpi: str | None = None
    modules: tuple[str, ...] = ()

    @property
    def machine(self) -> str:
        """`uname -m` there: "x86_64" or "aarch64"."""
        return MACHINES[self.platform]

    def virtual_packages(self) -> dict[str, str]:
        """What conda's solver should take for granted there: name -> "version" or "version build", sorted.

        The form of conda-lock's `--virtual-package-spec`. `__cuda` is absent where there is no GPU.
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
            UsageError: with file:line, for anything that is not as documented.
        """
        path = Path(path)
        if not path.exists():
            beside = sorted(file.name for file in path.parent.glob("*.y*ml"))
            nearest = difflib.get_close_matches(path.name, beside, n=1)
            raise UsageError(
                f"{path}: no such profile.",
                f"Did you mean {path.with_name(nearest[0])}?"
                if nearest
                else "`stage env probe` prints one on the cluster; envs/profiles/ has some to start from.",
            )
        data, lines = load_yaml_with_lines(path)
        check_keys(data, _KEYS, (), lines)
        lines.check_format(data.get("format"), FORMAT)
        _check_gpu(data, lines)
        return Profile(
            path=path,
            name=_text(data, "name", lines) or path.stem,
            platform=_platform(data, lines),
            glibc=_version(data, "glibc", lines) or _missing("glibc", lines),
            linux=_version(data, "linux", lines) or OLDEST_LINUX,
            cuda=_version(data, "cuda", lines),
            compute_capability=_version(data, "compute_capability", lines),
            gpu=_text(data, "gpu", lines),
            mpi=_text(data, "mpi", lines),
            modules=_modules(data, lines),
        )


def _check_gpu(data: Mapping[str, Any], lines: Lines) -> None:
    """With one of the two alone, half of the checks would quietly not be made."""
    given = [key for key in ("cuda", "compute_capability") if data.get(key) is not None]
    if len(given) == 1:
        (missing,) = {"cuda", "compute_capability"} - set(given)
        raise UsageError(
            f"{lines.place(given[0])}: `{given[0]}` without `{missing}`: a node with a GPU has both.",
            f'Add `{missing}: "{_EXAMPLES[missing]}"` as on the GPU node ({_HOW_TO_SEE[missing]}), or leave out both.',
        )


def _platform(data: Mapping[str, Any], lines: Lines) -> str:
    platform = _text(data, "platform", lines) or _missing("platform", lines)
    if platform not in MACHINES:
        raise UsageError(
            f"{lines.place('platform')}: `platform` should be one of {', '.join(MACHINES)}, found {platform!r}.",
            "`uname -m` on the cluster says which: x86_64 is linux-64, aarch64 is linux-aarch64.",
        )
    return platform


def _text(data: Mapping[str, Any], key: str, lines: Lines) -> str | None:
    value = data.get(key)
    if value is None or (isinstance(value, str) and value):
        return value
    raise UsageError(
        f"{lines.place(key)}: `{key}` should be text, found {lines.shown(value, key)}.", "Put it in quotes."
    )


def _version(data: Mapping[str, Any], key: str, lines: Lines) -> str | None:
    """`MAJOR.MINOR` as text: YAML would read 12.10 as the number 12.1."""
    value = data.get(key)
    if value is None:
        return None
    example = f'{key}: "{_EXAMPLES[key]}"'
    if not isinstance(value, str):
        raise UsageError(
            f"{lines.place(key)}: `{key}` should be text, found {lines.shown(value, key)}.",
            f"Put it in quotes, else 2.30 would become 2.3: {example}",
        )
    if not re.fullmatch(r"\d{1,4}\.\d{1,4}", value):
        raise UsageError(
            f"{lines.place(key)}: `{key}` should be MAJOR.MINOR, found {value!r}.",
            f"For example {example} ({_HOW_TO_SEE[key]}).",
        )
    return value


def _modules(data: Mapping[str, Any], lines: Lines) -> tuple[str, ...]:
    value = data.get("modules") or []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(
            f"{lines.place('modules')}: `modules` should be a list of module names, found "
            f"{lines.shown(value, 'modules')}.",
            "For example modules: [nvidia/cuda/12.2]",
        )
    return tuple(value)


def _missing(key: str, lines: Lines) -> str:
    raise UsageError(f"{lines.path}: `{key}` is missing.", "`stage env probe`, run on the cluster, prints a profile.")
