"""The shipped environment files are valid, and lock for the clusters that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stage.environment.check.check import verdicts
from stage.environment.check.needs import Needs
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile

ENVS = Path(__file__).resolve().parents[4] / "envs"
CPU_INDEX = "      - --extra-index-url https://download.pytorch.org/whl/cpu\n"


@pytest.mark.parametrize("name", ["bert-large", "qlora", "demo-cpu"])
def test_a_shipped_environment_is_read(name: str) -> None:
    spec = EnvironmentSpec.load(ENVS / f"{name}.yml")
    assert spec.name == name
    assert spec.channels == ("conda-forge",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"),
    [("bert-large", "v100"), ("bert-large", "a800"), ("qlora", "h200"), ("demo-cpu", "cpu")],
)
def test_a_shipped_environment_locks_for_its_cluster(
    conda_channel: Path, tmp_path: Path, name: str, profile: str
) -> None:
    """With wheels from the real index, and the tests' channel, with one Python, for conda-forge."""
    text = (
        (ENVS / f"{name}.yml").read_text().replace("[conda-forge]", f"[{conda_channel.as_uri()}]")
    )
    (tmp_path / f"{name}.yml").write_text(
        re.sub(r"- python.*", "- python", text).replace(CPU_INDEX, "")
    )
    node = ENVS / "profiles" / f"{profile}.yml"
    command = [sys.executable, "-m", "stage", "env", "lock", f"{name}.yml", "--profile", str(node)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lock = EnvironmentLock.load(tmp_path / f"{name}.conda-lock.yml")
    needs = Needs.of(lock.packages)
    assert needs.torch is not None
    assert not [verdict for verdict in verdicts(needs, Profile.load(node)) if verdict.refused]
    assert {"transformers", "deepspeed", "datasets", "click", "pyarrow"} <= {
        package.name for package in lock.packages
    }
