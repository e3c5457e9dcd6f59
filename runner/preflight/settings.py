"""Settings that work and are probably not meant. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.plan.plan import accumulation_of
from runner.preflight.findings import Finding
from runner.preflight.weights import text_settings


def check_precision(
    config: RunConfig, settings: Mapping[str, Any], precision: str
) -> list[Finding]:
    """Finds fp16 for weights that were trained in bfloat16.

    bf16 reaches 3.4e38, fp16 65504: activations of such models overflow, and the loss becomes nan
    or the loss scale falls to its minimum (github.com/huggingface/transformers/issues/14189, T5).

    Args:
        config: the run file.
        settings: the content of config.json.
        precision: of the run, decided.
    """
    text = text_settings(settings)
    trained = next(
        (s[k] for s in (text, settings) for k in ("dtype", "torch_dtype") if s.get(k)), None
    )
    if precision != "fp16" or trained != "bfloat16" or config.model.init == "scratch":
        return []
    return [
        Finding(
            "warning",
            f"{config.path}: precision fp16, and `{config.model.asset}` was trained in bfloat16 "
            "(config.json): its activations may be too large for fp16, and the loss becomes nan.",
            f"{config.how_to_set('precision', 'fp32')}, or use GPUs that have bf16 (A100 or newer) "
            "and precision: bf16.",
        )
    ]


def check_accumulation(config: RunConfig, total: int, micro: int, ranks: int) -> list[Finding]:
    """Finds another accumulation in the user's ds_config.json than the run will have.

    Args:
        config: the run file.
        total: sequences per step.
        micro: sequences per forward pass of a rank.
        ranks: number of ranks.
    """
    if config.accumulation is None:
        return []
    found = accumulation_of(config, total, micro, ranks)
    if found.value == config.accumulation:
        return []
    name = Path(config.engine.config or "").name
    theirs = ranks * micro * config.accumulation
    return [
        Finding(
            "warning",
            f"accumulation: {found.value}  ({found.reason})",
            f"{config.how_to_set('batch.global', theirs)} to keep theirs, or write "
            f'"gradient_accumulation_steps": "auto" in {name}.',
        )
    ]
