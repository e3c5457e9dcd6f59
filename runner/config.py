"""The run file: what to train, on what, how.

`runs/x.yaml` (+ `--set key=value`, + their own ds_config.json) -> `RunConfig`, frozen and checked. Each component
owns its dataclass; each default carries its reason, and `RunConfig.explain` lists all that were not chosen by the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from runner import deepspeed_config
from runner.data_config import DatasetConfig, EvaluationConfig, PackingConfig, check_datasets, not_for
from runner.engine_config import KEYS_OF_ENGINES, EngineConfig, OptimizerConfig, check_engine
from runner.errors import Lines, UsageError, load_yaml_with_lines
from runner.fields import Choice, defaults, lookup, plain, read, replaced, setting
from runner.lora_config import LoraConfig, QuantizationConfig, check_lora
from runner.overrides import override

FORMAT = 1
Auto = Literal["auto"]
INTERVAL = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>s|min|h)")


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """Whether a run may read a bundle that `stage verify` did not find sound here, or that changed since."""

    verified: Literal["optional", "required"] = setting("optional", "what is known of it is told, not demanded")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and whether its weights are taken, drawn anew, or those of a folder: what another run exported."""

    asset: str = setting()
    init: Literal["pretrained", "scratch"] | str = setting("pretrained", "the asset's own weights")

    @property
    def folder(self) -> Path | None:
        """The folder of the first weights; None where they are the asset's, or new."""
        return None if self.init in ("pretrained", "scratch") else Path(self.init)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sequences an optimizer step (`global`), and at a time on one device (`micro`). Accumulation is derived."""

    total: int | Auto = setting("auto", "32 sequences, rounded up to a multiple of the ranks", key="global", at_least=1)
    micro: int | Auto = setting("auto", "the most that fits", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the rate changes. `warmup` and `decay` below 1 are a share of all steps, from 1 on a number of steps."""

    name: Literal["cosine", "linear", "constant", "wsd"] = setting("cosine", "ends at zero, smoothly")
    warmup: float = setting(0.05, "a twentieth of the steps", at_least=0)
    decay: float = setting(0.1, "wsd only: the last tenth of the steps", at_least=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`every` that many steps, or after that much time, and at the end; the last `keep` stay, and the best one."""

    every: int | str = setting(500, "loses some minutes at worst", at_least=1)
    keep: int = setting(3, "the newest and two before it", at_least=1)
    best: bool = setting(False, "the last one is what is exported")
    asynchronous: bool = setting(False, "needs room for a copy in the node's memory")

    @property
    def seconds(self) -> float | None:
        """The time between two checkpoints; None where it is a number of steps."""
        match = INTERVAL.fullmatch(self.every) if isinstance(self.every, str) else None
        return float(match["number"]) * {"s": 1, "min": 60, "h": 3600}[match["unit"]] if match else None


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `runner submit` asks Slurm for."""

    partition: str | None = setting(None, "the site's default")
    nodes: int = setting(1, "one node", at_least=1)
    gpus_per_node: int = setting(0, "none asked for", at_least=0)
    tasks_per_node: int | Auto = setting("auto", "one for each GPU; one where there is none", at_least=1)
    time: str | None = setting(None, "the site's default")
    modules: tuple[str, ...] = setting((), "none")
    setup: tuple[str, ...] = setting((), "nothing")
    container: tuple[str, ...] = setting((), "none: the ranks run on the node as it is")
    options: dict[str, str | int | float | bool] = setting(dict, "none")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Which environment of the bundle runs the ranks, and whether from each node's own disk."""

    asset: str = setting()
    node_local: bool | Auto = setting("auto", "from each node's own disk where it would else come from a network disk")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Read with `RunConfig.load`.

    Attributes:
        path: the run file.
        given: dotted keys that were chosen by the user, in the run file, with `--set`, or in their ds_config.json.
        theirs: those of them that their ds_config.json decided.
        deepspeed: what their ds_config.json says beyond the keys of the run file; handed to DeepSpeed.
        notes: what reading their ds_config.json decided.
    """

    format: int = setting()
    name: str = setting("auto", "the run file's name")
    task: Literal["masked-lm", "causal-lm", "instruction", "image-classification"] = setting()
    bundle: BundleConfig = setting(BundleConfig)
    model: ModelConfig = setting()
    dataset: DatasetConfig | None = setting(None)
    datasets: tuple[DatasetConfig, ...] = setting(())
    packing: PackingConfig = setting(PackingConfig)
    sequence_length: int | Auto = setting("auto", "the model's own, 512 at most", at_least=8)
    epochs: float | None = setting(3.0, "the usual number of passes for fine-tuning", above=0)
    steps: int | None = setting(None, "follows from the epochs", at_least=1)
    batch: BatchConfig = setting(BatchConfig)
    optimizer: OptimizerConfig = setting(OptimizerConfig)
    schedule: ScheduleConfig = setting(ScheduleConfig)
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting("auto", "bf16 where the device has it, then fp16")
    activation_checkpointing: bool = setting(False, "a third slower; only for what does not fit otherwise")
    compile: bool = setting(False, "takes minutes at start, and a compiler on the compute nodes")
    engine: EngineConfig = setting(EngineConfig)
    lora: LoraConfig | None = setting(None, "every weight is trained")
    quantization: QuantizationConfig | None = setting(None, "weights in the precision above")
    environment: EnvironmentConfig | None = setting(None, "the environment that runs this command")
    checkpoint: CheckpointConfig = setting(CheckpointConfig)
    evaluation: EvaluationConfig = setting(EvaluationConfig)
    hang_after: float | Auto = setting("auto", "ten times the longest silence so far; 300 s at least", above=0)
    seed: int = setting(42, "any number will do", at_least=0, below=2**63)
    slurm: SlurmConfig = setting(SlurmConfig)
    path: Path = field(default=Path("run.yaml"))
    given: frozenset[str] = field(default=frozenset())
    theirs: frozenset[str] = field(default=frozenset())
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Choice, ...] = field(default=())

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """What `dataset` or `datasets` names; never empty."""
        return (self.dataset,) if self.dataset is not None else self.datasets

    @staticmethod
    def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Reads a run file.

        Args:
            path: the YAML file.
            overrides: `a.b=value` texts, as given with `--set`; each value is read as YAML.

        Raises:
            UsageError: with file:line; also for what this version does not do yet, and where their
                ds_config.json contradicts the run file.
        """
        data, lines = load_yaml_with_lines(path)
        data, lines = override(data, lines, overrides)
        if data.get("format", FORMAT) != FORMAT:
            raise UsageError(
                f"{lines.place('format')}: format {data['format']!r}; this version of airlift reads format {FORMAT}",
                "Use a newer airlift: pip install --upgrade airlift",
            )
        config, given = read(RunConfig, data, (), lines)
        if config.name == "auto":
            config = replace(config, name=Path(path).stem)
        if config.steps is not None and "epochs" not in given:
            config = replace(config, epochs=None)
        config = _with_optimizers_own(replace(config, path=Path(path), given=given))
        _check_together(config, lines)
        config = _with_their_config(_with_first_weights(config, lines), lines)
        engine = config.engine
        check_lora(
            config.lora, config.quantization, config.model.init, engine.name, engine.zero, engine.offload, lines, given
        )
        return config

    def explain(self) -> list[Choice]:
        """Every default that was taken, with its reason, in the file's order; then what `notes` holds."""
        skip = {note.key for note in self.notes} | set(not_for(self.task))
        skip |= {"slurm", "steps" if self.steps is None else "epochs"}
        skip |= {f"engine.{key}" for name, keys in KEYS_OF_ENGINES.items() if name != self.engine.name for key in keys}
        skip |= set() if self.schedule.name == "wsd" else {"schedule.decay"}
        skip |= (
            {"quantization.type", "quantization.double"} if self.quantization and self.quantization.bits == 8 else set()
        )
        choices = [c for c in defaults(self, (), self.given) if c.key not in skip and not c.key.startswith("slurm.")]
        return [*choices, *self.notes]

    def as_said(self, key: str) -> str:
        """Where the user chose the value of a key, in words."""
        theirs = Path(self.engine.config or "").name
        return f"as {theirs} says" if key in self.theirs else "as the run file says"

    def to_mapping(self) -> dict[str, Any]:
        """As plain YAML data, defaults filled in: a run file again."""
        data: dict[str, Any] = plain(self)
        return data

    def to_yaml(self) -> str:
        """The text of `config.yaml` in a run folder."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)


def _check_together(config: RunConfig, lines: Lines) -> None:
    """What no single key can say."""
    if not re.fullmatch(r"[\w][\w.+-]*", config.name):
        raise UsageError(
            f"{lines.place('name')}: `{config.name}` becomes a folder's name: letters, digits, `.`, `_`, `-`, `+`"
        )
    if {"epochs", "steps"} <= config.given and config.epochs is not None and config.steps is not None:
        raise UsageError(f"{lines.place('steps')}: `epochs` and `steps` are both given", "Keep one of them.")
    if config.epochs is None and config.steps is None:
        raise UsageError(f"{lines.place('epochs')}: neither `epochs` nor `steps`", "Give one of them.")
    if bool(config.dataset) == bool(config.datasets):
        what = "`dataset` and `datasets` are both given" if config.dataset else "`dataset` is missing"
        raise UsageError(f"{lines.place('datasets')}: {what}.", "Give one of them.")
    if config.task == "image-classification" and config.sequence_length != "auto":
        raise UsageError(f"{lines.place('sequence_length')}: images have no sequence_length.", "Leave it out.")
    check_datasets(config.task, config.sources, lines, config.given)
    for key, part in (("warmup", config.schedule.warmup), ("decay", config.schedule.decay)):
        if part > 1 and part != int(part):
            raise UsageError(f"{lines.place('schedule', key)}: {part} is neither a share below 1 nor whole steps")
    if config.schedule.name != "wsd" and "schedule.decay" in config.given and config.schedule.decay != 0.1:
        raise UsageError(f"{lines.place('schedule', 'decay')}: only the schedule wsd has a decay of its own")
    if isinstance(config.checkpoint.every, str) and not config.checkpoint.seconds:
        raise UsageError(
            f"{lines.place('checkpoint', 'every')}: `{config.checkpoint.every}` is neither steps nor a time",
            "For instance: every: 500, or every: 10 min",
        )
    check_engine(config.engine, config.optimizer, lines)


def _with_first_weights(config: RunConfig, lines: Lines) -> RunConfig:
    """`model.init` as an absolute path, where it is one."""
    if config.model.folder is None:
        return config
    folder = (config.path.parent / config.model.folder).resolve()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{lines.place('model', 'init')}: `{config.model.init}` is neither `pretrained` nor `scratch` nor a folder "
            f"with a model in it ({folder})",
            "A folder is relative to the run file: the `model/` that another run exported.",
        )
    return replace(config, model=replace(config.model, init=str(folder)))


def _with_optimizers_own(config: RunConfig) -> RunConfig:
    """Lion's betas, where none are given, are not Adam's."""
    if config.optimizer.name != "lion" or "optimizer.betas" in config.given:
        return config
    note = Choice("optimizer.betas", (0.9, 0.99), "Lion's own")
    return replace(config, optimizer=replace(config.optimizer, betas=(0.9, 0.99)), notes=(*config.notes, note))


def _with_their_config(config: RunConfig, lines: Lines) -> RunConfig:
    """The run file and their ds_config.json as one."""
    if config.engine.config is None:
        return config
    theirs = (config.path.parent / config.engine.config).resolve()
    merged = deepspeed_config.merge(
        deepspeed_config.load(theirs, lines.place("engine", "config")),
        theirs,
        {key: lookup(config, key) for key in deepspeed_config.RUN_FILE_KEYS if key in config.given},
        lambda key: lines.place(*key.split(".")),
    )
    for key, value in merged.values.items():
        config = replaced(config, key.split("."), value, (key, Lines(theirs)))
    config = replace(config, engine=replace(config.engine, config=str(theirs)))
    explained = {key for key, _, _ in merged.notes}
    name = theirs.name
    taken = [Choice(k, v, f"from {name}", name) for k, v in merged.values.items() if k not in explained]
    filled = _filled(config, merged.autos, name)
    kept = [note for note in config.notes if note.key not in merged.autos]
    notes = (*kept, *taken, *(Choice(*note, name) for note in merged.notes), *filled)
    given, said = config.given | frozenset(merged.values), frozenset(merged.values)
    return replace(config, given=given, theirs=said, deepspeed=merged.rest, notes=notes)


def _filled(config: RunConfig, autos: Sequence[str], name: str) -> list[Choice]:
    """What each "auto" of their file became; what is `auto` in the run file too, the ranks decide and tell."""
    reasons = {choice.key: choice.reason for choice in (*defaults(config, (), config.given), *config.notes)}
    return [
        Choice(key, value, reasons.get(key, "as the run file says"), f'"auto" in {name}')
        for key in autos
        if (value := lookup(config, key)) != "auto"
    ]
