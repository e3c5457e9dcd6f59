"""The first steps are the trial of an automatic `batch.micro`: real ranks under a real limit."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from runner.run_folder.heartbeat import read_pulse
from scripts.lib.demo.repositories import DATASET, dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.runner.conftest import Cluster
from tests.support.once import once
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_tokenizer
from tests.support.waiting import free_port
from tests.support.warm import warm_python

MANIFEST = f"""\
format: 1
name: wide
assets:
  wide: {{model: acme/wide}}
  reference: {{dataset: {DATASET}, config: chapters}}
"""
ROOM_KIB = 600 * 2**10
"""What a rank gets beside the rest: 8 sequences take more, 4 take less."""


@pytest.fixture(scope="session")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of half a million weights whose activations take about 100 MB a sequence."""
    return once(tmp_path_factory, "wide-bundle", _stage_wide) / "bundle"


def _stage_wide(laptop: Path) -> None:
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls")}
    tokenizer = tiny_tokenizer(special | {"mask_token": "[MASK]"}, 1024, wordpiece=True)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=4096,
        num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    folder = laptop / "model"
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (laptop / "wide.yaml").write_text(MANIFEST)
    with LoopbackHub(laptop / "hub") as hub:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.repositories.commit("models", "acme/wide", files)
        hub.repositories.commit("datasets", DATASET, dataset_files())
        fetch_bundle(laptop, "wide", hub.endpoint)


def _write(cluster: Cluster, name: str, length: int) -> Path:
    return cluster.write(
        name,
        model={"asset": "wide"},
        dataset={"asset": "reference", "limit": {"train": 60, "validation": 4}},
        sequence_length=length,
        steps=1,
        batch={"global": 16},
        engine={"name": "ddp"},
        checkpoint={"every": 100, "keep": 1},
    )


@dataclass
class Limited:
    """Runs of a model whose guess does not fit under `ulimit -v kib`."""

    cluster: Cluster
    kib: int

    def command(self, *arguments: str) -> list[str]:
        words = [warm_python(), *self.cluster.command(*arguments)[1:]]
        return ["bash", "-c", 'ulimit -v "$0"; exec "$@"', str(self.kib), *words]

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.cluster.folder,
            env=self.cluster.environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, output: str, *options: str) -> tuple[list[str], dict[str, Any], int]:
        """Trains; returns the lines about what did not fit, environment.json and the attempts."""
        folder = self.cluster.output(output)
        words = ("big.yaml", "--processes", "2", "--output", str(folder), *options)
        process = self.start("train", *words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{out}\n{err}"
        halved = [line for line in err.splitlines() if "start again with" in line]
        return (
            halved,
            _json(folder / "environment.json"),
            _json(folder / "resolved.json")["attempt"],
        )


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, wide_bundle: Path) -> Iterator[Limited]:
    """Trains where the guess fits, without a limit, and measures the ranks' address space."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), wide_bundle)
    _write(cluster, "small", 32)
    cluster.prepare(_write(cluster, "big", 512))
    process = cluster.start("train", "small.yaml", "--processes", "2", python=warm_python())
    most = 0
    while process.poll() is None:
        most = max(most, *(_address_space(cluster.output("small") / "logs", r) for r in range(2)))
        time.sleep(0.02)
    out, err = process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    assert "did not fit" not in err
    yield Limited(cluster, most + ROOM_KIB)


def _address_space(logs: Path, rank: int) -> int:
    """The most of a rank so far, in KiB."""
    pulse = read_pulse(logs, rank) or {}
    try:
        lines = Path(f"/proc/{pulse.get('pid')}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmPeak")), 0)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_guess_that_does_not_fit_is_halved_and_the_next_start_begins_with_it(
    limited: Limited,
) -> None:
    halved, record, attempts = limited.train("big")
    micro = record["batch"]["micro"]
    assert micro in (2, 4)
    assert attempts == len(halved) + 1 == {4: 2, 2: 3}[micro]
    assert "batch.micro: 8 did not fit (rank " in halved[0]
    assert "out of memory on CPU" in halved[0]
    assert "the 2 ranks start again with 4, accumulation 2" in halved[0]
    again, record, attempts = limited.train("big", "--set", "steps=2")
    assert (again, attempts, record["batch"]["micro"]) == ([], 1, micro)


def test_ranks_of_another_launcher_end_with_2_and_say_what_to_write(limited: Limited) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = ("big.yaml", "--output", str(limited.cluster.output("foreign")))
    assert limited.cluster.run("prepare", *words).returncode == 0
    ranks = [
        limited.start("train", *words, **place, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=300) for rank in ranks]
    said = "\n".join(f"{out}\n{err}" for out, err in ended)
    assert 2 in [rank.returncode for rank in ranks], said
    assert "batch.micro: 4 (the same steps, less at once)" in said


def test_where_the_guess_fits_there_is_one_start(limited: Limited) -> None:
    folder = limited.cluster.output("small")
    assert _json(folder / "environment.json")["batch"]["micro"] == 8
    assert _json(folder / "resolved.json")["attempt"] == 1
    assert not (folder / "micro.json").exists()
