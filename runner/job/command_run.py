"""The run of a command: `Run` with the facts that follow from its words and its project.

On the machine that submits, the project is read where it lies. In the job, the run file and the
project are those that `submit` left in the run folder (`CommandRun.of_folder`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import inputs as inputs_module
from runner.config.command_config import CommandConfig
from runner.errors import OTHER_RUN
from runner.from_stage import (
    UsageError,
    WrongValueError,
    nearest_name,
    quoted,
    suggest,
    write_atomically,
)
from runner.inputs import JobInputs
from runner.inputs.hub import catalogue_of
from runner.job.access import environment_files
from runner.job.commands import PROGRAMS, as_words, read_command
from runner.job.findings import fact
from runner.job.installed import Packages, is_light
from runner.job.launchers import Launch, Places, plan_launch
from runner.job.own_code import JobPython
from runner.job.run import NO_RANKS, Asked, Run
from runner.run_folder.layout import RunFolder, read_json
from runner.run_folder.missing import add_to_manifest, missing_of
from runner.run_folder.project import (
    Project,
    find_root,
    is_packed,
    list_project,
    pack,
    project_of,
    read_description,
)
from stage.serve.catalogue import Catalogue

_IN_FOLDER = re.compile(r"\s*cd\s+([^\s;&|]+)\s*&&\s*")


class CommandRun(Run):
    """A run that starts a program of the user's own."""

    config: CommandConfig

    @classmethod
    def load(
        cls,
        run_file: Path,
        bundle: Path,
        output: Path | None,
        overrides: Sequence[str],
        asked: Asked = NO_RANKS,
    ) -> CommandRun:
        """Reads the run file and finds its bundle.

        Raises:
            UsageError: as for `CommandConfig.load` and `inputs_of_command`; the run folder is
                inside the bundle.
            DamageError: as for `inputs_of_command`.
        """
        config = CommandConfig.load(run_file, overrides)
        inputs: JobInputs = inputs_module.inputs_of_command(config, bundle)
        folder = RunFolder((output or Path("output") / config.name).absolute())
        inputs_module.check_not_inside(folder.root, inputs.bundle)
        return CommandRun(config, inputs, folder, bundle, tuple(overrides), asked)

    @classmethod
    def of_folder(cls, folder: Path, bundle: Path) -> CommandRun:
        """The run that `write_for_job` left in a run folder.

        Raises:
            UsageError, DamageError: as for `load`.
        """
        return cls.load(RunFolder(folder).config, bundle, folder, ())

    @fact
    def to_read(self) -> tuple[Path, ...]:
        """The bundle's files without which nothing starts; the command asks for the others."""
        return environment_files(self.inputs)

    @fact
    def packages(self) -> Packages:
        """Nothing: what the command imports is read in its code."""
        return Packages((), ())

    @property
    def words_in_job(self) -> tuple[str, ...]:
        """The words after `runner` that start the run in a job, without its folder."""
        by_script = ["--by-script"] if self.config.slurm.srun else []
        return ("launch", *by_script, "--bundle", str(self.bundle.absolute()))

    @property
    def kind_of_job(self) -> dict[str, bool]:
        """Slurm's signal is for the launcher; only what resumes is started again."""
        return {"of_command": True, "resumes": self.config.resumes}

    def key_of_axis(self, axis: str) -> str:
        """`KEY=A,B` of --array with the whole key: `lr` is `values.lr`."""
        return f"values.{axis}" if axis.partition("=")[0] in self.config.values else axis

    @fact
    def start_folder(self) -> str:
        """Where the command starts, in the project: of `cd FOLDER && ...`; empty: at its top."""
        command = self.config.command
        inside = _IN_FOLDER.match(command) if isinstance(command, str) else None
        return inside[1].strip("\"'").rstrip("/") if inside else ""

    @fact
    def words(self) -> tuple[str, ...]:
        """The command's words, with the values in them.

        Raises:
            UsageError: a shell could not read them.
        """
        command = self.config.with_values()
        if isinstance(command, str):
            command = _IN_FOLDER.sub("", command, count=1)
        try:
            return as_words(command)
        except WrongValueError as error:
            what = f"`command` {error}."
            raise UsageError(what, error.remedy, place=self.config.place("command")) from None

    @fact
    def root(self) -> Path:
        """The project's folder.

        Raises:
            UsageError: there is no such folder.
        """
        return find_root(self.config.project, self.config.path)

    @fact
    def project(self) -> Project:
        """The files that travel.

        Raises:
            UsageError: they are too many or too large, or one cannot be read.
        """
        leave = (self.folder.root.parent, self.folder.root, self.inputs.bundle)
        return project_of(self.root) or list_project(self.root, self.config.include, leave)

    @fact
    def program(self) -> str:
        """The program that the command starts.

        Raises:
            UsageError: the job's Python has no such program beside it, and PATH has none.
        """
        name = read_command(self.words).own[0]
        here = self.job_python.words == (sys.executable,)
        path = os.pathsep.join((str(Path(sys.executable).parent), self.environ.get("PATH", "")))
        launchers = [program for program in PROGRAMS if "." not in program]
        known = {*launchers, "python", "python3", "bash", "sh"}
        is_mistyped = name not in known and nearest_name(name, known)
        if "/" not in name and shutil.which(name, path=path) is None and (here or is_mistyped):
            raise UsageError(
                f"`command` starts `{name}`, and there is no such program.",
                suggest(
                    name,
                    () if name in known else known,
                    "Correct its name, or add its package to the environment.",
                ),
                place=self.config.place("command"),
            )
        return name

    @fact
    def launch(self) -> Launch:
        """How the command is started on the nodes of its job.

        Raises:
            UsageError: it cannot be, with the line that can.
        """
        return plan_launch(self.words, self.places, self.config.launch, self.root)

    @fact
    def places(self) -> Places:
        """What the job has."""
        slurm = self.config.slurm
        tasks = slurm.tasks_per_node if isinstance(slurm.tasks_per_node, int) else None
        return Places(nodes=slurm.nodes, gpus=slurm.gpus_per_node, tasks=tasks)

    @fact
    def served(self) -> Catalogue:
        """What the bundle serves."""
        return catalogue_of(self.inputs.bundle)

    @fact
    def job_python(self) -> JobPython:
        """The Python that runs the command."""
        words, environment = self.python_of_ranks, self.inputs.environment
        if environment is not None and not self.config.slurm.around_ranks:
            here = (sys.executable,) if words == () else None
            name = f"the environment `{environment.asset}` of the bundle"
            remedy = "On the laptop, add {} to its environment.yml, and fetch again"
            return JobPython(name, here, environment.packages, remedy)
        slurm = self.config.slurm
        if words is None or (words == () and (slurm.setup or slurm.modules) and is_light()):
            return JobPython("the Python of the job", None)  # another check asks it
        return JobPython(f"{(words or (sys.executable,))[-1]}", words or (sys.executable,))

    @fact
    def disk_needed(self) -> int:
        """The bytes of the project, twice: as it travels and as it is used."""
        return 2 * sum(self.project.files.values())

    @fact
    def earlier(self) -> Sequence[Mapping[str, Any]]:
        """What the run folder records of earlier starts, oldest first."""
        found = read_json(self.folder.environment)
        return found.get("starts", []) if isinstance(found, dict) else []

    @fact
    def finished(self) -> list[str]:
        """What is printed if the command has ended well, and is the same now; else empty."""
        last = self.earlier[-1] if self.earlier else {}
        words, ended = list(self.words), last.get("ended")
        if last.get("kind") != "done" or last.get("words", [])[: len(words)] != words:
            return []
        packed = read_description(self.folder.packed)
        same_bundle = last.get("bundle_id") == self.inputs.bundle_id
        if packed is None or not same_bundle or not is_packed(self.project, packed):
            return []
        when = time.strftime(" at %F %H:%M", time.localtime(ended)) if ended else ""
        return [
            f"{self.folder.root}: the command ended with exit code 0{when}: with these words, this "
            "project and this bundle",
            f"  -> Its results are in work/. To start it once more, give the run {OTHER_RUN}",
        ]

    def add_missing(self) -> list[str]:
        """Writes what an earlier start missed into the manifest; returns what is to be printed.

        Raises:
            UsageError: that manifest is not here, or is not written in lines.
        """
        missing, named = missing_of(self.folder.missing), self.config.manifest
        manifest = self.config.path.parent / (named or "")
        if not missing:
            return [f"{self.folder.root}: no start asked for what the bundle does not have"]
        if named is None or not manifest.is_file():
            what = f"{manifest} is not here" if named else "the run file names no manifest"
            raise UsageError(
                f"{self.config.path}: {what}, so nothing was added.",
                f"On the laptop, write below `assets:` of the manifest, then fetch it:\n{missing}",
            )
        added = add_to_manifest(missing, manifest)
        return [
            f"added to {manifest}: {', '.join(added)}" if added else f"{manifest} has all of it",
            f"next: stage fetch {quoted(manifest)} -o {quoted(self.bundle)}",
        ]

    def member(self, name: str, overrides: Sequence[str], *, tries_shell: bool) -> CommandRun:
        """A run of a sweep: its project is this one's, listed once."""
        made = super().member(name, overrides, tries_shell=tries_shell)
        project = self.known(CommandRun.project)
        return made if project is None else made.given(CommandRun.project, project)

    def write_for_job(self, *, in_sweep: bool = False) -> None:
        """Leaves the run file and the project in the run folder, as the job will read them.

        Args:
            in_sweep: the project is in the folder of the sweep, once for all its runs.

        Raises:
            UsageError, IncompleteError: as for `project` and `pack`.
        """
        self.folder.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder.config, self.config.to_yaml().encode())
        if not in_sweep:
            pack(self.project, self.folder.project, self.folder.packed)
