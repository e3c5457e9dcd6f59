"""The keys `lora` and `quantization` of a run file, and the default targets of peft. Pure.

peft needs torch, and a launcher runs without it. So `LORA_TARGETS` is a copy from the version in
envs/constraints.txt; `tests/runner/config/test_model_types.py` compares them. The model types that
transformers knows are in `runner.tasks`, in each task's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
