"""Each engine computes in the precision of its plan, and adds gradients up in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.training.engines.deepspeed import ds_config, note_on_sums
from tests.runner.training.engines.conftest import RUN_FILE

TYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
ENGINES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
# DeepSpeed's stage 0 is in fp32 only: the plan takes stage 1 for the others.
CASES = [f"{e}-{p}" for e in ENGINES for p in TYPES if e != "zero0" or p == "fp32"]


@pytest.fixture
def seen(results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = results["seen"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_matrix_products_have_the_precision_that_the_plan_prints(
    seen: dict[str, Any], case: str
) -> None:
    """ZeRO-3 computed in float32 whatever the plan and the MFU said."""
    assert seen[case]["product"] == [TYPES[case.partition("-")[2]]]


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_master_weights_are_float32(seen: dict[str, Any], case: str) -> None:
    for kind in ("sent", "gradient", "master"):
        assert seen[case][kind] == ["torch.float32"], kind


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "zero0"])
def test_many_micro_batches_in_bf16_add_up_as_in_float64(seen: dict[str, Any], engine: str) -> None:
    expected = seen["sum-ddp" if engine == "ddp" else "sum"]
    assert seen[f"{engine}-sum"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if "fp16" not in case])
def test_a_gradient_that_is_not_finite_updates_nothing(seen: dict[str, Any], case: str) -> None:
    """With fp16's loss scale: test_native_engines."""
    assert seen[case]["skips"]


def test_the_types_of_a_ds_config_are_kept_and_printed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    config = RunConfig.load(tmp_path / "run.yaml")
    plan = TrainingPlan(16, 2, 8, 2, 2, "bf16", 2, ())
    ours = ds_config(config, plan)
    assert (ours["data_types"], ours["communication_data_type"]) == (
        {"grad_accum_dtype": "fp32"},
        "fp32",
    )
    theirs = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}
    kept = ds_config(replace(config, deepspeed=theirs), plan)
    assert kept["data_types"] == theirs["data_types"] and kept["communication_data_type"] == "bf16"
    assert "fp32" in note_on_sums(ours)[0] and "bf16" in note_on_sums(kept)[0]
