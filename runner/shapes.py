"""What the arithmetic of a run knows of a model, and of the device of a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """What one rank has.

    Attributes:
        kind: `cuda` or `cpu`.
        memory: bytes a rank may use.
        has_bf16, has_fp16: whether it computes in them at speed.
        host_memory: bytes of the node's memory that fall to a rank, for what is offloaded; 0: not known.
    """

    kind: str
    name: str
    memory: int
    has_bf16: bool
    has_fp16: bool
    host_memory: int = 0


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs of a model: counts from its config.json and safetensors headers.

    Attributes:
        num_trained: parameters that LoRA trains, beside those of the model; None: all of the model's are trained.
        num_quantized: of the model's parameters, those that are kept quantised.
    """

    num_parameters: int
    longest: int | None
    hidden: int
    layers: int
    vocabulary: int
    num_trained: int | None = None
    num_quantized: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any], num_parameters: int | None) -> ModelShape:
        """Reads the usual names of a Hugging Face config; estimates the parameters where no weights say."""
        inner = settings.get("text_config")
        text: Mapping[str, Any] = inner if isinstance(inner, dict) else settings

        def first(*names: str) -> int:
            return next((int(text[n]) for n in names if isinstance(text.get(n), int)), 0)

        hidden, layers, vocabulary = (
            first("hidden_size", "n_embd", "dim"),
            first("num_hidden_layers", "n_layer", "n_layers"),
            first("vocab_size"),
        )
        estimate = 12 * layers * hidden**2 + vocabulary * hidden
        return ModelShape(
            num_parameters or estimate, _longest(settings.get("model_type"), first), hidden, layers, vocabulary
        )


def _longest(model_type: object, first: Any) -> int | None:
    longest = first("max_position_embeddings", "n_positions", "n_ctx") or None
    if side := first("image_size"):
        return int((side // max(1, first("patch_size"))) ** 2 + 1)  # patches and the class token (ViT)
    # RoBERTa's positions begin after the padding index: 514 rows are 512 positions (modeling_roberta.py).
    return longest - 2 if longest and model_type in ("roberta", "xlm-roberta", "camembert", "longformer") else longest
