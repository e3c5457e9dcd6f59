"""The keys `lora` and `quantization` of a run file, and the check of their combinations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.config.engine import EngineConfig
from runner.errors import Lines, UsageError, setting


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
