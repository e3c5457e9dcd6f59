"""The shipped environment files are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.environment.spec.environment_yml import EnvironmentSpec

ENVS = Path(__file__).resolve().parents[4] / "envs"


@pytest.mark.parametrize("name", ["bert-large", "qlora", "demo-cpu"])
def test_a_shipped_environment_is_read(name: str) -> None:
    spec = EnvironmentSpec.load(ENVS / f"{name}.yml")
    assert spec.name == name
    assert spec.channels == ("conda-forge",)
