"""How a run file trains: its engine, optimizer, schedule, batch, LoRA and checkpoints. Pure.

peft needs torch, and a launcher runs without it. So `LORA_TARGETS` is a copy from the version in
envs/constraints.txt; `tests/runner/config/test_model_types.py` compares them. The model types that
transformers knows are in `runner.tasks`, in each task's file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runner.from_stage import Lines, UsageError, WrongValueError, setting

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


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: small added matrices are trained, the model's weights are not (arXiv:2106.09685).

    Attributes:
        targets: names of modules, matched as in peft: `q_proj` matches every module of this name.
            Empty: peft's targets for the architecture, else all linear layers.
        merge: whether the matrices are added to the weights of the exported model. If not, they are
            exported alone.
    """

    rank: int = setting(8, "peft's own", at_least=1)
    alpha: float = setting(32.0, "the matrices count alpha / rank", above=0)
    dropout: float = setting(0.0, "none", at_least=0, below=1)
    targets: tuple[str, ...] = setting(
        (), "peft's own for the architecture, else all linear layers"
    )
    merge: bool = setting(False, "the adapter alone: a few MB, loadable by peft")

    def describe(self) -> str:
        """Describes what must not change during a run. Checkpoints contain this text."""
        targets = ", ".join(sorted(self.targets)) or "the default targets"
        return f"rank {self.rank}, alpha {self.alpha:g}, on {targets}"


_FOUR = ("quantization.bits", (4,))


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Format of weights that are not trained (QLoRA: arXiv:2305.14314; int8: arXiv:2208.07339)."""

    bits: Literal[4, 8] = setting(4, "the least memory")
    type: Literal["nf4", "fp4"] = setting(
        "nf4", "made for weights that are normally distributed", only=_FOUR
    )
    double: bool = setting(
        True, "the scales are quantised too: 0.4 bits per weight less", only=_FOUR
    )

    def describe(self) -> str:
        """Describes what must not change during a run. Checkpoints contain this text."""
        return (
            f"4 bits, {self.type}{', double' if self.double else ''}"
            if self.bits == 4
            else "8 bits"
        )

    @property
    def bytes_each(self) -> float:
        """Bytes per weight, with its share of the scales.

        There is one scale per block of 64 weights, in fp32. With `double`, scales have 8 bits, and
        a block of 256 scales has one in fp32.
        """
        return 1.0 if self.bits == 8 else 0.5 + ((1 + 4 / 256) / 64 if self.double else 4 / 64)


def check_lora(
    lora: LoraConfig | None,
    quantization: QuantizationConfig | None,
    engine: EngineConfig,
    init: str,
    lines: Lines,
) -> None:
    """Refuses settings that do not go together with `lora` or `quantization`.

    Args:
        lora, quantization: None where the run file does not have the key.
        engine: after the user's ds_config.json is merged.
        init: `model.init`.
        lines: the run file's line numbers.

    Raises:
        UsageError: with file:line.
    """
    if lora is not None and init == "scratch":
        raise UsageError(
            "`lora` does not train the model's weights, "
            "and `model.init: scratch` has random weights.",
            "Remove `lora`, or set model.init: pretrained.",
            place=lines.place("lora"),
        )
    if quantization is None:
        return
    place = lines.place("quantization")
    if lora is None:
        raise UsageError(
            "quantised weights cannot be trained: "
            "an update is smaller than the steps between their values.",
            "Add `lora: {rank: 8}`: matrices beside them are trained. Or remove `quantization`.",
            place=place,
        )
    why = (
        "its ranks would partition packed bytes as if they were weights, "
        "and train another model than the file names"
    )
    remedy = (
        "Set engine: {name: ddp}, or engine: {name: deepspeed, zero: 2}: "
        "quantised weights are small enough for each rank."
    )
    clashes = {
        "engine.name: fsdp": engine.name == "fsdp",
        "engine.zero: 3": engine.zero == 3,
        "engine.offload: nvme, which is ZeRO stage 3": engine.offload == "nvme",
    }
    if clash := next((name for name, is_set in clashes.items() if is_set), ""):
        raise UsageError(f"`quantization` does not go with {clash}: {why}.", remedy, place=place)


# peft/utils/constants.py: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
LORA_TARGETS: dict[str, Sequence[str]] = {
    "RefinedWeb": ["query_key_value"],
    "RefinedWebModel": ["query_key_value"],
    "bart": ["q_proj", "v_proj"],
    "bert": ["query", "value"],
    "blip-2": ["q", "v", "q_proj", "v_proj"],
    "bloom": ["query_key_value"],
    "btlm": ["c_proj", "c_attn"],
    "chatglm": ["query_key_value"],
    "codegen": ["qkv_proj"],
    "deberta": ["in_proj"],
    "deberta-v2": ["query_proj", "value_proj"],
    "electra": ["query", "value"],
    "falcon": ["query_key_value"],
    "gemma": ["q_proj", "v_proj"],
    "gemma2": ["q_proj", "v_proj"],
    "gemma3_text": ["q_proj", "v_proj"],
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "gpt2": ["c_attn"],
    "gpt_bigcode": ["c_attn"],
    "gpt_neo": ["q_proj", "v_proj"],
    "gpt_neox": ["query_key_value"],
    "gptj": ["q_proj", "v_proj"],
    "layoutlm": ["query", "value"],
    "llama": ["q_proj", "v_proj"],
    "llama4": ["q_proj", "v_proj"],
    "mistral": ["q_proj", "v_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "mpt": ["Wqkv"],
    "mt5": ["q", "v"],
    "nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "opt": ["q_proj", "v_proj"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
    "qwen2": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "roberta": ["query", "value"],
    "rwkv": ["key", "value", "receptance", "output"],
    "rwkv7": ["r_proj", "k_proj", "v_proj", "o_proj", "key", "value"],
    "stablelm": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
    "xlm-roberta": ["query", "value"],
}


def targets_in_peft(
    model_type: object, known: Mapping[str, Sequence[str]] = LORA_TARGETS
) -> list[str]:
    """Returns the modules that peft chooses for LoRA in an architecture; empty: peft lists none.

    For some it has a pattern in their place (gemma4). All linear layers are taken then.

    Args:
        known: peft's own table.
    """
    found = known.get(str(model_type), [])
    return [] if isinstance(found, str) else list(found)
