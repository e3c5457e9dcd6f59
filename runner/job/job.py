"""One job: a run file, the inputs that it names, and its run folder. Built once by a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner import inputs as inputs_module
from runner.config.explain import choices_as_comments
from runner.config.run_config import RunConfig
from runner.errors import OTHER_RUN, quoted
from runner.inputs import Inputs
from runner.job.partition import Partition, ask_partition
from runner.run_folder.history import changed_since, describe_finished
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import RunLock, holder_of


@dataclass(frozen=True)
class Job:
    """A run file, the inputs that it names, and its run folder.

    Attributes:
        bundle: the bundle's folder, as the user wrote it.
        overrides: the `--set` texts.
        partitions: those that Slurm was asked for.
    """

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    bundle: Path
    overrides: tuple[str, ...]
    partitions: dict[str | None, Partition] = field(default_factory=dict, compare=False)

    @staticmethod
    def load(run_file: Path, bundle: Path, output: Path | None, overrides: Sequence[str]) -> Job:
        """Reads the run file and resolves its assets.

        Raises:
            UsageError: as for `RunConfig.load` and `inputs.resolve`, all of them together; the run
                folder is inside the bundle.
            DamageError: as for `inputs.resolve`.
        """
        config = RunConfig.load(
            run_file, overrides, lambda c, wrong: inputs_module.resolve_known(c, bundle, wrong)
        )
        inputs = inputs_module.resolve(config, bundle)
        folder = RunFolder((output or Path("output") / config.name).absolute())
        inputs_module.check_not_inside(folder.root, inputs.bundle)
        return Job(config, inputs, folder, bundle, tuple(overrides))

    @property
    def partition(self) -> Partition:
        """The partition that it asks for; Slurm is asked once a command."""
        wanted = self.config.slurm.partition
        if wanted not in self.partitions:
            self.partitions[wanted] = ask_partition(wanted)
        return self.partitions[wanted]

    def command(self, name: str) -> str:
        """The command `runner NAME` for this run, to be typed."""
        words = ["runner", name, self.config.path, "--bundle", self.bundle]
        for override in self.overrides:
            words += ["--set", override]
        if self.folder.root != (Path("output") / self.config.name).absolute():
            words += ["--output", self.folder.root]
        return " ".join(map(quoted, words))

    def member(self, name: str, overrides: Sequence[str]) -> Job:
        """A run of a sweep, in a folder below this one's."""
        every = (*self.overrides, *overrides)
        made = Job.load(self.config.path, self.bundle, self.folder.root / name, every)
        return replace(made, partitions=self.partitions)

    def held(self, environ: Mapping[str, str]) -> list[str]:
        """One line on the launcher that trains in the run folder now; empty if there is none."""
        holder = holder_of(self.folder, RunLock.me(environ))
        if holder is None:
            return []
        return [
            f"{self.folder.root}: {holder.describe()} trains there now; `train` would be refused"
        ]

    def finished(self) -> list[str]:
        """What `check`, `submit` and `train` print if this run has done all its steps; else empty.

        It is no error: a job that is started again has nothing left to do.
        """
        line = describe_finished(self.folder, self.config)
        if line is None:
            return []
        lines = [f"{self.folder.root}: {line}"]
        if changed := changed_since(self.folder, self.config):
            what = f"nothing is trained with what has changed since: {', '.join(changed)}"
            lines.append(f"warning: {what}\n  -> To train with it, give the run {OTHER_RUN}")
        return [
            *lines,
            "  -> Ask for more steps or epochs to continue it; or start again under another name. "
            "To export the model again, remove model/ first.",
        ]

    def write_config(self) -> None:
        """Writes config.yaml: the run file with all values, and comments on automatic choices."""
        text = f"{self.config.to_yaml()}{choices_as_comments(self.config.explain())}"
        self.folder.config.write_text(text, encoding="utf-8")
