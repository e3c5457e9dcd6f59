"""Faults of a script of the user that `runner check` finds before the queue, each injected once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.from_stage import StageError
from runner.job.check import check_run
from runner.job.command_run import CommandRun
from runner.job.findings import errors_of
from runner.job.run import Asked
from tests.remedies.obeyed import obeys

GOOD = """\
import argparse
import os

import torch
import yaml
from transformers import AutoModel, AutoTokenizer, TrainingArguments

from lib.steps import steps

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="acme/tiny-bert")
parser.add_argument("--config", default="conf/a.yaml")
parser.add_argument("--out", default="out")
options = parser.parse_args()
with open(options.config) as file:
    config = yaml.safe_load(file)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModel.from_pretrained(options.model)
arguments = TrainingArguments(output_dir=options.out, report_to="none")
print(steps(config["steps"]), torch.__version__)
"""
COMMAND = "torchrun --nproc_per_node 2 train.py --config conf/a.yaml --out out"
SLURM = "{nodes: 2, gpus_per_node: 2}"


def made(folder: Path) -> None:
    """A project in which nothing is wrong."""
    (folder / "lib").mkdir(parents=True)
    (folder / "conf").mkdir()
    (folder / "train.py").write_text(GOOD)
    (folder / "lib/__init__.py").write_text("")
    (folder / "lib/steps.py").write_text("def steps(number):\n    return number\n")
    (folder / "conf/a.yaml").write_text("steps: 3\n")
    (folder / ".gitignore").write_text("output/\nprivate/\n")
    subprocess.run(["git", "init", "-q", folder], check=True)


def found(
    folder: Path, bundle: Path, command: str, slurm: str = SLURM, output: Path | None = None
) -> list[str]:
    """Errors and warnings of `runner check`."""
    run_file = folder / "run.yaml"
    run_file.write_text(f"format: 1\ncommand: {command!r}\nslurm: {slurm}\n")
    try:
        run = CommandRun.load(
            run_file, bundle, output or folder / "output/run", (), Asked(ahead=True)
        )
        findings = check_run(run)
    except StageError as error:
        findings = list(errors_of(error))
    texts = [str(one) for one in findings if one.level in ("error", "warning")]
    return [text for text in texts if "which is for CPUs" not in text]  # of this machine's torch


def changed(old: str, new: str, path: str = "train.py") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return change


def large(folder: Path) -> None:
    with (folder / "old.ckpt").open("wb") as file:
        file.truncate(2 * 10**9)


def not_tracked(folder: Path) -> None:
    (folder / "private").mkdir()
    (folder / "private/__init__.py").write_text("")
    changed("from lib.steps", "import private\nfrom lib.steps")(folder)


def nothing(folder: Path) -> None:
    """The fault is in the command."""


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what is wrong -> how it comes, the command, a part of what is said
    "a typo in the launcher": (nothing, COMMAND.replace("torchrun", "torchrum"), "torchrun"),
    "a typo in the script": (nothing, COMMAND.replace("train.py", "trian.py"), "train.py"),
    "a package": (changed("import yaml", "import yaml, nowhere_to_be_had"), COMMAND, "nowhere"),
    "a local module that git ignores": (not_tracked, COMMAND, "private"),
    "a config that is not there": (nothing, COMMAND.replace("a.yaml", "b.yaml"), "conf/b.yaml"),
    "a model in the code": (changed("acme/tiny-bert", "acme/other"), COMMAND, "acme/other"),
    "a model in the words": (nothing, f"{COMMAND} --model acme/other", "acme/other"),
    "a model in a config": (
        changed("steps: 3", "steps: 3\nmodel_name_or_path: acme/other", "conf/a.yaml"),
        COMMAND,
        "acme/other",
    ),
    "a path of the laptop in the code": (
        changed("print(", "open('/home/me/data.csv')\nprint("),
        COMMAND,
        "/home/me/data.csv",
    ),
    "the syntax of no Python": (changed("print(", "print((("), COMMAND, "train.py"),
    "a large checkpoint": (large, COMMAND, "old.ckpt"),
    "offline variables": (
        changed("import torch", "os.environ['HF_HUB_OFFLINE'] = '1'\nimport torch"),
        COMMAND,
        "HF_HUB_OFFLINE",
    ),
    "another Hub": (
        changed("import torch", "os.environ['HF_ENDPOINT'] = 'https://hf.example'\nimport torch"),
        COMMAND,
        "HF_ENDPOINT",
    ),
    "a flag that the launcher does not know": (
        nothing,
        COMMAND.replace("--nproc_per_node", "--nproc_per_nodes"),
        "--nproc",
    ),
    "more ranks than GPUs": (nothing, COMMAND.replace("node 2", "node 8"), "8"),
    "an option that the script does not have": (nothing, f"{COMMAND} --modle x", "--modle"),
    "an upload": (
        changed('report_to="none"', 'report_to="none", push_to_hub=True'),
        COMMAND,
        "push_to_hub",
    ),
    "one process on two nodes": (nothing, "python train.py", "torchrun"),
    "srun in front": (nothing, f"srun {COMMAND}", "srun"),
    "a quote that does not end": (nothing, f"{COMMAND} --out 'x", "quote"),
}


def test_a_project_in_which_nothing_is_wrong_has_no_findings(tmp_path: Path, bundle: Path) -> None:
    made(tmp_path / "project")
    assert found(tmp_path / "project", bundle, COMMAND) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_script_is_found_before_the_queue(
    fault: str, tmp_path: Path, bundle: Path
) -> None:
    project = tmp_path / "project"
    made(project)
    inject, command, said = FAULTS[fault]
    inject(project)
    texts = found(project, bundle, command)
    assert any(said in text and "\n  -> " in text for text in texts), texts
    assert len(texts) == 1, texts


@obeys("runner/job/checks/command.py", "Free space there, or choose ")
def test_a_project_that_does_not_fit_on_the_disk_is_found(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs its size twice; whoever chooses another --output goes on."""
    made(tmp_path / "project")
    (tmp_path / "project/data.bin").write_bytes(bytes(10**6))
    usage = shutil.disk_usage
    full = usage(tmp_path)._replace(free=1_500_000)
    small = tmp_path / "project"
    monkeypatch.setattr(shutil, "disk_usage", lambda at: full if at == small else usage(at))
    (text,) = found(tmp_path / "project", bundle, COMMAND)
    assert "the project needs 2 MB" in text and "1.5 MB are free" in text, text
    assert found(tmp_path / "project", bundle, COMMAND, output=tmp_path / "other") == []
