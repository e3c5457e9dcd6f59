"""A training run: `Run` with the facts that follow from the model, the data and the plan.

The functions before it compare a run with the one that is in its run folder, and that it would
continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner import inputs as inputs_module
from runner.config.fields import Choice, choices_as_comments
from runner.config.run_config import RunConfig
from runner.data.prepare import store_path
from runner.data.recipe import Recipe, data_key, documents_of, recipes
from runner.errors import OTHER_RUN
from runner.from_stage import as_shown, check_libraries
from runner.inputs import Inputs
from runner.job.access import disk_needed, files_to_read
from runner.job.findings import Finding, NotKnownError, attempt, fact, note
from runner.job.installed import (
    Packages,
    for_tokenizer,
    is_installed,
    missing_tools,
    to_prepare,
    to_train,
)
from runner.job.model_probe import Look, LookResult, look_at_model, look_at_texts
from runner.job.plan import DEFAULT_GLOBAL, TrainingPlan, decide, num_steps, sequence_length
from runner.job.run import NO_RANKS, Asked, RankCount, Run
from runner.job.run_data import to_count
from runner.job.shapes import (
    Device,
    ModelShape,
    check_files,
    check_model,
    embedding_rows,
    outline_of,
    shape_of,
    weight_shapes,
)
from runner.run_folder.history import (
    History,
    changed_since,
    changes,
    describe_finished,
    history_of,
)
from runner.run_folder.layout import RunFolder
from runner.run_folder.resume import check_before_launch, signature
from runner.tasks import task_named


def check_checkpoint(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    history: History | None,
    data: str,
    world_size: int | None,
) -> str | None:
    """Refuses a checkpoint of another run; returns a line on the checkpoint to be resumed.

    Args:
        config: the run file.
        inputs: its model and data.
        folder: the run folder.
        history: what it records.
        data: the key of the training data.
        world_size: the number of ranks; None: not known.

    Raises:
        UsageError: as for `check_before_launch`.
    """
    total = config.batch.total
    names = " or ".join(dict.fromkeys(f"`{source.asset}`" for source in inputs.datasets))
    return check_before_launch(
        folder.checkpoints,
        signature(config, inputs, data, total if isinstance(total, int) else None),
        world_size,
        _steps(config, history),
        config.engine.name,
        config.precision,
        _changed(config, history) or [f"other data of {names}"],
        _length_before(config, history),
    )


def note_changes(config: RunConfig, inputs: Inputs, history: History | None) -> Iterator[Finding]:
    """Yields notes on the bundle and settings that differ from those of the run to be resumed."""
    facts = history.facts if history else {}
    bundle = str(facts.get("bundle_id") or inputs.bundle_id)
    if bundle != inputs.bundle_id:
        what = f"this run was started with the bundle {as_shown(bundle)[:12]}, and goes on with "
        same = f"{inputs.bundle_id[:12]}: its model and training data are the same"
        yield note(f"{what}{same}")
    if (before := _length_before(config, history)) and config.schedule.name != "constant":
        what = f"this run was started with {before}; now its length is another. The learning rate"
        name = config.schedule.name
        yield note(f"{what} ({name}) depends on the length of the run; it changes from now on.")
    if changed := changed_since(history, config):
        what = f"from this start on, the run has other settings: {', '.join(changed)}"
        yield note(f"{what}. Its model card will name only the new ones.")


def _steps(config: RunConfig, history: History | None) -> int | None:
    """The number of steps that a run asks for; None: not known before its data are prepared.

    Args:
        config: the run file.
        history: of an earlier start. Only a run on the same data continues it, so its number of
            sequences holds for this one too.
    """
    if config.steps is not None:
        return config.steps
    facts: Any = history.facts if history else {}
    batch, sequences = facts.get("batch"), facts.get("num_sequences")
    total = config.batch.total
    if total == "auto" and isinstance(batch, dict):
        total = batch.get("global", "auto")
    if not (isinstance(total, int) and isinstance(sequences, int) and total > 0 < sequences):
        return None
    return num_steps(config, sequences, total)


def _length_before(config: RunConfig, history: History | None) -> str:
    """`KEY=VALUE` of what decided the steps of the earlier run, if it is another now."""
    known = changes(history, config)
    found = (f"{key}={known[key][0]}" for key in ("steps", "epochs") if key in known)
    return next((text for text in found if not text.endswith("=None")), "")


def _changed(config: RunConfig, history: History | None) -> list[str]:
    """Lists the keys that decide the training data and differ from the run to be resumed.

    Each entry has both values.
    """
    same = ("sequence_length", "packing", "dataset", "datasets")
    known = changes(history, config).items()
    found = [(key, *both) for key, both in known if key.split(".")[0] in same]
    found.sort(key=lambda one: one[0] != "sequence_length")
    return [f"{key} {old} (now {new})" for key, old, new in found]


class TrainingRun(Run):
    """A run that trains a model: what the commands around `runner train` read."""

    config: RunConfig
    inputs: Inputs

    @classmethod
    def load(
        cls,
        run_file: Path,
        bundle: Path,
        output: Path | None,
        overrides: Sequence[str],
        asked: Asked = NO_RANKS,
    ) -> TrainingRun:
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
        return TrainingRun(config, inputs, folder, bundle, tuple(overrides), asked)

    @fact
    def to_read(self) -> tuple[Path, ...]:
        """The bundle's files that the run reads: of its model, datasets and environment."""
        return files_to_read(self.inputs)

    @fact
    def packages(self) -> Packages:
        """What the ranks and their launcher import."""
        config, has_tokens = self.config, task_named(self.config.task).has_tokens
        of_tokenizer = for_tokenizer(self.inputs.model.digests) if has_tokens else ()
        return Packages(tuple(to_train(config)), tuple(to_prepare(config)), tuple(of_tokenizer))

    @fact
    def missing_tools(self) -> list[tuple[str, str]]:
        """What the run compiles with and is missing here, each with what fixes it."""
        return missing_tools(self.config)

    @property
    def words_in_job(self) -> tuple[str, ...]:
        """The words after `runner` that start the run in a job, without its folder."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        paths = [str(self.config.path.absolute()), "--bundle", str(self.bundle.absolute())]
        return ("train", *paths, *sets)

    @fact
    def reads_tables(self) -> bool:
        """Whether the library that reads the data is here.

        Raises:
            UsageError: it is not.
        """
        check_libraries(f"{self.config.path}: the check of its data", "pyarrow")
        return True

    @fact
    def outline(self) -> ModelShape:
        """The model's counts by its config.json alone, with the tokens that the run adds."""
        return outline_of(self.inputs.model)

    @fact
    def weight_shapes(self) -> Mapping[str, Sequence[int]] | None:
        """Name -> shape of the model's weights; None: it has none."""
        return weight_shapes(self.inputs.model)

    @fact
    def first_shapes(self) -> Mapping[str, Sequence[int]]:
        """Name -> shape of the asset's weights; empty: the run does not begin with them."""
        model = self.config.model
        if model.init != "pretrained" or model.folder is not None:
            return {}
        return self.weight_shapes or {}

    @fact
    def counted(self) -> int:
        """The parameters of a model without weights, as transformers counts them."""
        answer = self.model_answer
        if not answer.numbers or answer.numbers[0] is None:
            raise NotKnownError
        return answer.numbers[0]

    @fact
    def shape(self) -> ModelShape:
        """The model's counts; `num_parameters` is 0 where nothing here counts them.

        Raises:
            UsageError: the header of a file cannot be read, or a LoRA target matches no weight.
        """
        counted = 0 if self.weight_shapes is not None else self.known(TrainingRun.counted) or 0
        return shape_of(self.config, self.inputs.model, self.outline, self.weight_shapes, counted)

    @fact
    def chosen_length(self) -> tuple[int, Choice | None]:
        """Tokens of a sequence, and the choice where it is automatic.

        Raises:
            UsageError: they are more than the model's positions.
        """
        return sequence_length(self.config, self.outline)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.chosen_length[0]

    @fact
    def documents(self) -> Choice:
        """How documents become sequences.

        Raises:
            UsageError: not as the run file asks for it.
        """
        return documents_of(self.config, self.inputs.model, self.length)

    @fact
    def recipes(self) -> Mapping[str, tuple[Recipe, ...]]:
        """`train` and `validation` -> what decides the content of each store."""
        return recipes(self.config, self.inputs, self.length)

    @fact
    def stores(self) -> Mapping[str, tuple[Path, ...]]:
        """`train` and `validation` -> the files of the prepared data."""
        folder = self.folder.stores
        return {
            role: tuple(store_path(recipe, folder) for recipe in several)
            for role, several in self.recipes.items()
        }

    @fact
    def data(self) -> str:
        """The key of the training data."""
        return data_key(self.recipes["train"])

    @fact
    def plan(self) -> TrainingPlan:
        """What `auto` means on the devices.

        Raises:
            UsageError: the batch, the precision or the model's state is not possible there.
        """
        if not self.shape.num_parameters:
            raise NotKnownError
        number = self.ranks.world_size
        return decide(self.config, self.shape, self.chosen_length, self.device, number)

    @fact
    def decided(self) -> RunConfig:
        """The run file with the precision of the plan, as the arithmetic of memory needs it."""
        return replace(self.config, precision=self.plan.precision)  # type: ignore[arg-type]

    @fact
    def disk_needed(self) -> int:
        """The most bytes that the run writes; 0: not known."""
        return disk_needed(self.config, self.shape)

    @fact
    def history(self) -> History | None:
        """What the run folder records of earlier starts; None: nothing."""
        return history_of(self.folder)

    @fact
    def finished(self) -> list[str]:
        """What is printed if this run has done all its steps; else empty."""
        line = describe_finished(self.history, self.config)
        if line is None:
            return []
        lines = [f"{self.folder.root}: {line}"]
        if changed := changed_since(self.history, self.config):
            what = f"nothing is trained with what has changed since: {', '.join(changed)}"
            lines.append(f"warning: {what}\n  -> To train with it, give the run {OTHER_RUN}")
        return [
            *lines,
            "  -> Ask for more steps or epochs to continue it; or start again under another name. "
            "To export the model again, remove model/ first.",
        ]

    @fact
    def resumes(self) -> str | None:
        """A line on the checkpoint to be resumed; None: there is none.

        Raises:
            UsageError: the checkpoint is of another run.
        """
        ranks = self.known(Run.ranks)
        number = ranks.world_size if ranks is not None else None
        return check_checkpoint(
            self.config, self.inputs, self.folder, self.history, self.data, number
        )

    @fact
    def model_faults(self) -> tuple[Finding, ...]:
        """What is wrong with the model's files, and with the model for the task."""
        self.require(TrainingRun.verification)
        config, model = self.config, self.inputs.model
        for_task = attempt(check_model, config, model, self.outline)
        return (*for_task, *attempt(check_files, config, model, self.first_shapes))

    @fact
    def model_look(self) -> Look:
        """A child process that builds the model by transformers."""
        python = self.python_of_ranks
        if not self.asked.ahead or self.model_faults or python is None or self.why_not_here:
            raise NotKnownError
        return look_at_model(self.config, self.inputs.model, python)

    @fact
    def model_answer(self) -> LookResult:
        """What transformers says of the model; waits for it."""
        return self.model_look.answer()

    @fact
    def to_count(self) -> tuple[list[Recipe], bool]:
        """Splits so small that they may not fill a step; whether those to train on are all such."""
        total = self.config.batch.total
        number = total if isinstance(total, int) else DEFAULT_GLOBAL
        return to_count(self.recipes, self.folder.stores, number)

    @fact
    def texts_look(self) -> Look:
        """A child process that loads the tokenizer and, ahead, tokenises small datasets."""
        self.require(TrainingRun.reads_tables)
        python = self.python_of_ranks or ()
        if self.model_faults or not (python or is_installed("transformers")):
            raise NotKnownError
        rows = embedding_rows(self.outline, self.first_shapes)
        train = self.recipes["train"] if task_named(self.config.task).writes_chats else ()
        counted = self.to_count[0] if self.asked.ahead else []
        return look_at_texts(self.config, self.inputs, rows, train, counted, python)

    @fact
    def texts_answer(self) -> LookResult:
        """What transformers says of tokenizer and texts; waits for it."""
        return self.texts_look.answer()

    @fact
    def step_of_data(self) -> int:
        """The sequences of an epoch, where all that is trained on was counted."""
        numbers, (_, counts_all) = self.texts_answer.numbers, self.to_count
        if not (self.asked.ahead and numbers and counts_all) or None in numbers:
            raise NotKnownError
        return sum(number or 0 for number in numbers)

    def on(self, device: Device, number: int) -> TrainingRun:
        """This run on so many ranks, each with this device."""
        ranks = RankCount(number, number, "here")
        return self.given(Run.device, device).given(Run.ranks, ranks)

    def write_config(self) -> None:
        """Writes config.yaml: the run file with all values, and comments on automatic choices."""
        text = f"{self.config.to_yaml()}{choices_as_comments(self.config.explain())}"
        self.folder.config.write_text(text, encoding="utf-8")
