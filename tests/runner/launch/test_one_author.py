"""Each decision has one author: the launcher writes it down, rank 0 completes it and sends it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runner.job.job import Job
from runner.launch.resolved import Resolved, read, write
from tests.runner.conftest import Cluster
from tests.support.code import run_warm
from tests.support.waiting import free_port

FILES = ("tiny.yaml", "config.yaml", "tiny.lock", "manifest-sha256.txt", "resolved.json")
TAG_MANIFEST = "tagmanifest-sha256.txt"

# Runs `runner ARGUMENTS` and writes which of the files it opens.
COMMAND = """
import os, sys
seen, names = open(sys.argv[1], "a", buffering=1), sys.argv[2].split(",")
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = os.path.basename(os.fsdecode(arguments[0]))
        if name in names:
            seen.write(f"{name} {arguments[1]}\\n")
sys.addaudithook(hook)
sys.argv = ["runner", *sys.argv[3:]]
from runner.cli import main
main()
"""


def opened(
    cluster: Cluster, tmp_path: Path, arguments: list[str], nodes: int, **variables: str
) -> list[list[str]]:
    """Two ranks on one node or on two: what each has opened to read, in order."""
    names = ",".join((*FILES, TAG_MANIFEST))

    def rank(number: int) -> list[str]:
        local = (number, 2) if nodes == 1 else (0, 1)
        place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(local[0])}
        environ = cluster.environment(
            **place, LOCAL_WORLD_SIZE=str(local[1]), MASTER_ADDR="127.0.0.1",
            GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", **variables,
        )  # fmt: skip
        log = tmp_path / f"opened-{number}"
        done = run_warm(COMMAND, str(log), names, *arguments, cwd=cluster.folder, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (line.rpartition(" ") for line in log.read_text().splitlines())
        return [name for name, _, mode in lines if "w" not in mode]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(rank, (0, 1)))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_but_the_first_opens_no_file_of_the_run_or_of_the_lock(
    cluster: Cluster, tmp_path: Path, nodes: int
) -> None:
    """One rank per node reads the bundle's tag manifest, and its digest is compared."""
    path = cluster.write(engine={"name": "ddp"}, steps=2)
    cluster.prepare(path)
    run = Job.load(path, cluster.bundle, cluster.output(), ())
    run.folder.make()
    write(Resolved.of(run))
    first, second = opened(
        cluster, tmp_path, ["rank", str(cluster.output()), "train"], nodes,
        AIRLIFT_RANK="1", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert first == ["resolved.json", TAG_MANIFEST]
    assert second == ([] if nodes == 1 else [TAG_MANIFEST])
    known = json.loads((cluster.output() / "resolved.json").read_text())
    assert (known["plan"]["world_size"], known["plan"]["micro"], known["steps"]) == (2, 2, 2)


def test_ranks_of_another_launcher_leave_the_files_to_rank_0(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.write(engine={"name": "ddp"}, steps=2)
    command = ["train", "tiny.yaml", "--bundle", str(cluster.bundle)]
    port = free_port()
    first, second = opened(
        cluster, tmp_path, command, 1, TORCHELASTIC_RUN_ID="x", MASTER_PORT=port
    )  # fmt: skip
    assert {"tiny.yaml", TAG_MANIFEST} <= set(first)
    assert second == []
    assert (cluster.output() / "logs/rank-1.pulse").exists()
    # The run is finished: all ranks end well, without a second training.
    again = opened(cluster, tmp_path, command, 1, TORCHELASTIC_RUN_ID="x", MASTER_PORT=free_port())
    assert again[1] == []


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}, "lora": {"targets": ["c_attn"]}},
    "several": {
        "dataset": None,
        "datasets": [
            {"asset": "reference", "weight": 2.0},
            {"asset": "reference", "limit": {"train": 9}},
        ],
    },
    "held out": {
        "dataset": {"asset": "reference", "validation": "5%"},
        "optimizer": {"name": "lion"},
    },
    "fsdp": {
        "engine": {"name": "fsdp", "wrap": {"min_params": 100}},
        "checkpoint": {"every": "10 min"},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_read_is_what_was_written(cluster: Cluster, name: str) -> None:
    job = Job.load(cluster.write(**SETTINGS[name]), cluster.bundle, cluster.output(), ("seed=7",))
    job.folder.make()
    written = Resolved.of(job, phase="first", checkpoint=None)
    write(written)
    found = read(job.folder)
    assert found == written
    assert found.job.config.place("seed") == "--set seed" == job.config.place("seed")
    assert found.job.config.place("steps") == job.config.place("steps")
    assert found.job.config.to_yaml() == job.config.to_yaml()
