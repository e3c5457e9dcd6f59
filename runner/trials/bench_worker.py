"""One trial inside the ranks: a few real optimizer steps. Nothing is saved or exported."""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from runner.job.host_memory import data_limit
from runner.run_folder.history import memory_by_phase
from runner.run_folder.layout import read_metrics, write_json
from runner.training.loop import Trainer, evaluate
from runner.trials.apart import RESULT

EVALUATED = 2  # batches of each rank


def measure(trainer: Trainer, *, steps: int, memory_gib: float | None) -> None:
    """Makes `steps` steps and writes their speed to `trial.json`.

    Args:
        steps: how many.
        memory_gib: the limit of one rank; None: the device's memory, or on a CPU this rank's share.
    """
    _limit_memory(memory_gib)
    trainer.observer.begin(0)
    trainer.end_phase("load")
    for _ in range(steps):
        trainer.train_step()
    trainer.read_sums()
    trainer.end_phase("train")
    _evaluate(trainer)
    trainer.ahead.close()
    trainer.observer.flush()
    if trainer.ranks.is_first:
        write_json(trainer.folder.root / RESULT, {"outcome": "fits", **_result(trainer)})
    trainer.ranks.barrier()


def _evaluate(trainer: Trainer) -> None:
    """Evaluates two batches of each rank, for the memory of that phase."""
    store, micro = trainer.stores.get("validation"), trainer.plan.micro
    if store is None:
        return
    ranks, device = trainer.ranks, trainer.device
    few = EVALUATED * micro * ranks.world_size
    evaluate(trainer.task, trainer.engine, store, ranks, micro, lambda: False, device, few)
    trainer.end_phase("evaluate")


def _result(trainer: Trainer) -> Mapping[str, Any]:
    every = list(read_metrics(trainer.folder.metrics))
    lines = [line for line in every if "loss" in line]
    memory = memory_by_phase(every)
    if len(lines) > 1:
        lines = lines[1:]  # the first step compiles, allocates and warms up
    keys = ("tokens_per_s", "samples_per_s", "step_s", *(["mfu"] if "mfu" in lines[0] else []))
    plan = trainer.plan
    asked = trainer.config.engine.zero
    promoted = trainer.config.engine.name == "deepspeed" and asked not in ("auto", plan.zero)
    return {
        **{key: statistics.median(line[key] for line in lines) for key in keys},
        "memory_gib": max(phase.get("device", phase["host"]) for phase in memory.values()),
        "memory": memory,
        "world_size": plan.world_size,
        "device": trainer.config.precision
        if trainer.device.type == "cpu"
        else torch.cuda.get_device_name(),
        "note": f"runs at stage {plan.zero}" if promoted else "",
    }


def _limit_memory(memory_gib: float | None) -> None:
    """Makes memory run out in this process before it runs out on the machine."""
    if torch.cuda.is_available():
        if memory_gib is not None:
            device = torch.cuda.current_device()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / total), device)
        return
    share = data_limit(int(os.environ["LOCAL_WORLD_SIZE"]), os.environ)
    limit = int(memory_gib * 2**30) if memory_gib is not None else share
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
