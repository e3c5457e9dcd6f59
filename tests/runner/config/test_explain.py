"""All automatic choices are kept in the run folder, one per line with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.explain import choices_as_comments
from runner.config.fields import Choice
from runner.config.run_config import RunConfig

SMALLEST = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "mine.yaml").write_text(f"{SMALLEST}optimizer: {{lr: 1e-4}}\n")
    return RunConfig.load(tmp_path / "mine.yaml")


def test_the_run_folder_keeps_them_as_comments_of_a_run_file(
    config: RunConfig, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml() + choices_as_comments(config.explain()))
    assert RunConfig.load(path).optimizer == config.optimizer
    text = path.read_text()
    assert "\n#   optimizer.eps: 1e-08  (Adam's own)\n" in text
    assert "\n#   precision: auto  (bf16 where the device has it, then fp16)\n" in text


def test_a_file_name_with_a_newline_ends_no_comment() -> None:
    choice = Choice("optimizer.lr", 1.0, "from a\nb: 1", "a\nb: 1")
    assert all(line.startswith("#") for line in choices_as_comments([choice]).splitlines())
