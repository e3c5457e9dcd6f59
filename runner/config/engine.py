"""The keys `engine`, `optimizer`, `schedule` and `batch` of a run file, and their checks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.config.fields import setting
from runner.errors import Lines, UsageError

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
# Keys that only one engine knows, with the value that means "not set".
KEYS_OF_ENGINES: dict[str, dict[str, object]] = {
    "deepspeed": {"zero": "auto", "config": None, "nvme_path": None},
    "fsdp": {"sharding": None, "wrap": None},
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. `clip` is the largest global gradient norm; 0: no clipping."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "lion", "sgd"] = setting(
        "adamw", "what these models were trained with"
    )
    lr: float = setting(5.0e-5, "the usual rate for fine-tuning", above=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "Adam's own", at_least=0, below=1)
    eps: float = setting(1.0e-8, "Adam's own", above=0)
    momentum: float = setting(0.9, "sgd only: the usual one", at_least=0, below=1)
    weight_decay: float = setting(0.01, "as BERT; never on biases and norms", at_least=0)
    clip: float = setting(1.0, "keeps one bad batch from spoiling the run", at_least=0)

    @property
    def kind(self) -> str:
        """The name; without momentum, sgd has no state, so it is another one."""
        plain = self.name == "sgd" and not self.momentum
        return "sgd without momentum" if plain else self.name


def keys_not_of(optimizer: str) -> tuple[str, ...]:
    """Returns the keys of `optimizer` that mean nothing to this one, with their dots."""
    return ("optimizer.betas", "optimizer.eps") if optimizer == "sgd" else ("optimizer.momentum",)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sequences per optimizer step (`global`), and per forward pass of a rank (`micro`).

    The accumulation follows from both and the number of ranks.
    """

    total: int | Auto = setting(
        "auto", "32 sequences, rounded up to a multiple of the ranks", key="global", at_least=1
    )
    micro: int | Auto = setting("auto", "the most that fits", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes.

    `warmup` and `decay`: below 1 a share of all steps, from 1 on a number of steps.
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "ends at zero, smoothly"
    )
    warmup: float = setting(0.05, "a twentieth of the steps", at_least=0)
    decay: float = setting(0.1, "wsd only: the last tenth of the steps", at_least=0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is partitioned among the ranks."""

    name: Literal["deepspeed", "fsdp", "ddp"] = setting("deepspeed", "the main engine")
    zero: Literal["auto", 0, 1, 2, 3] = setting("auto", "the lowest stage that fits is the fastest")
    offload: Literal["none", "cpu", "nvme"] = setting(
        "none", "slower; only for what does not fit otherwise"
    )
    nvme_path: str | None = setting(None, "only with offload: nvme", path=True)
    config: str | None = setting(None, "no ds_config.json of yours", path=True)
    sharding: Literal["full", "grad_op"] | None = setting(None, "fsdp only")
    wrap: dict[str, int | str] | None = setting(None, "fsdp only")


def check_engine(
    engine: EngineConfig, optimizer: OptimizerConfig, given: frozenset[str], lines: Lines
) -> None:
    """Finds settings that the chosen engine or optimizer does not support, and missing settings.

    All mistakes but the last are kept in `lines.mistakes`.

    Args:
        engine: the key `engine`.
        optimizer: the key `optimizer`.
        given: dotted keys that are not defaults.
        lines: of the run file.

    Raises:
        UsageError: with file:line.
    """
    for name, keys in KEYS_OF_ENGINES.items():
        for key, not_set in keys.items():
            value = getattr(engine, key)
            with lines.mistakes:
                if name != engine.name and value != not_set:
                    raise UsageError(
                        f"{lines.place('engine', key)}: `engine.{key}` belongs to {name}; "
                        f"the engine is {engine.name}.",
                        f"Remove it, or set engine.name: {name}.",
                    )
    with lines.mistakes:
        _check_offload(engine, lines)
    with lines.mistakes:
        _check_wrap(engine, lines)
    _check_optimizers_own(optimizer, given, lines)
    able = OPTIMIZERS[optimizer.name]
    if engine.name not in able:
        raise UsageError(
            f"{lines.place('optimizer', 'name')}: {optimizer.name} does not work on weights that "
            f"{engine.name} partitions.",
            f"Set engine.name: {' or '.join(able)}, or optimizer.name: adamw.",
        )


def _check_optimizers_own(optimizer: OptimizerConfig, given: frozenset[str], lines: Lines) -> None:
    for key in keys_not_of(optimizer.name):
        own = key.removeprefix("optimizer.")
        # The default counts as not set: config.yaml of a run folder has every key.
        set_ = key in given and getattr(optimizer, own) != getattr(OptimizerConfig(), own)
        with lines.mistakes:
            if set_:
                other = "adamw" if optimizer.name == "sgd" else "sgd"
                raise UsageError(
                    f"{lines.place('optimizer', own)}: {optimizer.name} has no {own}.",
                    f"Remove it, or set optimizer.name: {other}.",
                )


def _check_offload(engine: EngineConfig, lines: Lines) -> None:
    if engine.offload != "none" and (
        engine.name == "ddp" or (engine.name, engine.offload) == ("fsdp", "nvme")
    ):
        raise UsageError(
            f"{lines.place('engine', 'offload')}: "
            f"{engine.name} does not do offload: {engine.offload}.",
            "Set engine.name: deepspeed"
            + {"cpu": ", or fsdp.", "nvme": ", or engine.offload: none without nvme_path."}[
                engine.offload
            ],
        )
    if (engine.offload == "nvme") != (engine.nvme_path is not None):
        raise UsageError(
            f"{lines.place('engine', 'offload')}: `offload: nvme` and `nvme_path` "
            "(a folder on each node's own disk) go together.",
            "Give both, or neither.",
        )
    if engine.offload != "none" and engine.zero == 0 and engine.name == "deepspeed":
        raise UsageError(
            f"{lines.place('engine', 'offload')}: ZeRO stage 0 offloads nothing.",
            "Set engine.zero: 1.",
        )


def _check_wrap(engine: EngineConfig, lines: Lines) -> None:
    if engine.wrap is None:
        return
    kind = {"layer": str, "min_params": int}.get(next(iter(engine.wrap), ""))
    if (
        len(engine.wrap) != 1
        or kind is None
        or not isinstance(next(iter(engine.wrap.values())), kind)
    ):
        raise UsageError(
            f"{lines.place('engine', 'wrap')}: `engine.wrap` is the class of a layer or a number "
            "of parameters.",
            "Write wrap: {layer: GPT2Block}, or wrap: {min_params: 1000000}.",
        )


def check_schedule(schedule: ScheduleConfig, given: frozenset[str], lines: Lines) -> None:
    """Refuses parts that are neither a share nor whole steps, and a decay that is not used.

    Args:
        given: dotted keys that the user set.
    """
    for key, part in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        with lines.mistakes:
            if part > 1 and part != int(part):
                raise UsageError(
                    f"{lines.place('schedule', key)}: {part} is neither a share below 1 "
                    "nor whole steps.",
                    f"For instance: {key}: 0.1, or {key}: 100",
                )
    if schedule.name != "wsd" and "schedule.decay" in given and schedule.decay != 0.1:
        raise UsageError(
            f"{lines.place('schedule', 'decay')}: only the schedule wsd has a decay of its own.",
            "Remove schedule.decay, or set schedule.name: wsd.",
        )
