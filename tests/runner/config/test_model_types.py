"""The tables of `runner.config.model_types` are those of the installed transformers and peft."""

from __future__ import annotations

import pytest

from runner.config.data import TASKS
from runner.config.model_types import LORA_TARGETS, MODEL_TYPES, targets_in_peft


def test_every_task_has_a_table() -> None:
    assert {kind.table for kind in TASKS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("table", sorted(MODEL_TYPES))
def test_the_model_types_are_those_of_transformers(table: str) -> None:
    from transformers.models.auto import modeling_auto

    theirs = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
    assert sorted(MODEL_TYPES[table].split()) == sorted(theirs)


def test_the_targets_of_lora_are_those_of_peft() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    assert LORA_TARGETS == TARGETS


def test_a_pattern_of_peft_is_no_list_of_letters() -> None:
    assert targets_in_peft("gemma4") == targets_in_peft("nobody-knows-it") == []
    assert targets_in_peft("gemma2") == ["q_proj", "v_proj"]
