"""The run file: what to train, on which data, and how.

`runs/x.yaml` (+ `--set key=value`, + the user's ds_config.json) -> `RunConfig`, frozen and checked.
Each component has its own dataclass, the table of its keys. Each default has a reason;
`RunConfig.explain` lists the defaults that the user did not set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from runner.config import ds_config
from runner.config.data import DatasetConfig, EvaluationConfig, PackingConfig
from runner.config.engine import (
    BatchConfig,
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    OptimizerConfig,
    QuantizationConfig,
    ScheduleConfig,
    check_lora,
    check_offload,
    check_optimizer,
)
from runner.config.fields import (
    NAMES_ELSEWHERE,
    Choice,
    check_unused_keys,
    every_key,
    override,
    task_names,
    those_with,
    unused_keys,
)
from runner.config.job_config import (
    FORMAT,
    LENGTH,
    NO_RESULT,
    OF_COMMANDS,
    Auto,
    JobConfig,
    name_of_file,
)
from runner.config.task_keys import keys_of_task
from runner.from_stage import (
    HIDDEN,
    RUN_FILE,
    DamageError,
    Lines,
    Reader,
    UsageError,
    dotted,
    lookup,
    nearest_name,
    quoted,
    reading_yaml,
    setting,
    suggest,
    suggest_path,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and its first weights.

    `init` is `pretrained` (the asset's weights), `scratch` (random weights), or a folder with a
    model that another run exported.
    """

    asset: str = setting()
    init: Literal["pretrained", "scratch"] | str = setting(
        "pretrained", "the asset's own weights", is_path=True
    )

    @property
    def folder(self) -> Path | None:
        """The folder of the first weights; None: they are the asset's, or random."""
        return None if self.init in ("pretrained", "scratch") else Path(self.init)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What is added to the model's vocabulary.

    Attributes:
        add_tokens: are found in texts; a tokenizer that lowers letters finds them in any case.
        add_special_tokens: as they stand, and left out when a text is decoded without special ones.
    """

    add_tokens: tuple[str, ...] = setting(
        (), "the model's own vocabulary", only=those_with("add_tokens")
    )
    add_special_tokens: tuple[str, ...] = setting(
        (), "the model's own special tokens", only=those_with("add_special_tokens")
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """The settings of one training. `RunConfig.load` reads them.

    Attributes:
        theirs: those of `given` that the user's ds_config.json sets.
        autos: keys that it leaves to the run file.
        deepspeed: settings of the user's ds_config.json that are no keys of the run file. They go
            to DeepSpeed unchanged.
        accumulation: `gradient_accumulation_steps` of the user's ds_config.json; None: free.
        half: what `precision: auto` may become beside fp32, the best first.
        notes: choices that follow from other keys, or were made while the ds_config.json was read.
    """

    task: str = setting(
        takes=task_names, like="task: masked-lm. A program of your own: command: python YOURS.py"
    )
    model: ModelConfig = setting()
    dataset: DatasetConfig | None = setting(None)
    datasets: tuple[DatasetConfig, ...] = setting(())
    tokenizer: TokenizerConfig = setting(TokenizerConfig)
    packing: PackingConfig = setting(PackingConfig)
    sequence_length: int | Auto = setting(
        "auto", "the model's own, 512 at most", at_least=8, only=those_with("sequence_length")
    )
    epochs: float | None = setting(
        3.0, "the usual number of passes for fine-tuning", above=0, decides=LENGTH
    )
    steps: int | None = setting(None, "follows from the epochs", at_least=1, decides=LENGTH)
    batch: BatchConfig = setting(BatchConfig)
    optimizer: OptimizerConfig = setting(OptimizerConfig)
    schedule: ScheduleConfig = setting(ScheduleConfig)
    label_smoothing: float = setting(0.0, "the labels as they are", at_least=0, below=1)
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto", "bf16 where the device has it, then fp16"
    )
    activation_checkpointing: bool = setting(
        False, "a third slower; only for what does not fit otherwise"
    )
    compile: bool = setting(False, "takes minutes at start, and a compiler on the compute nodes")
    masked_share: float = setting(
        0.15, "as BERT", above=0, below=1, only=those_with("masked_share")
    )
    whole_words: bool = setting(
        False, "each token is masked by itself, as BERT", only=those_with("whole_words")
    )
    engine: EngineConfig = setting(EngineConfig)
    lora: LoraConfig | None = setting(None, "every weight is trained")
    quantization: QuantizationConfig | None = setting(None, "weights in the precision above")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, decides=NO_RESULT)
    evaluation: EvaluationConfig = setting(EvaluationConfig)
    wandb: bool = setting(
        False, "TensorBoard's files and metrics.jsonl have the same", decides=NO_RESULT
    )
    seed: int = setting(42, "any number will do", at_least=0, below=2**63)
    theirs: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    autos: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    deepspeed: Mapping[str, Any] = field(default_factory=dict, metadata=HIDDEN)
    accumulation: int | None = field(default=None, metadata=HIDDEN)
    half: tuple[str, ...] = field(default=ds_config.HALF, metadata=HIDDEN)
    notes: tuple[Choice, ...] = field(default=(), metadata=HIDDEN)

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The datasets of `dataset` or `datasets`; never empty."""
        return (self.dataset,) if self.dataset is not None else self.datasets

    @staticmethod
    def load(
        path: Path,
        overrides: Sequence[str] = (),
        find_more: Callable[[RunConfig, set[str]], object] | None = None,
    ) -> RunConfig:
        """Reads a run file.

        Args:
            path: the YAML file.
            overrides: `a.b=value` texts, as given with `--set`; each value is read as YAML.
            find_more: called if there are mistakes, to raise those that only the bundle shows. It
                gets the settings and the dotted keys whose values are not known.

        Raises:
            UsageError: all mistakes, with file:line: wrong values, settings that this version does
                not support, and contradictions between the run file and the user's ds_config.json.
        """
        with reading_yaml(path, RUN_FILE) as (data, lines):
            override(data, lines, overrides)
            lines.check_format(data, FORMAT)
            _check_is_training(data, lines)
            merged = ds_config.merge(data, lines)
            reader = Reader(lines, NAMES_ELSEWHERE)
            config = replace(
                reader.read(RunConfig, data),
                path=Path(path),
                given=frozenset(map(dotted, (*lines.numbers, *lines.elsewhere))),
                theirs=merged.keys,
                autos=merged.autos,
                deepspeed=merged.rest,
                accumulation=merged.accumulation,
                half=merged.half,
                notes=merged.notes,
                lines=lines,
            )
            config = _completed(config, reader)
            _check(config, reader.wrong)
            if lines.mistakes.found and find_more is not None:
                with lines.mistakes, suppress(DamageError):  # the file's own mistakes come first
                    find_more(config, reader.wrong)
            return config

    def explain(self) -> list[Choice]:
        """Returns every default in use with its reason, in the file's order; then all notes."""
        name = self.their_file
        noted = {note.key for note in self.notes}
        taken = [
            Choice(key, lookup(self, key), f"from {name}", name)
            for key in self.theirs
            if key not in noted
        ]
        given = {*self.given, "steps" if self.steps is None else "epochs"}
        own = {
            dotted(where): Choice(dotted(where), value, key.why)
            for where, key, value in every_key(self)
            if key.why and where[0] not in ("slurm", "datasets") and dotted(where) not in given
        }
        reasons = {key: choice.reason for key, choice in own.items()}
        reasons |= {note.key: note.reason for note in self.notes}
        filled = [
            Choice(key, value, reasons.get(key, "as the run file says"), f'"auto" in {name}')
            for key in self.autos
            if (value := lookup(self, key)) != "auto"
        ]
        skip = {dotted(where) for where, _, _ in unused_keys(self)}
        skip |= {choice.key for choice in filled}
        if not any(source.holds_out for source in self.sources):
            skip.add("dataset.validation_seed")
        notes = [note for note in self.notes if note.key not in self.autos]
        return [
            *(choice for key, choice in own.items() if key not in {*skip, *noted}),
            *(note for note in notes if not note.group),
            *taken,
            *(note for note in notes if note.group),
            *filled,
        ]

    @property
    def their_file(self) -> str:
        """The name of the user's ds_config.json; empty: there is none."""
        return Path(self.engine.config or "").name

    def as_said(self, key: str) -> str:
        """Describes the file in which the user set a key."""
        return f"as {self.their_file} says" if key in self.theirs else "as the run file says"

    def how_to_set(self, key: str, value: object) -> str:
        """Describes how to give a key another value, in the run file or the ds_config.json."""
        if key not in self.theirs:
            return f"Set {key}: {value}"
        theirs = ds_config.their_key(key)
        return f'Write "auto" for {theirs} in {self.engine.config}, and set {key}: {value}'


def _check_is_training(data: dict[str, Any], lines: Lines) -> None:
    """Refuses what belongs to the run of a command, before the keys are read.

    Raises:
        UsageError: the file has `command:`.
    """
    if "command" in data:
        raise UsageError(
            "this is for a training (`task:`), and `command:` runs a program of yours.",
            f"runner check {quoted(lines.path)} and runner submit {quoted(lines.path)} are for "
            "both.",
            place=lines.place("command"),
        )
    near = next((key for key in data if nearest_name(str(key), ("command",))), None)
    if "task" not in data and near is not None:
        raise UsageError(
            f"unknown key `{near}`.", "Did you mean `command`?", place=lines.place(near)
        )
    for key in [key for key in OF_COMMANDS if key in data]:
        with lines.mistakes:
            del data[key]
            raise UsageError(
                f"`{key}` goes with `command:`, the run of a program of yours; this is a training.",
                "Remove it.",
                place=lines.place(key),
            )


def _completed(config: RunConfig, reader: Reader) -> RunConfig:
    """Sets the defaults that follow from other keys, and the folder of the first weights."""
    notes = []
    config = replace(config, name=name_of_file(config, reader))
    if config.steps is not None and "epochs" not in config.given:
        config = replace(config, epochs=None)
    if config.optimizer.name == "lion" and "optimizer.betas" not in config.given:
        config = replace(config, optimizer=replace(config.optimizer, betas=(0.9, 0.99)))
        notes.append(Choice("optimizer.betas", (0.9, 0.99), "Lion's own"))
    if config.evaluation.patience is not None and "checkpoint.best" not in config.given:
        # The last weights are then, by definition, not the best.
        config = replace(config, checkpoint=replace(config.checkpoint, best=True))
        reason = "evaluation.patience: the lowest validation loss is what is exported"
        notes.append(Choice("checkpoint.best", True, reason))
    if config.model is not None and config.model.folder is not None:
        folder = (config.path.parent / config.model.folder).resolve()
        with config.lines.mistakes:
            _check_first_weights(config, folder)
        config = replace(config, model=replace(config.model, init=str(folder)))
    return replace(config, notes=(*notes, *config.notes))


def _check_first_weights(config: RunConfig, folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder} has an adapter alone, not a model.",
            "Make that run export a whole model: set lora.merge: true in its run file, remove its "
            "model/, and run the same command again. It needs its last checkpoint.",
            place=config.place("model.init"),
        )
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"`{config.model.init}` is neither `pretrained` "
            f"nor `scratch` nor a folder with a model in it ({folder}).",
            suggest(config.model.init, ("pretrained", "scratch"))
            or suggest_path(
                folder,
                "A folder is relative to the run file: the `model/` that another run exported.",
            ),
            place=config.place("model.init"),
        )


def _check(config: RunConfig, wrong: set[str]) -> None:
    """Checks values against each other. Keeps the mistakes.

    Args:
        wrong: dotted keys whose values are not known. What depends on them is not checked.
    """
    check_unused_keys(config, wrong, config.lines)
    unknown = {key.partition(".")[0] for key in wrong}
    for sections, check in _CHECKS:
        if unknown.isdisjoint(sections):
            with config.lines.mistakes:
                check(config, config.lines)


def _check_length(config: RunConfig, lines: Lines) -> None:
    if config.epochs is not None and config.steps is not None:
        raise UsageError(
            "`epochs` and `steps` are both given.", "Keep one of them.", place=lines.place("steps")
        )
    if config.epochs is None and config.steps is None:
        raise UsageError(
            "neither `epochs` nor `steps` is given.",
            "Give one of them.",
            place=lines.place("epochs"),
        )


def _check_datasets(config: RunConfig, lines: Lines) -> None:
    if bool(config.dataset) == bool(config.datasets):
        both = "`dataset` and `datasets` are both given"
        what = both if config.dataset else "`dataset` is missing"
        raise UsageError(f"{what}.", "Give one of them.", place=lines.place("datasets"))
    for number, source in enumerate(config.sources):
        with lines.mistakes:
            where = ("dataset",) if config.dataset else ("datasets", number)
            keys_of_task(config.task).check_dataset(source, where, lines)


def _check_tokens(config: RunConfig, lines: Lines) -> None:
    tokens = [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    for token in {token for token in tokens if not token.strip() or tokens.count(token) > 1}:
        with lines.mistakes:
            what = "is there twice" if token.strip() else "is no token: it is empty"
            raise UsageError(f"`{token}` {what}.", "Remove it.", place=lines.place("tokenizer"))
    if tokens and config.lora is not None:
        raise UsageError(
            "new tokens do not go with `lora`: it does not train the "
            "embedding, so their random first values would never change.",
            "Remove `lora`, or the new tokens.",
            place=lines.place("tokenizer"),
        )


# The sections that a check reads -> the check.
_CHECKS: tuple[tuple[tuple[str, ...], Callable[[RunConfig, Lines], None]], ...] = (
    (("epochs", "steps"), _check_length),
    (("task", "dataset", "datasets"), _check_datasets),
    (("tokenizer", "lora"), _check_tokens),
    (("engine",), lambda config, lines: check_offload(config.engine, lines)),
    (
        ("engine", "optimizer"),
        lambda config, lines: check_optimizer(config.engine, config.optimizer, lines),
    ),
    (
        ("engine", "lora", "model", "quantization"),
        lambda config, lines: check_lora(
            config.lora, config.quantization, config.engine, config.model.init, lines
        ),
    ),
)
