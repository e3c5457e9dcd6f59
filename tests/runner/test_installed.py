"""What a run needs is looked for in the environment of the bundle, before it is unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.inputs import EnvironmentInput, resolve
from runner.job.installed import check_environment
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from tests.runner.conftest import Cluster

PACKAGES = (
    *("python", "pytorch", "transformers", "safetensors", "tensorboard", "numpy", "pyarrow"),
    "DeepSpeed",
)


def lacks(cluster: Cluster, *packages: str, files: tuple[str, ...] = ()) -> str:
    """What `check` says of an environment with these packages; empty: nothing is missing."""
    config = RunConfig.load(cluster.write(engine={"zero": 1}))
    inputs = resolve(config, cluster.bundle)
    model = replace(inputs.model, digests=dict.fromkeys(files or inputs.model.digests, ""))
    environment = EnvironmentInput("train-env", Path("/none"), "", 0, 0, packages)
    inputs = replace(inputs, model=model, environment=environment)
    run = TrainingRun(config, inputs, RunFolder(Path()), Path(), ())
    try:
        check_environment(config, inputs, run.packages)
    except UsageError as error:
        return str(error)
    return ""


def test_an_environment_that_has_all_is_silent(cluster: Cluster) -> None:
    assert lacks(cluster, *PACKAGES) == ""
    assert lacks(cluster) == ""  # an old lock: not known


@pytest.mark.parametrize("package", ["pytorch", "DeepSpeed", "numpy", "tensorboard"])
def test_a_package_that_it_lacks_is_named(cluster: Cluster, package: str) -> None:
    said = lacks(cluster, *(name for name in PACKAGES if name != package))
    name = {"pytorch": "torch"}.get(package, package.lower())
    assert f"the environment `train-env` of the bundle lacks {name}," in said
    assert "environment.yml" in said
