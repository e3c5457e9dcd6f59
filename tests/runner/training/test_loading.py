"""Ranks of one node read the weights once and hold them once; the loaded model is the same."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.runner.training.loading import Weighed
from tests.support.warm import warm_python

ROOT = Path(__file__).parents[3]
RUN_FILE = "format: 1\ntask: causal-lm\nmodel: {asset: gpt2}\ndataset: {asset: wikitext}\n"
# Ranks of one node: engines. On CPUs, ddp and ZeRO-1 keep a copy of their own on each rank.
WIDTHS = {"wide": 256, "narrow": 16}
SHARDED = ("fsdp-bf16", "zero3-bf16")
CASES = [
    pytest.param(8, "fsdp-bf16", marks=pytest.mark.slow),
    (8, "zero3-bf16"),
    (2, "ddp-fp32"),
    pytest.param(2, "zero1-bf16", marks=pytest.mark.slow),
]


def model(folder: Path, width: int) -> Path:
    """A GPT-2 with random weights, in two bf16 files."""
    settings = GPT2Config(
        n_embd=width, n_layer=32, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    made = GPT2LMHeadModel(settings).to(torch.bfloat16)
    size = sum(p.nbytes for p in made.parameters())
    made.save_pretrained(folder, max_shard_size=size * 2 // 3)
    return folder


@dataclass
class Models:
    """A model of 102 MB in float32, and a narrow one, whose ranks are weighed while they load.

    The narrow one has as many weights: what its ranks hold is what Python needs for so many.
    """

    folder: Path
    size: int
    found: dict[str, dict[str, Weighed]] = field(default_factory=dict)

    def weighed(self, ranks: int, engine: str) -> dict[str, Weighed]:
        """What was read and held for the models `wide` and `narrow`."""
        case = f"{ranks} {engine}"
        if case not in self.found:
            command = [warm_python(), "-m", "tests.runner.training.loading", str(ranks), engine]
            done = subprocess.run(
                [*command, str(self.folder / "run.yaml"), *(str(self.folder / n) for n in WIDTHS)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout.splitlines()[-1])
            self.found[case] = {name: Weighed(**told[name]) for name in WIDTHS}
        return self.found[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("loading")
    (folder / "run.yaml").write_text(RUN_FILE)
    for name, width in WIDTHS.items():
        model(folder / name, width)
    return Models(folder, sum(f.stat().st_size for f in folder.glob("wide/*.safetensors")))


@pytest.mark.parametrize(("ranks", "engine"), CASES)
def test_each_byte_of_the_weights_is_read_once(models: Models, ranks: int, engine: str) -> None:
    """Every rank read them all."""
    assert 0.99 * models.size <= models.weighed(ranks, engine)["wide"].read <= models.size


@pytest.mark.parametrize(("ranks", "engine"), CASES)
def test_no_more_than_what_is_kept_is_held(models: Models, ranks: int, engine: str) -> None:
    """Eight ranks held eight models, in float32 whatever they kept of them."""
    wide, narrow = models.weighed(ranks, engine).values()
    parameters = models.size / 2
    # FSDP2 keeps shards in float32, DDP a copy on each rank; ZeRO what it computes with.
    one = parameters * (2 if engine.startswith("zero") else 4)
    kept = one if engine in SHARDED else one * ranks
    assert wide.kept - narrow.kept > 0.9 * kept
    assert wide.held - narrow.held < kept + 0.3 * one


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
