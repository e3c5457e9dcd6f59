"""What rank 0 reads and sends is what each rank would have loaded itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.warm import warm_python

ROOT = Path(__file__).parents[3]
RUN_FILE = "format: 1\ntask: causal-lm\nmodel: {asset: gpt2}\ndataset: {asset: wikitext}\n"


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("spread")
    (folder / "run.yaml").write_text(RUN_FILE)
    command = [warm_python(), "-m", "tests.runner.training.spread_models", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: rest for name, *rest in lines if name}


@pytest.mark.parametrize(
    "name",
    ["rotary", "long-rotary", "tied", "experts", "no-head", "sinusoidal", "batch-norm", "patches"],
)
def test_a_rank_gets_what_it_would_have_loaded(spread: dict[str, list[str]], name: str) -> None:
    """Bit for bit: weights, new heads, ties, buffers that are not saved, and plain attributes."""
    assert spread[name] == []


def test_every_rank_says_that_a_file_is_damaged(spread: dict[str, list[str]]) -> None:
    """None waits for rank 0, which reads alone."""
    assert spread["damaged-0"] == spread["damaged-1"] == ["SafetensorError"]
