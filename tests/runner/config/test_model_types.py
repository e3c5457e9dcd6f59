"""The tables of `runner.config.model_types` are those of the installed transformers and peft."""

from __future__ import annotations

import pytest

from runner.config.model_types import LORA_TARGETS, MODEL_TYPES


@pytest.mark.parametrize("table", sorted(MODEL_TYPES))
def test_the_model_types_are_those_of_transformers(table: str) -> None:
    from transformers.models.auto import modeling_auto

    theirs = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
    assert sorted(MODEL_TYPES[table].split()) == sorted(theirs)


def test_the_targets_of_lora_are_those_of_peft() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    assert LORA_TARGETS == TARGETS
