"""The run file: what to train, on which data, and how.

`runs/x.yaml` (+ `--set key=value`, + the user's ds_config.json) -> `RunConfig`, frozen and checked.
Each component has its own dataclass. Each default has a reason. `RunConfig.explain` lists the
defaults that the user did not set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.config import deepspeed as config_deepspeed
from runner.config.checkpoint import CheckpointConfig, check_interval
from runner.config.data import (
    DatasetConfig,
    EvaluationConfig,
    PackingConfig,
    check_datasets,
    unused_keys,
)
from runner.config.engine import (
    KEYS_OF_ENGINES,
    BatchConfig,
    EngineConfig,
    OptimizerConfig,
    ScheduleConfig,
    check_engine,
    check_schedule,
    keys_not_of,
)
from runner.config.fields import Choice, defaults, lookup, plain, read, replaced, setting
from runner.config.lora import LoraConfig, QuantizationConfig, check_lora
from runner.config.masking import check_masking, keys_not_masked
from runner.config.overrides import override
from runner.config.vocabulary import TokenizerConfig, check_tokens
from runner.errors import (
    RUN_FILE,
    DamageError,
    Lines,
    UsageError,
    reading_yaml,
    suggest,
    suggest_path,
)

FORMAT = 1
Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """Which bundle a run may read.

    Attributes:
        id: the bundle's id, 64 hex digits; None: any bundle.
        verified: whether `stage verify` must have found the bundle sound on this machine, and
            nothing changed since.
    """

    id: str | None = setting(None, "the bundle of --bundle; its id is recorded")
    verified: Literal["optional", "required"] = setting(
        "optional", "its state is printed, not required"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and its first weights.

    `init` is `pretrained` (the asset's weights), `scratch` (random weights), or a folder with a
    model that another run exported.
    """

    asset: str = setting()
    init: Literal["pretrained", "scratch"] | str = setting(
        "pretrained", "the asset's own weights", path=True
    )

    @property
    def folder(self) -> Path | None:
        """The folder of the first weights; None: they are the asset's, or random."""
        return None if self.init in ("pretrained", "scratch") else Path(self.init)


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `runner submit` requests from Slurm."""

    partition: str | None = setting(None, "the site's default")
    nodes: int = setting(1, "one node", at_least=1)
    gpus_per_node: int = setting(0, "none asked for", at_least=0)
    tasks_per_node: int | Auto = setting(
        "auto", "one for each GPU; one where there is none", at_least=1
    )
    time: str | None = setting(None, "the site's default")
    modules: tuple[str, ...] = setting((), "none")
    setup: tuple[str, ...] = setting((), "nothing")
    container: tuple[str, ...] = setting((), "none: the ranks run on the node as it is", path=True)
    options: dict[str, str | int | float | bool] = setting(dict, "none")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Which environment of the bundle runs the ranks, and whether it runs from each node's disk."""

    asset: str = setting()
    node_local: bool | Auto = setting("auto", "from each node's own disk instead of a network disk")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of one run. `RunConfig.load` reads them.

    Attributes:
        path: the run file.
        given: dotted keys that the user set: in the run file, with `--set`, or in a ds_config.json.
        theirs: those of `given` that the user's ds_config.json sets.
        deepspeed: settings of the user's ds_config.json that are no keys of the run file. They go
            to DeepSpeed unchanged.
        accumulation: `gradient_accumulation_steps` of the user's ds_config.json; None: not set.
        notes: choices made while the ds_config.json was read.
        lines: the run file's line numbers, for messages.
    """

    format: int = setting()
    name: str = setting("auto", "the run file's name")
    task: Literal[
        "masked-lm",
        "causal-lm",
        "instruction",
        "text-classification",
        "token-classification",
        "image-classification",
    ] = setting(like="task: masked-lm. A loss of your own: runner exec -- python YOURS.py")
    bundle: BundleConfig = setting(BundleConfig)
    model: ModelConfig = setting()
    dataset: DatasetConfig | None = setting(None)
    datasets: tuple[DatasetConfig, ...] = setting(())
    tokenizer: TokenizerConfig = setting(TokenizerConfig)
    packing: PackingConfig = setting(PackingConfig)
    sequence_length: int | Auto = setting("auto", "the model's own, 512 at most", at_least=8)
    epochs: float | None = setting(3.0, "the usual number of passes for fine-tuning", above=0)
    steps: int | None = setting(None, "follows from the epochs", at_least=1)
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
    masked_share: float = setting(0.15, "as BERT", above=0, below=1)
    whole_words: bool = setting(False, "each token is masked by itself, as BERT")
    engine: EngineConfig = setting(EngineConfig)
    lora: LoraConfig | None = setting(None, "every weight is trained")
    quantization: QuantizationConfig | None = setting(None, "weights in the precision above")
    environment: EnvironmentConfig | None = setting(None, "the environment that runs this command")
    checkpoint: CheckpointConfig = setting(CheckpointConfig)
    evaluation: EvaluationConfig = setting(EvaluationConfig)
    wandb: bool = setting(False, "TensorBoard's files and metrics.jsonl have the same")
    hang_after: float | Auto = setting(
        "auto", "ten times the longest silence so far; 300 s at least", above=0
    )
    seed: int = setting(42, "any number will do", at_least=0, below=2**63)
    slurm: SlurmConfig = setting(SlurmConfig)
    path: Path = field(default=Path("run.yaml"))
    given: frozenset[str] = field(default=frozenset())
    theirs: frozenset[str] = field(default=frozenset())
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Choice, ...] = field(default=())
    accumulation: int | None = field(default=None)
    lines: Lines = field(default_factory=lambda: Lines(Path("run.yaml")), compare=False, repr=False)

    def place(self, key: str) -> str:
        """`file:line` of a dotted key; of the nearest key around it if the user did not set it."""
        return self.lines.place(*(int(k) if k.isdecimal() else k for k in key.split(".")))

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The datasets of `dataset` or `datasets`; never empty."""
        return (self.dataset,) if self.dataset is not None else self.datasets

    @staticmethod
    def load(
        path: Path,
        overrides: Sequence[str] = (),
        find_more: Callable[[RunConfig, frozenset[str]], object] | None = None,
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
        with reading_yaml(path, RUN_FILE) as (data, in_file):
            data, lines = override(data, in_file, overrides)
            if type(data.get("format")) is int:  # else `read` finds the mistake
                lines.check_format(data["format"], FORMAT)
            found = read(RunConfig, data, (), lines)
            config = replace(found.value, path=Path(path), given=found.given, lines=lines)
            if config.name == "auto":
                config = replace(config, name=Path(path).stem)
            if config.steps is not None and "epochs" not in found.given:
                config = replace(config, epochs=None)
            config = _checked(_with_best(_with_optimizers_own(config)), found.wrong, lines)
            if lines.mistakes.found and find_more is not None:
                with lines.mistakes, suppress(DamageError):  # the file's own mistakes come first
                    find_more(config, found.wrong)
            return config

    def explain(self) -> list[Choice]:
        """Returns every default in use with its reason, in the file's order; then `notes`."""
        skip = {note.key for note in self.notes} | set(unused_keys(self.task, self.sources))
        skip |= {"slurm", "steps" if self.steps is None else "epochs"}
        skip |= {*keys_not_of(self.optimizer.name), *keys_not_masked(self.task)}
        skip |= {
            f"engine.{key}"
            for name, keys in KEYS_OF_ENGINES.items()
            if name != self.engine.name
            for key in keys
        }
        if self.schedule.name != "wsd":
            skip.add("schedule.decay")
        if self.quantization and self.quantization.bits == 8:
            skip |= {"quantization.type", "quantization.double"}
        choices = [
            c
            for c in defaults(self, (), self.given)
            if c.key not in skip and not c.key.startswith("slurm.")
        ]
        return [*choices, *self.notes]

    def as_said(self, key: str) -> str:
        """Describes the file in which the user set a key."""
        theirs = Path(self.engine.config or "").name
        return f"as {theirs} says" if key in self.theirs else "as the run file says"

    def how_to_set(self, key: str, value: object) -> str:
        """Describes how to give a key another value, in the run file or the ds_config.json."""
        if key not in self.theirs:
            return f"Set {key}: {value}"
        theirs = config_deepspeed.their_key(key)
        return f'Write "auto" for {theirs} in {self.engine.config}, and set {key}: {value}'

    def to_mapping(self) -> dict[str, Any]:
        """Returns the settings as YAML data with all defaults: the content of a run file."""
        data: dict[str, Any] = plain(self)
        return data

    def to_yaml(self) -> str:
        """Returns the text of `config.yaml` in a run folder."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)


def _checked(config: RunConfig, wrong: frozenset[str], lines: Lines) -> RunConfig:
    """Checks values against each other and merges the user's ds_config.json.

    Args:
        wrong: dotted keys whose values are not known. What depends on them is not checked.
    """
    unknown = {key.partition(".")[0] for key in wrong}
    doubtful = set[str]()
    for keys, check in _CHECKS:
        before = len(lines.mistakes.found)
        if unknown.isdisjoint(keys):
            with lines.mistakes:
                check(config, lines)
        if len(lines.mistakes.found) > before:
            doubtful.update(keys)
    unknown |= doubtful
    if "model" not in unknown:
        with lines.mistakes:
            config = _with_first_weights(config, lines)
    merged = {key.partition(".")[0] for key in config_deepspeed.RUN_FILE_KEYS}
    if unknown.isdisjoint(merged):
        unknown |= merged  # until the merge succeeds
        with lines.mistakes:
            config = _with_their_config(config, lines)
            unknown -= merged
    if unknown.isdisjoint(("engine", "lora", "model", "quantization")):
        with lines.mistakes:
            check_lora(config, lines)
    return config


LONGEST_NAME = 200
"""Bytes. Names on a disk have 255 at most, and folders beside a run's have longer names."""


def _check_names(config: RunConfig, lines: Lines) -> None:
    if not re.fullmatch(r"[\w][\w.+-]*", config.name):
        raise UsageError(
            f"{lines.place('name')}: `{config.name}` cannot be the name of the run folder.",
            "A name has letters, digits, `.`, `_`, `-` and `+`, and begins with a letter or digit.",
        )
    if len(config.name.encode()) > LONGEST_NAME:
        raise UsageError(
            f"{lines.place('name')}: `name` has {len(config.name)} characters, and a folder is "
            "called so.",
            f"Give a shorter one, of at most {LONGEST_NAME}.",
        )


def _check_bundle_id(config: RunConfig, lines: Lines) -> None:
    if config.bundle.id is not None and not re.fullmatch(r"[0-9a-f]{64}", config.bundle.id):
        raise UsageError(
            f"{lines.place('bundle', 'id')}: `{config.bundle.id}` is not a bundle id, "
            "64 hex digits.",
            "`stage show BUNDLE` prints it.",
        )


def _check_length(config: RunConfig, lines: Lines) -> None:
    if (
        {"epochs", "steps"} <= config.given
        and config.epochs is not None
        and config.steps is not None
    ):
        raise UsageError(
            f"{lines.place('steps')}: `epochs` and `steps` are both given.", "Keep one of them."
        )
    if config.epochs is None and config.steps is None:
        raise UsageError(
            f"{lines.place('epochs')}: neither `epochs` nor `steps` is given.", "Give one of them."
        )


def _check_setup(config: RunConfig, lines: Lines) -> None:
    """Refuses `#SBATCH` among the lines of a shell, which sbatch does not read there."""
    for number, line in enumerate(config.slurm.setup):
        if line.lstrip().startswith("#SBATCH"):
            with lines.mistakes:
                raise UsageError(
                    f"{lines.place('slurm', 'setup', number)}: `{line}` is a comment there: sbatch "
                    "reads such lines at the top of a script alone.",
                    "Write it into slurm.options: slurm: {options: {mem: 64G}} for --mem=64G.",
                )


def _check_one_source(config: RunConfig, lines: Lines) -> None:
    if bool(config.dataset) == bool(config.datasets):
        what = (
            "`dataset` and `datasets` are both given" if config.dataset else "`dataset` is missing"
        )
        raise UsageError(f"{lines.place('datasets')}: {what}.", "Give one of them.")


def _check_data(config: RunConfig, lines: Lines) -> None:
    if config.task == "image-classification" and config.sequence_length != "auto":
        with lines.mistakes:
            raise UsageError(
                f"{lines.place('sequence_length')}: images have no sequence_length.", "Omit it."
            )
    check_datasets(config.task, config.sources, lines, config.given)


# The keys whose values a check reads -> the check.
_CHECKS: tuple[tuple[tuple[str, ...], Callable[[RunConfig, Lines], None]], ...] = (
    (("name",), _check_names),
    (("bundle",), _check_bundle_id),
    (("checkpoint",), lambda c, lines: check_interval(c.checkpoint, lines)),
    (("epochs", "steps"), _check_length),
    (("dataset", "datasets"), _check_one_source),
    (("slurm",), _check_setup),
    (("task", "dataset", "datasets", "sequence_length"), _check_data),
    (("task", "tokenizer", "lora"), check_tokens),
    (("schedule",), lambda c, lines: check_schedule(c.schedule, c.given, lines)),
    (("task",), lambda c, lines: check_masking(c.task, c, lines)),
    (
        ("engine", "optimizer"),
        lambda config, lines: check_engine(config.engine, config.optimizer, config.given, lines),
    ),
)


def _with_first_weights(config: RunConfig, lines: Lines) -> RunConfig:
    """Makes `model.init` an absolute path, if it is a folder.

    Raises:
        UsageError: the folder has no model.
    """
    if config.model.folder is None:
        return config
    folder = (config.path.parent / config.model.folder).resolve()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{lines.place('model', 'init')}: `{config.model.init}` is neither `pretrained` "
            f"nor `scratch` nor a folder with a model in it ({folder}).",
            suggest(config.model.init, ("pretrained", "scratch"))
            or suggest_path(
                folder,
                "A folder is relative to the run file: the `model/` that another run exported.",
            ),
        )
    return replace(config, model=replace(config.model, init=str(folder)))


def _with_optimizers_own(config: RunConfig) -> RunConfig:
    """Sets Lion's default betas, which are not Adam's."""
    if config.optimizer.name != "lion" or "optimizer.betas" in config.given:
        return config
    note = Choice("optimizer.betas", (0.9, 0.99), "Lion's own")
    return replace(
        config, optimizer=replace(config.optimizer, betas=(0.9, 0.99)), notes=(*config.notes, note)
    )


def _with_best(config: RunConfig) -> RunConfig:
    """Keeps and exports the best weights where `evaluation.patience` may end the run.

    The last ones are then, by definition, not the best.
    """
    if config.evaluation.patience is None or "checkpoint.best" in config.given:
        return config
    reason = "evaluation.patience: the lowest validation loss is what is exported"
    note = Choice("checkpoint.best", True, reason)
    best = replace(config.checkpoint, best=True)
    return replace(config, checkpoint=best, notes=(*config.notes, note))


def _with_their_config(config: RunConfig, lines: Lines) -> RunConfig:
    """Merges the user's ds_config.json into the run file."""
    if config.engine.config is None:
        return config
    theirs = (config.path.parent / config.engine.config).resolve()
    merged = config_deepspeed.merge(
        config_deepspeed.load(theirs, lines.place("engine", "config")),
        theirs,
        {key: lookup(config, key) for key in config_deepspeed.RUN_FILE_KEYS if key in config.given},
        lambda key: lines.place(*key.split(".")),
    )
    for key, value in merged.values.items():
        config = replaced(config, key.split("."), value, (key, Lines(theirs)))
    config = replace(config, engine=replace(config.engine, config=str(theirs)))
    explained = {key for key, _, _ in merged.notes}
    name = theirs.name
    taken = [
        Choice(k, v, f"from {name}", name) for k, v in merged.values.items() if k not in explained
    ]
    filled = _filled(config, merged.autos, name)
    kept = [note for note in config.notes if note.key not in merged.autos]
    notes = (*kept, *taken, *(Choice(*note, name) for note in merged.notes), *filled)
    return replace(
        config,
        given=config.given | frozenset(merged.values),
        theirs=frozenset(merged.values),
        deepspeed=merged.rest,
        notes=notes,
        accumulation=merged.accumulation,
    )


def _filled(config: RunConfig, autos: Sequence[str], name: str) -> list[Choice]:
    """Returns the value that each "auto" of the ds_config.json got from the run file.

    Keys that are `auto` in the run file too are omitted. The ranks decide them and print them.
    """
    reasons = {
        choice.key: choice.reason for choice in (*defaults(config, (), config.given), *config.notes)
    }
    return [
        Choice(key, value, reasons.get(key, "as the run file says"), f'"auto" in {name}')
        for key in autos
        if (value := lookup(config, key)) != "auto"
    ]
