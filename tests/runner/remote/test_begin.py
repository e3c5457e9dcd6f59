"""What `submit --to CLUSTER -- COMMAND` writes for a checkout that knows nothing of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.config.command_config import CommandConfig
from runner.from_stage import UsageError
from runner.remote.begin import begin, run_file_of
from stage.lock.manifest import Manifest

PROFILE = 'format: 1\nplatform: linux-64\nglibc: "2.28"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout, and a cluster of the user."""
    folder = tmp_path / "theirs"
    (folder / "scripts").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "train.py").write_text(
        "from transformers import AutoModel\nAutoModel.from_pretrained('acme/model')\n"
    )
    users = tmp_path / "config/airlift"
    users.mkdir(parents=True)
    (users / "clusters.yaml").write_text("far: {host: far, folder: work, profile: far.yml}\n")
    (users / "far.yml").write_text(PROFILE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("torchrun --nproc-per-node 4 src/train.py --config conf/base.yaml", "train"),
        ("accelerate launch --config_file default.yaml sft.py", "sft"),
        ("llamafactory-cli train examples/lora sft.yaml", "sft"),
        ("python -m pkg.cli.train --x 1", "train"),
        ("lm_eval --model hf", "lm_eval"),
        ("bash scripts/run it.sh", "it"),
        ("./..", "run"),
    ],
)
def test_the_run_file_has_the_name_of_the_script(project: Path, words: str, name: str) -> None:
    assert run_file_of(words.split(" ")) == Path(f"runs/{name}.yaml")


def test_the_environment_of_the_project_and_the_names_in_its_code_are_the_manifest(
    project: Path,
) -> None:
    (project / "environment.yml").write_text("dependencies: [python=3.11]\n")
    words = ["torchrun", "--nproc_per_node=4", "train.py", "--dataset_name", "acme/rows"]
    run = run_file_of(words)
    assert not begin(words, run, "far", dry_run=True) and not run.exists()
    assert begin(words, run, "far", dry_run=False)
    config = CommandConfig.load(run)
    assert config.command == " ".join(words) and config.project == project
    assert config.slurm.gpus_per_node == 4
    manifest = Manifest.load(run.parent / str(config.manifest))
    assert [*manifest.requests] == ["env", "rows", "model"]
    assert "  # train.py:2\n  model:\n    model: acme/model\n" in manifest.text.decode()
    assert begin(words, run, "far", dry_run=False)  # again: nothing is written
    with pytest.raises(UsageError, match="the run file of another command"):
        begin([*words, "--more"], run, "far", dry_run=False)


def test_a_command_of_a_subfolder_starts_there(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "scripts/go.py").write_text("print(1)\n")
    monkeypatch.chdir(project / "scripts")
    words = ["python", "go.py", "two words"]
    run = run_file_of(words)
    assert run == Path("../runs/go.yaml") and begin(words, run, "far", dry_run=False)
    assert CommandConfig.load(run).command == "cd scripts && python go.py 'two words'"
    assert CommandConfig.load(run).manifest is None  # it names nothing
    assert begin(words, run, "far", dry_run=False)
