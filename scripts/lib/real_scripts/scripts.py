"""The list of real scripts: what `list.yaml` says, read and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LIST = Path(__file__).with_name("list.yaml")
LAUNCH = "-m torch.distributed.run --standalone --nproc_per_node={ranks}"
"""How a script is started with several ranks on a machine without a GPU."""


@dataclass(frozen=True)
class Script:
    """One script of the list.

    Attributes:
        name: of the entry.
        repository: `owner/name` on GitHub.
        commit: of the repository.
        folder: of the repository; all of it is taken, because scripts import their neighbours.
        command: the script and its arguments, below that folder.
        models: repositories of models that it asks for, by their names today.
        datasets: the same, of datasets.
        metrics: metrics of `evaluate` that it asks for.
        leaves: a pattern of a file that the run must leave.
    """

    name: str
    repository: str
    commit: str
    folder: str
    command: str
    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    leaves: str = ""

    def argv(self, python: Path, ranks: int) -> list[str]:
        """The command line for this many ranks."""
        words = shlex.split(f"{LAUNCH.format(ranks=ranks)} {self.command}")
        return [str(python), *words]


@dataclass(frozen=True)
class Scripts:
    """The list: scripts, the versions of their packages, and where metrics come from."""

    scripts: tuple[Script, ...]
    packages: tuple[str, ...]
    metrics_repository: str
    metrics_commit: str


def read(path: Path = LIST) -> Scripts:
    """Reads the list."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    commits: dict[str, str] = found["commits"]
    scripts = []
    for entry in found["scripts"]:
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()
        }
        scripts.append(Script(commit=commits[entry["repository"]], **given))
    metrics = found["metrics"]
    return Scripts(tuple(scripts), tuple(found["packages"]), metrics, commits[metrics])
