"""Each example in runs/, on its tiny twin, passes `runner check` in silence: no false alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stage.environment.check import imports
from tests.first_job.harness import assert_silent, programs, run_runner, torch_of

RUNS = sorted((Path(__file__).parents[2] / "runs").glob("*.yaml"))
# Those for GPUs import torch twice: all of them on request, one of them and the demo in every run.
SLOW = (
    "bert-conll2003",
    "bert-mrpc",
    "cifar10-ddp",
    "gpt2-large-fsdp",
    "gpt2-xl-fsdp-offload",
    "neural-chat-qlora",
)
EXAMPLES = [
    pytest.param(run, id=run.stem, marks=[pytest.mark.slow] if run.stem in SLOW else [])
    for run in RUNS
]
TWINS = {
    "bert-base-cased": "still-bert",
    "bert-large-uncased": "still-bert",
    "gpt2-large": "gpt2-bare",
    "gpt2-xl": "gpt2-bare",
    "minilm": "still-bert",
    "neural-chat": "tiny-chat",
    "pride-and-prejudice": "reference",
    "vit-tiny": "tiny-vit",
    "wikitext-2": "reference",
}
SINFO = 'for n in 1 2; do echo "gpu*|64|512000|gpu:a100:4|2-00:00:00"; done'


def twin_of(run: Path, folder: Path) -> Path:
    """The run file with the assets of `tests.support.training.twins`."""
    settings = yaml.safe_load(run.read_text())
    for key in ("model", "dataset"):
        asset = settings[key]["asset"]
        settings[key]["asset"] = TWINS.get(asset, asset)
    settings.setdefault("slurm", {"gpus_per_node": 0})  # the demo's: it is for CPUs
    if "sequence_length" in settings:
        settings["sequence_length"] = min(settings["sequence_length"], 64)
    if isinstance(total := settings.get("batch", {}).get("global"), int):
        settings["batch"]["global"] = min(total, 128)  # the twin of CIFAR-10 has 200 images
    (folder / run.name).write_text(yaml.safe_dump(settings))
    return folder / run.name


@pytest.mark.parametrize("run", EXAMPLES)
def test_an_example_passes_without_a_warning(
    run: Path, tmp_path: Path, twins_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", "2.10.0", "'12.8'"))
    # The job's shell is real, and imports the torch of the tests, which is for CPUs.
    read = imports.read_answers
    monkeypatch.setattr(
        imports, "read_answers", lambda text: replace(read(text), torch={"cuda": "12.8"})
    )
    quiet = dict.fromkeys(("sbatch", "squeue"), "exit 0")
    path = programs(tmp_path / "bin", sinfo=SINFO, **quiet)
    # What is below /tmp is rightly called a disk of this node: the tests' own folder is there.
    monkeypatch.setattr("runner.job.checks.any_run.find_private_places", lambda *_: [])
    # /etc/profile sets PATH again, so `module` is a function, as it is on clusters.
    login = {"PATH": path, "BASH_FUNC_module%%": "() { :; }"}
    name = twin_of(run, tmp_path).name
    said = run_runner(tmp_path, "check", name, "--bundle", str(twins_bundle), **login)
    assert_silent(said)
    assert "sbatch --test-only accepts it" in said.out
    assert not (tmp_path / "output").exists()
