"""The list of real scripts: what `list.yaml` says, read and checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LIST = Path(__file__).with_name("list.yaml")
LAUNCHERS = {
    "torchrun": "python -m torch.distributed.run --standalone --nproc_per_node={ranks}",
    "accelerate": "python -m accelerate.commands.launch --num_machines=1 "
    "--mixed_precision=no --dynamo_backend=no --num_processes={ranks} {options}",
    "deepspeed": "python -m deepspeed.launcher.runner --num_gpus={ranks}",
}
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
        launcher: a key of `LAUNCHERS`; `options` are additional options for it.
        packages: what it needs besides the packages of this project's environment.
        models: repositories of models that it asks for, by their names today.
        datasets: the same, of datasets.
        metrics: metrics of `evaluate` that it asks for.
        data: a folder of files that it reads, made by `twins`.
        environ: additional variables.
        leaves: a pattern of a file that the run must leave.
        in_the_way: the line of theirs that stops it on this machine, and why; empty: none.
        ends_with: words that it prints then.
    """

    name: str
    repository: str
    commit: str
    folder: str
    command: str
    launcher: str
    options: str = ""
    packages: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    data: str = ""
    environ: Mapping[str, str] | None = None
    leaves: str = ""
    in_the_way: str = ""
    ends_with: str = ""

    def argv(self, python: Path, ranks: int) -> list[str]:
        """The command line for this many ranks."""
        launch = LAUNCHERS[self.launcher].format(ranks=ranks, options=self.options)
        words = shlex.split(f"{launch} {self.command}")
        return [str(python) if words[0] == "python" else words[0], *words[1:]]

    @property
    def path(self) -> str:
        """The script in its repository."""
        return f"{self.folder}/{self.command.split()[0]}"


@dataclass(frozen=True)
class Scripts:
    """The list: scripts, the versions of their packages, and where metrics come from."""

    scripts: tuple[Script, ...]
    packages: tuple[str, ...]
    metrics_repository: str
    metrics_commit: str

    def named(self, names: tuple[str, ...]) -> tuple[Script, ...]:
        """These scripts; all without names.

        Raises:
            ValueError: no such script.
        """
        known = {script.name: script for script in self.scripts}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no script {', '.join(unknown)}; there are {', '.join(known)}")
        return tuple(known[name] for name in names) if names else self.scripts


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
