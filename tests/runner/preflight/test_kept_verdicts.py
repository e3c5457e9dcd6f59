"""`runner check` asks transformers once: a verdict without a fault is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.data.tokenizing import load_tokenizer
from runner.errors import UsageError
from runner.inputs import ModelInput
from tests.runner.conftest import Cluster


def test_settings_that_transformers_cannot_use_are_a_message(tmp_path: Path) -> None:
    """Once transformers' TypeError came through, with a traceback."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": {"content": "[MASK]"}}')
    (tmp_path / "vocab.txt").write_text("[PAD]\n[MASK]\na\n")
    digests = dict.fromkeys(path.name for path in tmp_path.iterdir())
    model = ModelInput("m", tmp_path, "a/m", None, dict.fromkeys(digests, ""), {})
    with pytest.raises(UsageError, match="no tokenizer can be loaded: Special token mask_token"):
        load_tokenizer(model)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_second_check_starts_no_child(cluster: Cluster, kind: str) -> None:
    cluster.write(
        task="masked-lm" if kind == "bert" else "causal-lm", model={"asset": f"tiny-{kind}"},
        dataset={"asset": "reference"},
    )  # fmt: skip
    first = cluster.run("check", "tiny.yaml", "--processes", "2")
    assert first.returncode == 0, first.stderr
    done = cluster.run("check", "tiny.yaml", "--processes", "2", PYTHONPROFILEIMPORTTIME="1")
    assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "runner.job.check" in imported and not {"transformers", "torch"} & imported
