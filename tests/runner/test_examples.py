"""`runner init` writes a run file that `runner check` accepts, from what is in the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runner.cli import main
from runner.config.run_config import RunConfig
from runner.examples import EXAMPLES
from runner.inputs import resolve

ROOT = Path(__file__).resolve().parents[2]


def init(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, words)], prog_name="runner")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_file_names_what_fits_the_task(bundle: Path) -> None:
    done = init("causal-lm", "--bundle", bundle, "-o", "mine.yaml")
    assert done.exit_code == 0, done.output
    assert "model tiny-gpt2: the only one that fits the task" in done.output
    assert f"next: runner check mine.yaml --bundle {bundle}" in done.output
    config = RunConfig.load(Path("mine.yaml"))
    assert config.name == "mine" and config.sequence_length == 64, "no more than the model takes"
    assert resolve(config, bundle).model.asset == "tiny-gpt2"


def test_other_assets_that_fit_are_named_in_comments(bundle: Path) -> None:
    assert init("masked-lm", "--bundle", bundle).exit_code == 0
    text = Path("masked-lm.yaml").read_text()
    assert "also: steady-bert, tiny-bert" in text and "asset: numbers   # also: reference" in text


@pytest.mark.parametrize("task", EXAMPLES)
def test_each_task_begins_as_its_example(task: str, twins_bundle: Path) -> None:
    """The twins have the assets of all examples, so the examples' own settings stay."""
    done = init(task, "--bundle", twins_bundle)
    assert done.exit_code == 0, done.output
    config = RunConfig.load(Path(f"{task}.yaml"))
    resolve(config, twins_bundle)
    example = RunConfig.load(ROOT / "runs" / EXAMPLES[task])
    for key in ("task", "batch", "schedule", "engine", "checkpoint", "slurm"):
        assert getattr(config, key) == getattr(example, key), key


@pytest.mark.parametrize("task", EXAMPLES)
def test_without_a_bundle_the_file_is_the_example(task: str) -> None:
    done = init(task)
    assert done.exit_code == 0 and f"runs/{EXAMPLES[task]}" in done.output
    config = RunConfig.load(Path(f"{task}.yaml"))
    example = RunConfig.load(ROOT / "runs" / EXAMPLES[task])
    assert (config.model, config.dataset) == (example.model, example.dataset)


def test_a_file_that_is_there_is_never_overwritten() -> None:
    Path("masked-lm.yaml").write_text("mine\n")
    done = init("masked-lm")
    assert done.exit_code == 2 and "is there already" in done.output
    assert Path("masked-lm.yaml").read_text() == "mine\n"


def test_a_bundle_without_images_has_no_data_for_that_task(bundle: Path) -> None:
    done = init("image-classification", "--bundle", bundle)
    assert done.exit_code == 2 and "no model in this bundle fits the task" in done.output
    assert "tiny-bert (bert)" in done.output and not Path("image-classification.yaml").exists()


@pytest.mark.parametrize(("package", "folder"), [("runner", "runs"), ("stage", "manifests")])
def test_every_example_is_in_its_package(package: str, folder: str) -> None:
    shown = {path.name: path.read_bytes() for path in (ROOT / folder).glob("*.yaml")}
    packed = {path.name: path.read_bytes() for path in (ROOT / package / "examples").glob("*.yaml")}
    assert packed == shown and packed


def test_stage_init_writes_an_example_manifest() -> None:
    from stage.cli import main as stage

    def run(name: str) -> Result:
        return CliRunner().invoke(stage, ["init", "--example", name], prog_name="stage")

    assert run("bert-large-wikitext2").exit_code == 0
    assert (
        Path("manifest.yaml").read_bytes()
        == (ROOT / "manifests/bert-large-wikitext2.yaml").read_bytes()
    )
    assert "is there already" in run("cifar10").output
    assert "Did you mean `cifar10`?" in run("cifar").output


def test_the_environments_that_manifests_name_are_there() -> None:
    import re

    for path in (ROOT / "manifests").glob("*.yaml"):
        for found in re.findall(r"\.\./envs/[\w./-]+\.yml", path.read_text(encoding="utf-8")):
            assert (path.parent / found).is_file(), f"{path}: {found}"
