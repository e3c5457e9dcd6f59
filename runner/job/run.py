"""A run, as every command of `runner` sees it: what the user gave, and what follows from it.

`Run` has the facts of anything that Slurm runs from a bundle: its Python, ranks, devices, request
and run folder. What a training adds is in `training_run`. Each fact is derived here, and only here,
by a pure function of other facts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from runner.config.job_config import JobConfig
from runner.disks import read_mounts
from runner.from_stage import UsageError, quoted
from runner.inputs import NO_BUNDLE, JobInputs, Verification, check_site, verification
from runner.isolation import isolate
from runner.job import devices
from runner.job.access import check_readable
from runner.job.findings import Facts, NotKnownError, fact
from runner.job.installed import Packages, lacking, python_of_ranks
from runner.job.job_shell import Attempt
from runner.job.partition import Partition, ask_partition
from runner.job.shapes import Device
from runner.job.submit import SlurmAnswer, ask_slurm, memory_on_node, ranks_on_node, request
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import RunLock, holder_of
from runner.slurm.jobs import over_job
from runner.slurm.script import Member, SbatchRequest


@dataclass(frozen=True)
class RankCount:
    """The ranks of a run.

    Attributes:
        world_size: their number.
        on_node: their number on this machine, or on each node.
        where: `here`: on this machine; `job`: in the Slurm job around this process; `queue`: in a
            job that is not there yet.
    """

    world_size: int
    on_node: int
    where: Literal["here", "job", "queue"]


@dataclass(frozen=True)
class Asked:
    """What a command wants to know of a run, or to do with it.

    Attributes:
        ranks: those that it starts, or will start now; None: those that `slurm:` asks for.
        processes: the number of ranks on this machine to check for; None: as `slurm:` asks for.
        has_ranks: False: no ranks follow, or of more than one number.
        ahead: whether nothing starts now: then there is time to look closer.
        submits: whether the job is submitted next: then Slurm itself says what is wrong with it.
        tries_shell: whether the job's shell and its Python are tried.
    """

    ranks: RankCount | None = None
    processes: int | None = None
    has_ranks: bool = True
    ahead: bool = False
    submits: bool = False
    tries_shell: bool = True


NO_RANKS = Asked(has_ranks=False)
R = TypeVar("R", bound="Run")


@dataclass(frozen=True)
class Run(Facts):
    """A run file, the inputs that it names, its run folder, and what a command asks of them.

    Attributes:
        bundle: the bundle's folder, as the user wrote it.
        overrides: the `--set` texts.
        asked: what the command asks.
        environ: the environment variables of the command.
    """

    config: JobConfig
    inputs: JobInputs
    folder: RunFolder
    bundle: Path
    overrides: tuple[str, ...]
    asked: Asked = field(default=NO_RANKS, compare=False)
    environ: Mapping[str, str] = field(
        default_factory=lambda: os.environ, compare=False, repr=False
    )

    def __getstate__(self) -> dict[str, object]:
        """The fields without the variables, which can hold secrets."""
        return {**super().__getstate__(), "environ": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        """A run that another process has sent: here, the variables are those of this process."""
        vars(self).update(state, environ=os.environ)

    @fact
    def to_read(self) -> tuple[Path, ...]:
        """The bundle's files that the run reads."""
        raise NotImplementedError

    @fact
    def packages(self) -> Packages:
        """What the ranks and their launcher import."""
        raise NotImplementedError

    @fact
    def missing_tools(self) -> list[tuple[str, str]]:
        """What the run compiles with and is missing here, each with what fixes it."""
        return []

    @fact
    def disk_needed(self) -> int:
        """The most bytes that the run writes; 0: not known."""
        return 0

    @fact
    def finished(self) -> list[str]:
        """What `check`, `submit` and `train` print if this run is over; else empty.

        It is no error: a job that is started again has nothing left to do.
        """
        raise NotImplementedError

    @property
    def is_elsewhere(self) -> bool:
        """Whether its folder is another one than that of its name."""
        return self.folder.root != (Path("output") / self.config.name).absolute()

    def command(self, name: str) -> str:
        """The command `runner NAME` for this run, to be typed."""
        words = ["runner", name, self.config.path]
        words += [] if self.bundle == NO_BUNDLE else ["--bundle", self.bundle]
        for override in self.overrides:
            words += ["--set", override]
        if self.is_elsewhere:
            words += ["--output", self.folder.root]
        return " ".join(map(quoted, words))

    def member(self: R, name: str, overrides: Sequence[str], *, tries_shell: bool) -> R:
        """A run of a sweep, in a folder below this one's."""
        every, asked = (*self.overrides, *overrides), replace(self.asked, tries_shell=tries_shell)
        folder = self.folder.root / name
        made: R = self.load(self.config.path, self.bundle, folder, every, asked)
        same = made.config.slurm.partition == self.config.slurm.partition
        # Slurm is asked once a command, not once a member.
        return made.given(Run.partition, self.partition) if same else made

    @classmethod
    def load(
        cls,
        run_file: Path,
        bundle: Path,
        output: Path | None,
        overrides: Sequence[str],
        asked: Asked = NO_RANKS,
    ) -> Any:
        """Reads the run file and resolves what it reads of the bundle."""
        raise NotImplementedError

    @property
    def words_in_job(self) -> tuple[str, ...]:
        """The words after `runner` that start the run in a job, without its folder."""
        raise NotImplementedError

    @property
    def kind_of_job(self) -> dict[str, bool]:
        """What its job's script must know: `of_command` and `resumes`, where they are not usual."""
        return {}

    def key_of_axis(self, axis: str) -> str:
        """`KEY=A,B` of --array with the whole key."""
        return axis

    def write_for_job(self, *, in_sweep: bool = False) -> None:
        """Leaves in the run folder what the job reads there; called before it is submitted.

        Args:
            in_sweep: it is a run of a sweep, which has what is the same for all in its own folder.
        """

    @fact
    def site(self) -> list[str]:
        """Where the Python of the ranks looks for modules, if that is this one.

        Raises:
            UsageError: it finds another torch of the site than it was made on.
        """
        where = [*sys.path]
        isolate(dict(self.environ), lambda _: None, where)
        check_site(where)
        return where

    @fact
    def verification(self) -> Verification:
        """Whether the bundle is verified; every fact about its content means something only then.

        Raises:
            UsageError: a file cannot be read: that must not be called damage.
            DamageError: the bundle is known to be damaged.
        """
        self.require(Run.site)
        check_readable(self.to_read)
        return verification(self.inputs.bundle, self.environ)

    @fact
    def mounts(self) -> str:
        """The text of `/proc/self/mounts`."""
        return read_mounts()

    @fact
    def partition(self) -> Partition:
        """The partition that it asks for, as Slurm shows it."""
        return ask_partition(self.config.slurm.partition)

    @fact
    def queue(self) -> Partition:
        """The partition, where the run is to become a job: not with --processes, nor inside one."""
        self.require(Run.ahead)
        inside = "SLURM_JOB_ID" in self.environ and not self.over
        if self.asked.processes is not None or inside or not self.partition.nodes:
            raise NotKnownError
        return self.partition

    @fact
    def over(self) -> Sequence[UsageError]:
        """The error of a shell whose job is over; empty: it is not."""
        return [error for error in (over_job(self.environ),) if error]

    @fact
    def ahead(self) -> bool:
        """That nothing starts now."""
        if not self.asked.ahead:
            raise NotKnownError
        return True

    @fact
    def starts(self) -> RankCount:
        """The ranks that start now."""
        if self.asked.ranks is None:
            raise NotKnownError
        return self.asked.ranks

    @fact
    def ranks(self) -> RankCount:
        """How many ranks there will be, and where."""
        slurm, asked = self.config.slurm, self.asked
        if not asked.has_ranks:
            raise NotKnownError
        if asked.ranks is not None:
            return asked.ranks
        on_node = ranks_on_node(slurm)
        if asked.processes is None:
            return RankCount(slurm.nodes * on_node, on_node, "queue")
        if self.partition.nodes or slurm.gpus_per_node:
            return RankCount(asked.processes, on_node, "queue")
        return RankCount(asked.processes, asked.processes, "here")

    @fact
    def has_own_torch(self) -> bool:
        """Whether the ranks use the torch that is installed here."""
        in_container = self.ranks.where == "job" and self.config.slurm.around_ranks
        return self.config.environment is None and not in_container

    @fact
    def accelerators(self) -> list[str]:
        """Lines on the accelerators of this machine, on which ranks start now.

        Raises:
            UsageError: accelerators are requested that the ranks cannot use.
        """
        on_node, own_torch = self.starts.on_node, self.has_own_torch
        return devices.notes(self.config.slurm, on_node, self.environ, own_torch=own_torch)

    @fact
    def device(self) -> Device:
        """The device of each rank; in a job that is not there yet, the best that it could get."""
        ranks, slurm = self.ranks, self.config.slurm
        if ranks.where == "queue":
            memory = memory_on_node(slurm, self.partition, self.environ)
            found = devices.of_job(slurm, self.partition.nodes, ranks.on_node, *memory)
        else:
            found = devices.here(ranks.on_node, self.environ, own_torch=self.has_own_torch)
        if found is None:
            raise NotKnownError
        return found

    @fact
    def python_of_ranks(self) -> tuple[str, ...] | None:
        """The words that start the Python of the ranks here; empty: this one; None: not here."""
        return python_of_ranks(self.config, self.inputs)

    @fact
    def why_not_here(self) -> str:
        """Why the ranks' Python cannot build a model here; empty: it can."""
        if self.python_of_ranks is None:
            return "they run another environment than this command"
        lacks = "" if self.python_of_ranks else lacking()
        return f"{lacks} not installed here" if lacks else ""

    @fact
    def request(self) -> SbatchRequest:
        """What its job requests of Slurm.

        Raises:
            UsageError: `slurm.time` is none.
        """
        return self.request_for(())

    def request_for(self, sweep: tuple[Member, ...]) -> SbatchRequest:
        """What the job of a sweep requests of Slurm; of no members: of this run alone."""
        words, kind = self.words_in_job, self.kind_of_job
        return request(self.config, self.folder, words, self.partition, sweep, **kind)

    @fact
    def shell(self) -> Attempt:
        """The job's own shell, which runs beside the checks; `Attempt.found` waits for it."""
        self.require(Run.site, Run.queue)
        if not self.asked.tries_shell:
            raise NotKnownError
        return Attempt(
            self.request,
            self.config,
            self.inputs,
            self.packages,
            self.python_of_ranks,
            self.partition.nodes,
            self.overrides,
            self.environ,
        )

    @fact
    def slurm_answer(self) -> SlurmAnswer:
        """What Slurm says of the job, without submitting it.

        Raises:
            UsageError: Slurm would refuse it.
            IncompleteError: Slurm does not answer.
        """
        if self.asked.submits:
            raise NotKnownError
        return ask_slurm(self.request, self.partition)

    @fact
    def held(self) -> str:
        """One line on the launcher that trains in the run folder now; empty: there is none."""
        if self.asked.submits:  # it refuses to
            raise NotKnownError
        holder = holder_of(self.folder, RunLock.me(self.environ))
        if holder is None:
            return ""
        return f"{self.folder.root}: {holder.describe()} trains there now; `train` would be refused"
