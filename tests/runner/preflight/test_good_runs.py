"""Each example in runs/, on its tiny twin, passes `check` in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runner.config.run_config import RunConfig
from runner.inputs import resolve
from runner.launch.check import document
from runner.plan.shapes import Device
from runner.preflight.preflight import examine
from runner.run_folder.layout import RunFolder

RUNS = sorted((Path(__file__).parents[3] / "runs").glob("*.yaml"))
TWINS = {
    "bert-large-uncased": "still-bert",
    "gpt2-large": "gpt2-bare",
    "gpt2-xl": "gpt2-bare",
    "minilm": "still-bert",
    "neural-chat": "tiny-chat",
    "pride-and-prejudice": "reference",
    "vit-tiny": "tiny-vit",
    "wikitext-2": "reference",
}
A100 = Device("cuda", "NVIDIA A100-SXM4-40GB", 40 * 2**30, True, True, 200 * 2**30)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_an_example_passes_without_a_warning(run: Path, tmp_path: Path, twins_bundle: Path) -> None:
    settings = yaml.safe_load(run.read_text())
    for key in ("model", "dataset"):
        asset = settings[key]["asset"]
        settings[key]["asset"] = TWINS.get(asset, asset)
    if "sequence_length" in settings:
        settings["sequence_length"] = min(settings["sequence_length"], 64)
    settings["engine"].pop("wrap", None)  # would import torch, in a process of its own
    (tmp_path / run.name).write_text(yaml.safe_dump(settings))
    config = RunConfig.load(tmp_path / run.name)
    inputs = resolve(config, twins_bundle)
    folder = RunFolder(tmp_path / "output" / run.stem)
    found = examine(config, inputs, folder, 2, A100, with_texts=True)
    assert document(found)["findings"] == []
    assert not (tmp_path / "output").exists()
