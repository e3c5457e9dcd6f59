"""All automatic choices are printed in a few lines, and kept in the run folder, one per line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.config.explain import WIDTH, choices_as_comments, explain_choices
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.errors import load_yaml_with_lines

SMALLEST = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "mine.yaml").write_text(f"{SMALLEST}optimizer: {{lr: 1e-4}}\n")
    return RunConfig.load(tmp_path / "mine.yaml")


def test_every_default_is_printed_with_its_reason_in_one_line_per_group(config: RunConfig) -> None:
    lines = explain_choices(config.explain())
    text = " ".join(line.strip() for line in lines)
    for choice in config.explain():
        if choice.value not in ("auto", None, {}, ()):
            assert choice.key.rpartition(".")[2] in text and choice.reason in text, choice
    assert "optimizer: name adamw" in text and "betas [0.9, 0.999], eps 1e-08 (Adam's own)" in text
    assert (
        len([line for line in lines if not line.startswith("    ")]) <= 10
        and len(lines) < len(config.explain()) / 1.5
    )
    assert all(len(line) <= WIDTH for line in lines)
    assert "  not used: activation_checkpointing (" in "\n".join(lines)


def test_the_lines_fit_a_narrow_terminal(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 60 columns the block stayed 120 wide."""
    monkeypatch.setenv("COLUMNS", "60")
    assert max(len(line) for line in explain_choices(config.explain())) <= 60


def test_what_the_user_chose_is_not_printed_again(config: RunConfig) -> None:
    assert not re.search(r"\blr\b", " ".join(explain_choices(config.explain())))


def test_the_run_folder_keeps_them_as_comments_of_a_run_file(
    config: RunConfig, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml() + choices_as_comments(config.explain()))
    assert load_yaml_with_lines(path)[0] == load_yaml_with_lines(tmp_path / "config.yaml")[0]
    assert RunConfig.load(path).optimizer == config.optimizer
    text = path.read_text()
    assert "\n#   optimizer.eps: 1e-08  (Adam's own)\n" in text
    assert "\n#   precision: auto  (bf16 where the device has it, then fp16)\n" in text


def test_a_file_name_with_a_newline_ends_no_comment() -> None:
    choice = Choice("optimizer.lr", 1.0, "from a\nb: 1", "a\nb: 1")
    assert all(line.startswith("#") for line in choices_as_comments([choice]).splitlines())


def test_nothing_decided_is_nothing_said() -> None:
    assert explain_choices([]) == [] and choices_as_comments([]) == ""
