"""One job: a run file, the inputs that it names, and its run folder. Built once by a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner import inputs as inputs_module
from runner.config.explain import choices_as_comments
from runner.config.run_config import RunConfig
from runner.inputs import Inputs
from runner.job import node_local, preflight
from runner.job.findings import Findings
from runner.job.shapes import Device
from runner.run_folder.history import changed_since, describe_finished
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import RunLock, holder_of


@dataclass(frozen=True)
class Job:
    """A run file, the inputs that it names, and its run folder.

    Attributes:
        bundle: the bundle's folder, as the user wrote it.
        overrides: the `--set` texts.
    """

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    bundle: Path
    overrides: tuple[str, ...]

    @staticmethod
    def load(run_file: Path, bundle: Path, output: Path | None, overrides: Sequence[str]) -> Job:
        """Reads the run file and resolves its assets.

        Raises:
            UsageError: as for `RunConfig.load` and `inputs.resolve`, all of them together; the run
                folder is inside the bundle.
            DamageError: as for `inputs.resolve`.
        """
        config = RunConfig.load(
            run_file, overrides, lambda c, wrong: inputs_module.find_mistakes(c, bundle, wrong)
        )
        inputs = inputs_module.resolve(config, bundle)
        folder = RunFolder((output or Path("output") / config.name).absolute())
        inputs_module.check_not_inside(folder.root, inputs.bundle)
        return Job(config, inputs, folder, bundle, tuple(overrides))

    def check(
        self,
        world_size: int | None,
        say: Callable[[str], None],
        device: Device | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        """Checks that the run can work, and reports what it finds.

        Args:
            world_size: the number of ranks. None: not known.
            device: the device of a rank. None: not known.
            verbose: whether the details are reported, too.

        Raises:
            StageError: it cannot work.
        """
        found = self.examine(world_size, device)
        found.raise_errors()
        details = found.details if verbose else []
        for line in (*found.lines, *details, *map(str, found.others)):
            say(line)

    def examine(
        self, world_size: int | None, device: Device | None = None, *, with_texts: bool = False
    ) -> Findings:
        """Finds all that can be known before the run; arguments: see `preflight.examine`."""
        found = preflight.examine(
            self.config, self.inputs, self.folder, world_size, device, with_texts=with_texts
        )
        if self.config.environment is not None and self.inputs.environment is not None:
            with found.keeping():
                wanted = self.config.environment.node_local
                found.lines.append(node_local.preview(wanted, self.inputs.environment))
        return found

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
            lines.append(
                f"warning: nothing is trained with what has changed since: {', '.join(changed)}\n"
                "  -> To train with it, choose another run folder: --output FOLDER"
            )
        return [
            *lines,
            "  -> Ask for more steps or epochs to continue it; or start again with another name or "
            "--output. To export the model again, remove model/ first.",
        ]

    def write_config(self) -> None:
        """Writes config.yaml: the run file with all values, and comments on automatic choices."""
        text = f"{self.config.to_yaml()}{choices_as_comments(self.config.explain())}"
        self.folder.config.write_text(text, encoding="utf-8")
