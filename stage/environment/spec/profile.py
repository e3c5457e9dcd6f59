"""The properties of a cluster's nodes: `envs/profiles/NAME.yml` -> `Profile`.

A profile is written once for each kind of node (`stage env probe` prints it there), and read on the
laptop, where the lock is made: the conda solver gets `virtual_packages()`; wheels are checked
against the other fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import UsageError
from stage.file_kinds import PROFILE, how_to_get, suggest_file
from stage.lock.fields import YamlFields
from stage.lock.yaml_lines import Lines, check_keys, reading_yaml

FORMAT = 1
MACHINES = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
"""conda's name for a platform -> `uname -m`, which is also the end of a wheel's tag."""

OLDEST_LINUX = "3.10"
"""The kernel for a profile without `linux`: the oldest that is still in use (CentOS 7)."""

_VERSIONS = ("glibc", "linux", "cuda", "compute_capability")
_KEYS = ("format", "name", "platform", *_VERSIONS, "gpu", "mpi", "modules")
_EXAMPLES = {"glibc": "2.28", "linux": "4.18", "cuda": "12.2", "compute_capability": "8.0"}
_HOW_TO_SEE = {
    "glibc": "ldd --version",
    "linux": "uname -r",
    "cuda": "nvidia-smi, top right",
    "compute_capability": "nvidia-smi --query-gpu=compute_cap --format=csv",
}
_UNAME = "`uname -m` on the cluster says which: x86_64 is linux-64, aarch64 is linux-aarch64."


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
            lines.check_format(data.get("format"), FORMAT)
            with lines.mistakes:
                check_keys(data, _KEYS, (), lines)
            with lines.mistakes:
                _check_gpu(data, lines)
            given = {key: value for key, value in data.items() if value is not None}
            for key in ("platform", "glibc"):
                with lines.mistakes:
                    if key not in given:
                        raise UsageError(
                            f"{lines.path}: `{key}` is missing.",
                            "`stage env probe`, run on the cluster, prints a profile.",
                        )
            fields = YamlFields(given, lines, remedy=how_to_get(PROFILE))
            return Profile(
                path=path,
                name=fields.optional("name") or path.stem,
                platform=fields.choice("platform", MACHINES, _UNAME) or "",
                glibc=_version(fields, "glibc") or "",
                linux=_version(fields, "linux") or OLDEST_LINUX,
                cuda=_version(fields, "cuda"),
                compute_capability=_version(fields, "compute_capability"),
                gpu=fields.optional("gpu"),
                mpi=fields.optional("mpi"),
                modules=fields.texts("modules"),
            )


def _check_gpu(data: Mapping[str, Any], lines: Lines) -> None:
    """Refuses one of the two without the other: half of the checks would be skipped silently."""
    given = [key for key in ("cuda", "compute_capability") if data.get(key) is not None]
    if len(given) == 1:
        (missing,) = {"cuda", "compute_capability"} - set(given)
        raise UsageError(
            f"{lines.place(given[0])}: `{given[0]}` without `{missing}`: a node with a GPU has "
            "both.",
            f'Add `{missing}: "{_EXAMPLES[missing]}"` as on the GPU node ({_HOW_TO_SEE[missing]}), '
            "or omit both.",
        )


def _version(fields: YamlFields, key: str) -> str | None:
    """`MAJOR.MINOR` as text: YAML would read 12.10 as the number 12.1."""
    value = fields.optional(key)
    with fields.lines.mistakes:
        if value is not None and not re.fullmatch(r"\d{1,4}\.\d{1,4}", value):
            remedy = f'For example {key}: "{_EXAMPLES[key]}" ({_HOW_TO_SEE[key]}).'
            fields.wrong(key, "should be MAJOR.MINOR", remedy)
    return value
