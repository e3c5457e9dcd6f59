"""What is said before the ranks start: in order, with a remedy, and only what was compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.slurm.job_array import members
from tests.runner.conftest import RUN
from tests.runner.preflight.test_preflight import terminal

__all__ = ["terminal"]


def config_of(folder: Path, *overrides: str, **changes: Any) -> RunConfig:
    path = folder / "tiny.yaml"
    settings = {**RUN, "name": "tiny", **changes}
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    return RunConfig.load(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "changes", "remedy"),
    [
        ([], {"name": "n" * 300}, "of at most 200"),
        ([], {"steps": None, "epochs": "three"}, "Write a number: epochs: 3"),
        (["optimizer.lr=abc"], {}, "Write a number: lr: 0.001"),
    ],
)
def test_a_value_that_cannot_be_has_a_remedy(
    tmp_path: Path, overrides: list[str], changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        config_of(tmp_path, *overrides, **changes)
    assert remedy in refused.value.remedy, refused.value


def test_a_sweep_makes_no_folder_with_a_name_too_long_for_a_disk() -> None:
    with pytest.raises(UsageError, match="too long"):
        members(["dataset.asset=" + "a" * 150, "model.asset=" + "b" * 150])
