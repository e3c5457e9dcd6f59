"""Engines around a small module, on two ranks. Rank 0 writes `results.json`.

python -m tests.support.training.small_engines FOLDER RUN_FILE
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.run_folder.training_state import STATE, TrainingState
from runner.training.engines.base import Engine
from runner.training.setup import make_engine
from tests.runner.training.engines.observed import observations

RANKS, MICRO = 2, 2


class Layer(nn.Module):
    """The module that an engine wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))


class Small(nn.Module):
    """Two layers, one of them frozen, and one weight used twice. The loss is a sum, as in tasks."""

    _no_split_modules = ("Layer",)  # as transformers names the layers of its models

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.first(x.to(self.first.weight.dtype)))
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.last(hidden) - y).float().square().sum()


def batch(step: int, part: int) -> dict[str, torch.Tensor]:
    """Micro batch number `part` of a step on this rank."""
    random = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + part)
    return {
        "x": torch.randn(MICRO, 8, generator=random),
        "y": torch.randn(MICRO, 8, generator=random),
    }


def one_step(engine: Engine, step: int, spoiled: bool = False) -> tuple[float, float]:
    """One step: the loss over both ranks, and the norm. `spoiled`: rank 1's gradient overflows."""
    total = torch.zeros(())
    for part in range(2):
        inputs = batch(step, part)
        if spoiled and dist.get_rank() == 1 and part == 0:
            inputs["y"][0, 0] = 1e30
        # Small, so that the first loss scale, 2**16, does not overflow without `spoiled`.
        loss = engine.forward(inputs, last=part == 1) / (1000 * RANKS * MICRO * 2)
        engine.backward(loss, last=part == 1)
        total += loss.detach()
    norm = float(engine.step(0.01))
    dist.all_reduce(total)
    return total.item(), norm


def made(
    run_file: Path,
    engine: str,
    optimizer: str,
    precision: str,
) -> Engine:
    """A new engine around the same weights."""
    zero = int(engine[-1]) if engine.startswith("zero") else 3 if engine == "fsdp" else 0
    name = "deepspeed" if engine.startswith("zero") else engine
    # plain: sgd without momentum, which has no state at all
    kind = "{name: sgd, momentum: 0.0}" if optimizer == "plain" else f"{{name: {optimizer}}}"
    overrides = [f"engine.name={name}", f"optimizer={kind}"]
    if engine == "fsdp":
        overrides.append("engine.wrap={layer: Layer}")
    plan = TrainingPlan(8, RANKS, RANKS * MICRO * 2, MICRO, 2, precision, zero, ())
    return make_engine(Small(), RunConfig.load(run_file, overrides), plan, torch.device("cpu"))


def learn_and_resume(
    folder: Path, run_file: Path, engine: str, optimizer: str, precision: str
) -> dict[str, Any]:
    """Six steps. Then the last three again from a checkpoint after the third, in a new engine."""
    first = made(run_file, engine, optimizer, precision)
    steps = [one_step(first, step, spoiled=precision == "fp16" and step == 1) for step in range(3)]
    before = first.export()
    folder.mkdir(exist_ok=True)
    state = TrainingState(3, RANKS, first._plan.zero, precision, {})  # type: ignore[attr-defined]
    (folder / STATE).write_text(json.dumps(asdict(state)))
    first.save(folder)
    steps += [one_step(first, step) for step in range(3, 6)]
    second = made(run_file, engine, optimizer, precision)
    second.load(folder)
    again = second.export()
    return {
        "steps": steps,
        "resumed": [one_step(second, step) for step in range(3, 6)],
        "same": all(torch.equal(before[name], again[name]) for name in before),
    }


def full_disk(folder: Path, run_file: Path, engine: str) -> str:
    """The error on this rank when one rank may write at most one page.

    At stage 0 rank 0 alone writes, and the other must not wait in DeepSpeed's barrier for ever.
    """
    made_one = made(run_file, engine, "adamw", "fp32")
    one_step(made_one, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == (0 if engine == "zero0" else 1):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        made_one.save(folder)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def one_rank(rank: int, folder: Path, run_file: Path) -> None:
    """All measurements, on one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS
    )
    cases = [(e, o, "fp32") for e in ("ddp", "fsdp") for o in ("adamw", "lion")]
    cases += [("ddp", "adafactor", "fp32"), ("ddp", "adamw", "fp16"), ("fsdp", "adamw", "fp16")]
    cases += [("ddp", "adamw", "bf16"), ("fsdp", "adamw", "bf16")]
    cases += [("zero0", "adamw", "fp32"), ("zero1", "adamw", "bf16"), ("zero2", "adamw", "bf16")]
    cases += [("zero3", "lion", "fp32"), ("ddp", "sgd", "fp32"), ("fsdp", "sgd", "fp32")]
    cases += [("zero2", "sgd", "bf16"), ("fsdp", "plain", "fp32")]
    results: dict[str, Any] = {"seen": observations(run_file)}
    for case in cases:
        name = "-".join(case)
        results[name] = learn_and_resume(folder / name, run_file, *case)
    for engine in ("ddp", "fsdp", "zero0", "zero2"):
        outcome: list[Any] = [None] * RANKS
        dist.all_gather_object(outcome, full_disk(folder / f"full-{engine}", run_file, engine))
        results[f"full-{engine}"] = outcome
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch.multiprocessing.spawn import start_processes

    # Imported once: the ranks are forked.
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # and torch's compiler

    start_processes(
        one_rank, (Path(sys.argv[1]), Path(sys.argv[2])), nprocs=RANKS, start_method="fork"
    )
