"""The tables of model types are those of the installed transformers and peft."""

from __future__ import annotations

import pytest

from runner.config.engine import LORA_TARGETS
from runner.tasks import TASKS, Task


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_the_model_types_of_a_task_are_those_of_transformers(task: Task) -> None:
    from transformers.models.auto import modeling_auto

    theirs = getattr(modeling_auto, f"MODEL_FOR_{task.table}_MAPPING_NAMES")
    assert sorted(task.model_types) == sorted(theirs)


def test_the_targets_of_lora_are_those_of_peft() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    assert LORA_TARGETS == TARGETS
