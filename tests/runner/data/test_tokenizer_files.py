"""A tokenizer is checked without transformers, which would refuse the same ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.data.tokenizer_files import check_tokenizer_files, num_tokens
from runner.data.tokenizing import load_tokenizer
from runner.errors import DamageError, UsageError
from runner.inputs import ModelInput, resolve
from tests.remedies.obeyed import obeys
from tests.runner.conftest import Cluster


@pytest.fixture
def model(cluster: Cluster, tmp_path: Path) -> ModelInput:
    """A copy of the model's folder, which a test may change."""
    found = resolve(RunConfig.load(cluster.write()), cluster.bundle).model
    copy = Path(shutil.copytree(found.path, tmp_path / "copy"))
    return replace(found, path=copy)


def without(model: ModelInput, *names: str) -> ModelInput:
    return replace(model, digests={n: d for n, d in model.digests.items() if n not in names})


def test_the_tokens_are_counted_as_transformers_counts_them(model: ModelInput) -> None:
    content = json.loads((model.path / "tokenizer.json").read_text())
    assert num_tokens(content) == len(load_tokenizer(model)) > 0
    pieces = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"content": "b"}]}
    assert num_tokens(pieces) == 2
    for unknown in ({}, {"model": []}, {"model": {"vocab": 3}}, {"model": {"vocab": ["a"]}}):
        assert num_tokens(unknown) == 0


@obeys("runner/data/tokenizer_files.py", "Tokenizer and model do not belong together: stage both")
def test_a_tokenizer_that_cannot_work_is_refused(cluster: Cluster, model: ModelInput) -> None:
    config = RunConfig.load(cluster.write())
    number = len(load_tokenizer(model))
    check_tokenizer_files(config, model, number)  # both from one repository
    check_tokenizer_files(config, model, 0)
    with pytest.raises(UsageError, match=f"knows {number} tokens, its model {number - 1}"):
        check_tokenizer_files(config, model, number - 1)
    names = [n for n in model.digests if n.startswith(("tokenizer", "vocab"))]
    with pytest.raises(UsageError, match="no tokenizer can be loaded"):
        check_tokenizer_files(config, without(model, *names), number)
    (model.path / "tokenizer.json").write_text("{")
    with pytest.raises(DamageError, match=r"tokenizer\.json"):
        check_tokenizer_files(config, model, number)


def test_messages_need_a_chat_template(cluster: Cluster, model: ModelInput) -> None:
    data = {"asset": "reference", "messages": "text"}
    config = RunConfig.load(cluster.write(task="instruction", dataset=data))
    with pytest.raises(UsageError, match="no chat template"):
        check_tokenizer_files(config, model, 0)
    with_file = replace(model, digests={**model.digests, "chat_template.jinja": ""})
    check_tokenizer_files(config, with_file, 0)
    path = model.path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    check_tokenizer_files(
        config, replace(model, digests={**model.digests, "tokenizer_config.json": ""}), 0
    )
