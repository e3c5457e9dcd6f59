"""Ranks of one node load a model up to where an engine makes its optimizer.

python -m tests.runner.training.loading RANKS ENGINE RUN_FILE MODEL_FOLDER...

The engine is `zero3-bf16` or the like. Prints JSON: name of a model's folder -> `Weighed`.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import modeling_utils

from runner.config.run_config import RunConfig
from runner.inputs import ModelInput
from runner.job.plan import TrainingPlan
from runner.training.engines import make_engine
from runner.training.tasks.causal_lm import CausalLM

JOINED, LOADING, LOADED = 1, 2, 3


@dataclass
class Weighed:
    """Bytes, of all ranks together.

    Attributes:
        read: from the weights' files.
        held: the most anonymous memory beyond what they had before.
        kept: the same, when all was loaded.
    """

    read: int
    held: int
    kept: int


class Loaded(Exception):
    """All weights are where they stay."""


class Counted:
    """An open safetensors file, or a part of it, that counts the bytes it gives away."""

    def __init__(self, real: Any, total: Any) -> None:
        self.real, self.total = real, total

    def get_slice(self, name: str) -> Counted:
        return Counted(self.real.get_slice(name), self.total)

    def __getitem__(self, part: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.real[part]
        with self.total.get_lock():
            self.total.value += tensor.nbytes
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def stop(*_: Any, **__: Any) -> None:
    raise Loaded


def load(name: str, ranks: int, run_file: Path, folder: Path) -> Any:
    """The same calls as in a run, until the optimizer would be made. Returns the task."""
    import runner.training.engines.ddp as ddp
    import runner.training.engines.deepspeed as deepspeed
    import runner.training.engines.native as native

    native.make_optimizer = deepspeed.make_optimizer = stop  # type: ignore[assignment]
    ddp.DistributedDataParallel = stop  # type: ignore[assignment, misc]  # it makes its buckets
    engine, _, precision = name.partition("-")
    zero = int(engine[-1]) if engine.startswith("zero") else 3 if engine == "fsdp" else 0
    kind = "deepspeed" if engine.startswith("zero") else engine
    config = RunConfig.load(run_file, [f"engine.name={kind}", f"precision={precision}"])
    settings = json.loads((folder / "config.json").read_text())
    task = CausalLM(config, ModelInput("big", folder, "big", None, {}, settings), None)
    plan = TrainingPlan(64, ranks, ranks, 1, 1, precision, zero, ())
    try:
        make_engine(task.module, config, plan, torch.device("cpu"))
    except Loaded:
        assert not [n for n, p in task.module.named_parameters() if p.is_meta]
    return task


def one_rank(
    rank: int,
    ranks: int,
    meeting: str,
    run_file: Path,
    folder: Path,
    name: str,
    phase: Any,
    read: Any,
) -> None:
    """One rank, and the phases that the parent looks at."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *a, **k: Counted(opened(*a, **k), read)  # type: ignore[assignment]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/{name}", rank=rank, world_size=ranks
    )
    for now in (JOINED, LOADING):
        dist.barrier()
        if rank == 0:
            phase.value = now
        time.sleep(0.1)
    task = load(name, ranks, run_file, folder)
    dist.barrier()
    if rank == 0:
        phase.value = LOADED
    time.sleep(0.5)
    dist.barrier()
    assert task is not None  # what it keeps was looked at
    os._exit(0)


def anonymous(pids: list[int]) -> int:
    """Bytes of anonymous memory of these processes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


def measured(name: str, ranks: int, meeting: str, run_file: Path, folder: Path) -> Weighed:
    """Starts the ranks and looks at them until they have loaded."""
    phase, read = mp.Value("i", 0), mp.Value("q", 0)
    context = mp.get_context("fork")
    processes = [
        context.Process(
            target=one_rank, args=(rank, ranks, meeting, run_file, folder, name, phase, read)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    pids = [process.pid for process in processes if process.pid]
    before, most = 0, 0
    while phase.value < LOADED and all(process.is_alive() for process in processes):
        if phase.value == JOINED:
            before = anonymous(pids)
        elif phase.value == LOADING:
            most = max(most, anonymous(pids))
        time.sleep(0.002)
    time.sleep(0.1)
    kept = anonymous(pids)
    for process in processes:
        process.join(60)
    assert all(process.exitcode == 0 for process in processes)
    return Weighed(read.value, most - before, kept - before)


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    import deepspeed  # noqa: F401  # once: the ranks are forked
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import runner.training.engines.ddp
    import runner.training.engines.deepspeed
    import runner.training.engines.fsdp  # noqa: F401

    number, engine_name, given, *folders = sys.argv[1:]
    told = {}
    for one in map(Path, folders):
        with tempfile.TemporaryDirectory() as place:
            told[one.name] = asdict(measured(engine_name, int(number), place, Path(given), one))
    print(json.dumps(told))
