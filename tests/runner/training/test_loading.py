"""Ranks of one node read the weights once and hold them once; the loaded model is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runner.training.loading import Weighed

ROOT = Path(__file__).parents[3]
RUN_FILE = "format: 1\ntask: causal-lm\nmodel: {asset: gpt2}\ndataset: {asset: wikitext}\n"
# Ranks of one node: engines. On CPUs, ddp and ZeRO-1 keep a copy of their own on each rank.
RANKS = {8: ("fsdp-bf16", "zero3-bf16"), 2: ("ddp-fp32", "zero1-bf16")}
CASES = [(ranks, engine) for ranks, engines in RANKS.items() for engine in engines]


def model(folder: Path, width: int) -> Path:
    """A GPT-2 with random weights, in two bf16 files."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        n_embd=width, n_layer=32, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    made = GPT2LMHeadModel(settings).to(torch.bfloat16)
    size = sum(p.nbytes for p in made.parameters())
    made.save_pretrained(folder, max_shard_size=size * 2 // 3)
    return folder


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> what was read and held, for a model of 102 MB in float32 and for a narrow one.

    The narrow one has as many weights: what its ranks hold is what Python needs for so many.
    """
    folder = tmp_path_factory.mktemp("loading")
    run_file = folder / "run.yaml"
    run_file.write_text(RUN_FILE)
    found: dict[str, Any] = {}
    for name, width in (("wide", 256), ("narrow", 16)):
        path = model(folder / name, width)
        found[f"{name} size"] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for ranks, engines in RANKS.items():
            command = [sys.executable, "-m", "tests.runner.training.loading", str(ranks)]
            done = subprocess.run(
                [*command, str(run_file), str(path), *engines],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            found |= {
                f"{name} {ranks} {engine}": Weighed(**told)
                for engine, told in json.loads(done.stdout.splitlines()[-1]).items()
            }
    return found


@pytest.mark.parametrize(("ranks", "engine"), CASES)
def test_each_byte_of_the_weights_is_read_once(
    weighed: dict[str, Any], ranks: int, engine: str
) -> None:
    """Every rank read them all."""
    size = weighed["wide size"]
    assert 0.99 * size <= weighed[f"wide {ranks} {engine}"].read <= size


@pytest.mark.parametrize(("ranks", "engine"), CASES)
def test_no_more_than_what_is_kept_is_held(
    weighed: dict[str, Any], ranks: int, engine: str
) -> None:
    """Eight ranks held eight models, in float32 whatever they kept of them."""
    wide, narrow = (weighed[f"{width} {ranks} {engine}"] for width in ("wide", "narrow"))
    parameters = weighed["wide size"] / 2
    # FSDP2 keeps shards in float32, DDP a copy on each rank; ZeRO what it computes with.
    one = parameters * (2 if engine.startswith("zero") else 4)
    kept = one if engine in RANKS[8] else one * ranks
    assert wide.kept - narrow.kept > 0.9 * kept
    assert wide.held - narrow.held < kept + 0.3 * one


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("spread")
    (folder / "run.yaml").write_text(RUN_FILE)
    command = [sys.executable, "-m", "tests.runner.training.spread_models", str(folder)]
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
