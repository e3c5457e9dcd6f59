"""The keys `engine`, `optimizer`, `schedule`, `batch` and `checkpoint` of a run file. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from runner.errors import Lines, UsageError, WrongValueError, setting

Auto = Literal["auto"]
# Optimizer -> the engines that it works with. Optimizers that scale by blocks or rows cannot work
# on shards.
ANY_ENGINE = ("deepspeed", "fsdp", "ddp")
OPTIMIZERS = {
    "adamw": ANY_ENGINE,
    "lion": ANY_ENGINE,
    "sgd": ANY_ENGINE,
    "adafactor": ("ddp",),
    "adamw_8bit": ("ddp",),
    "paged_adamw_8bit": ("ddp",),
}
_NOT_SGD = ("optimizer.name", tuple(name for name in OPTIMIZERS if name != "sgd"))
_DEEPSPEED, _FSDP = ("engine.name", ("deepspeed",)), ("engine.name", ("fsdp",))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. `clip` is the largest global gradient norm; 0: no clipping."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "lion", "sgd"] = setting(
        "adamw", "what these models were trained with"
    )
    lr: float = setting(5.0e-5, "the usual rate for fine-tuning", above=0)
    betas: tuple[float, float] = setting(
        (0.9, 0.999), "Adam's own", at_least=0, below=1, only=_NOT_SGD
    )
    eps: float = setting(1.0e-8, "Adam's own", above=0, only=_NOT_SGD)
    momentum: float = setting(
        0.9, "sgd only: the usual one", at_least=0, below=1, only=("optimizer.name", ("sgd",))
    )
    weight_decay: float = setting(0.01, "as BERT; never on biases and norms", at_least=0)
    clip: float = setting(1.0, "keeps one bad batch from spoiling the run", at_least=0)

    @property
    def kind(self) -> str:
        """The name; without momentum, sgd has no state, so it is another one."""
        plain = self.name == "sgd" and not self.momentum
        return "sgd without momentum" if plain else self.name


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sequences per optimizer step (`global`), and per forward pass of a rank (`micro`).

    The accumulation follows from both and the number of ranks.
    """

    total: int | Auto = setting(
        "auto", "32 sequences, rounded up to a multiple of the ranks", key="global", at_least=1
    )
    micro: int | Auto = setting("auto", "the most that fits", at_least=1)


def _part(value: float) -> float:
    if value > 1 and value != int(value):
        raise WrongValueError(
            "is neither a share below 1 nor whole steps",
            "Write 0.1 for a tenth of them, or 100 steps.",
        )
    return value


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes.

    `warmup` and `decay`: below 1 a share of all steps, from 1 on a number of steps.
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "ends at zero, smoothly"
    )
    warmup: float = setting(0.05, "a twentieth of the steps", at_least=0, convert=_part)
    decay: float = setting(
        0.1,
        "wsd only: the last tenth of the steps",
        at_least=0,
        convert=_part,
        only=("schedule.name", ("wsd",)),
    )


def _wrap(value: dict[str, int | str]) -> dict[str, int | str]:
    kinds = {"layer": str, "min_params": int}
    if [kinds.get(key) for key in value] != [type(item) for item in value.values()] or not value:
        raise WrongValueError(
            "must be the class of a layer or a number of parameters",
            "Write wrap: {layer: GPT2Block}, or wrap: {min_params: 1000000}.",
        )
    return value


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is partitioned among the ranks."""

    name: Literal["deepspeed", "fsdp", "ddp"] = setting("deepspeed", "the main engine")
    zero: Literal["auto", 0, 1, 2, 3] = setting(
        "auto", "the lowest stage that fits is the fastest", only=_DEEPSPEED
    )
    offload: Literal["none", "cpu", "nvme"] = setting(
        "none",
        "slower; only for what does not fit otherwise",
        only=("engine.name", ("deepspeed", "fsdp")),
    )
    nvme_path: str | None = setting(None, "only with offload: nvme", is_path=True, only=_DEEPSPEED)
    config: str | None = setting(None, "no ds_config.json of yours", is_path=True, only=_DEEPSPEED)
    sharding: Literal["full", "grad_op"] | None = setting(None, "fsdp only", only=_FSDP)
    wrap: dict[str, int | str] | None = setting(None, "fsdp only", convert=_wrap, only=_FSDP)


def check_offload(engine: EngineConfig, lines: Lines) -> None:
    """Finds settings of offloading that do not go together.

    Raises:
        UsageError: with file:line.
    """
    place = lines.place("engine", "offload")
    if (engine.name, engine.offload) == ("fsdp", "nvme"):
        raise UsageError(
            "fsdp does not do offload: nvme.",
            "Set engine.name: deepspeed, or engine.offload: none without nvme_path.",
            place=place,
        )
    if (engine.offload == "nvme") != (engine.nvme_path is not None) and engine.name == "deepspeed":
        raise UsageError(
            "`offload: nvme` and `nvme_path` (a folder on each node's own disk) go together.",
            "Give both, or neither.",
            place=place,
        )
    if engine.offload != "none" and engine.zero == 0 and engine.name == "deepspeed":
        raise UsageError("ZeRO stage 0 offloads nothing.", "Set engine.zero: 1.", place=place)


def check_optimizer(engine: EngineConfig, optimizer: OptimizerConfig, lines: Lines) -> None:
    """Refuses an optimizer that does not work with the engine.

    Raises:
        UsageError: with file:line.
    """
    able = OPTIMIZERS[optimizer.name]
    if engine.name not in able:
        raise UsageError(
            f"{optimizer.name} does not work on weights that {engine.name} partitions.",
            f"Set engine.name: {' or '.join(able)}, or optimizer.name: adamw.",
            place=lines.place("optimizer", "name"),
        )


_INTERVAL = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>s|min|h)")


def _seconds(every: int | str) -> float | None:
    match = _INTERVAL.fullmatch(str(every))
    return float(match["number"]) * {"s": 1, "min": 60, "h": 3600}[match["unit"]] if match else None


def _interval(every: int | str) -> int | str:
    if isinstance(every, str) and every != "epoch" and not _seconds(every):
        raise WrongValueError(
            "is neither steps nor a time nor `epoch`",
            "For instance: every: 500, every: 10 min, or every: epoch",
        )
    return every


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept.

    Attributes:
        every: steps, a time (`10 min`), or `epoch`. One more is written at the end.
        keep: how many of the newest are kept.
        best: whether the one with the lowest validation loss is kept too, and exported in the end.
    """

    every: int | str = setting(500, "loses some minutes at worst", at_least=1, convert=_interval)
    keep: int = setting(3, "the newest and two before it", at_least=1)
    best: bool = setting(False, "the last one is what is exported")

    @property
    def seconds(self) -> float | None:
        """The time between two checkpoints; None: steps or epochs say when."""
        return _seconds(self.every)
