"""The layers of `engine.wrap` are looked up in the model, built without weights in a child."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.job import model_layers
from tests.runner.conftest import Cluster


def model_of(cluster: Cluster) -> Path:
    return cluster.bundle / "data/models/tiny-bert"


def fsdp(cluster: Cluster, **engine: object) -> RunConfig:
    return RunConfig.load(cluster.write(engine={"name": "fsdp", **engine}))


def test_layers_that_are_there_are_counted(cluster: Cluster) -> None:
    found = model_layers.check_wrap(fsdp(cluster, wrap={"layer": "BertLayer"}), model_of(cluster))
    assert found == "engine.wrap: 2 x BertLayer (as the run file says)"


def test_for_a_number_of_parameters_no_model_is_built(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(model_layers, "in_child")
    config = fsdp(cluster, wrap={"min_params": 1000})
    assert model_layers.check_wrap(config, model_of(cluster)) is None


def test_a_class_of_the_library_that_this_model_does_not_use_is_no_layer_of_it(
    cluster: Cluster,
) -> None:
    """The source of the library has it, the model has not."""
    with pytest.raises(UsageError, match="`tiny-bert` has no layer `BertCrossAttention` to wrap"):
        model_layers.check_wrap(
            fsdp(cluster, wrap={"layer": "BertCrossAttention"}), model_of(cluster)
        )


def test_what_cannot_be_known_here_is_left_to_the_ranks_in_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fsdp(cluster, wrap={"layer": "Nonsense"})

    def light(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(model_layers, "version", light)
    said = model_layers.check_wrap(config, model_of(cluster))
    assert said == "engine.wrap: left to the ranks: torch is not installed here"
    inside = RunConfig.load(config.path, ["slurm.container=[apptainer, exec, image.sif]"])
    said = model_layers.check_wrap(inside, model_of(cluster))
    assert said == "engine.wrap: left to the ranks: they run another environment than this command"
    assert model_layers.check_wrap(fsdp(cluster), model_of(cluster)) is None


@pytest.mark.parametrize(("torch", "works"), [("2.6.0+cu118", False), ("2.7.1", True)])
def test_fsdp_on_cpus_is_refused_where_torch_has_it_for_gpus_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, torch: str, works: bool
) -> None:
    monkeypatch.setattr(model_layers, "version", lambda _: torch)
    config = fsdp(cluster)
    model_layers.check_fsdp(config, "cuda")
    if works:
        model_layers.check_fsdp(config, "cpu")
    else:
        with pytest.raises(UsageError, match=r"needs torch 2.7 or newer; this is 2.6.0\+cu118"):
            model_layers.check_fsdp(config, "cpu")
