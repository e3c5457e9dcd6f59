"""What only a shell reads, in files that no shell reads; and files that no shell can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.first_job.harness import Found, assert_found, check, run_runner, write_run

GPT2 = {"task": "causal-lm", "model": {"asset": "gpt2"}}
SETTINGS: dict[str, tuple[dict[str, Any], Found]] = {
    "a directive": (
        {"slurm": {"setup": ["export A=1", "#SBATCH --mem=64G"]}},
        Found(("`#SBATCH --mem=64G` has no effect here",), "slurm.options"),
    ),
    "a comment": (
        {"slurm": {"setup": [None]}},
        Found(("`slurm.setup` must be a list",), "put such a line in quotes"),
    ),
    "a version": (
        {"slurm": {"modules": ["cuda/12", 3.1]}},
        Found(("`slurm.modules` must be a list of text",), "Put each in quotes"),
    ),
    "a variable": (
        {"engine": {"offload": "nvme", "nvme_path": "$SLURM_TMPDIR"}},
        Found(("$SLURM_TMPDIR stays as it is",), "Write the path itself"),
    ),
    "two numbers of GPUs": (
        {"slurm": {"gpus_per_node": 4, "options": {"gres": "gpu:a800:2"}}},
        Found(("slurm.gpus_per_node: 4, and slurm.options asks for 2 GPUs",), "Make them equal"),
    ),
    "an image": (
        {"slurm": {"container": ["apptainer", "exec", "--nv", "${WORK}/torch.sif"]}},
        Found(("${WORK}/torch.sif stays as it is",), "Write the path itself"),
    ),
}


@pytest.mark.parametrize("entry", SETTINGS)
def test_what_only_a_shell_would_read_is_refused(staged: Path, tmp_path: Path, entry: str) -> None:
    keys, found = SETTINGS[entry]
    assert_found(check(tmp_path, staged, **GPT2 | keys), found)


def test_a_home_folder_in_the_middle_of_a_word_is_the_home_folder(
    staged: Path, tmp_path: Path
) -> None:
    """`--output=~/runs` made a folder `~`: bash replaces it at the beginning of a word alone."""
    home = tmp_path / "home"
    (home / "mine").mkdir(parents=True)
    write_run(tmp_path, **GPT2)
    said = run_runner(
        tmp_path, "check", "tiny.yaml", f"--bundle={staged}", "--output=~/runs/a",
        "--processes", "2", "--set", "engine.config=~/mine/ds.json", HOME=str(home),
    )  # fmt: skip
    assert_found(said, Found((f"{home}/mine/ds.json: no such file",), ""))
    assert not (tmp_path / "~").exists()


SCRIPTS = {
    "E20": (b"#!/bin/bash\r\necho hi\r\n", 0o755, ("line ends of Windows", "sed -i")),
    "no rights": (b"#!/bin/sh\necho hi\n", 0o644, ("may not be executed", "chmod +x ./train.sh")),
    "no first line": (b"echo hi\n", 0o755, ("does not say what reads it", "-- bash ")),
    "another machine's": (b"#!/opt/x/python\n", 0o755, ("/opt/x/python in its first", "-- python")),
}


@pytest.mark.parametrize("entry", SCRIPTS)
def test_a_script_that_no_kernel_starts_is_refused_with_the_way_out(
    staged: Path, tmp_path: Path, entry: str
) -> None:
    content, mode, words = SCRIPTS[entry]
    (tmp_path / "train.sh").write_bytes(content)
    (tmp_path / "train.sh").chmod(mode)
    said = run_runner(tmp_path, "exec", "--bundle", str(staged), "--", "./train.sh")
    assert_found(said, Found(words[:1], words[1]))


UTF_16 = {"E19": Found(("not UTF-8 text",), "iconv -f UTF-16 -t UTF-8")}


def test_a_file_that_powershell_wrote_is_named_with_the_command(
    staged: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path, **GPT2)
    path.write_bytes(path.read_text().encode("utf-16"))
    said = run_runner(tmp_path, "check", "tiny.yaml", "--bundle", str(staged))
    assert_found(said, UTF_16["E19"])
