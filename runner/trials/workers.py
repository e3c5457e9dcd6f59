"""What ranks do that do not train: a trial of a bench, an evaluation, one sum over all of them.

A trial makes a few real optimizer steps; an evaluation loads the weights and evaluates once; the
sum shows whether the ranks meet, and how fast. Nothing is saved or exported.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.config.run_config import RunConfig
from runner.from_stage import DamageError, IncompleteError
from runner.job.host_memory import data_limit
from runner.launch.ranks import Rank
from runner.run_folder.history import memory_by_phase
from runner.run_folder.layout import read_metrics, write_json
from runner.run_folder.resume import check_resumable
from runner.run_folder.training_state import TrainingState, read_state
from runner.training.components.device import find_device
from runner.training.components.process_group import meet, open_store
from runner.training.loop import Trainer, evaluate
from runner.trials.apart import RESULT

EVALUATED = 2  # batches of each rank


def measure_trial(trainer: Trainer, *, steps: int, memory_gib: float | None) -> None:
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
    trainer.read_pending_sums()
    trainer.end_phase("train")
    _evaluate_few(trainer)
    trainer.ahead.close()
    trainer.observer.flush()
    if trainer.ranks.is_first:
        write_json(trainer.folder.root / RESULT, {"outcome": "fits", **_result_of(trainer)})
    trainer.ranks.barrier()


def _evaluate_few(trainer: Trainer) -> None:
    """Evaluates two batches of each rank, for the memory of that phase."""
    store, micro = trainer.stores.get("validation"), trainer.plan.micro
    if store is None:
        return
    ranks, device = trainer.ranks, trainer.device
    few = EVALUATED * micro * ranks.world_size
    evaluate(trainer.task, trainer.engine, store, ranks, micro, lambda: False, device, few)
    trainer.end_phase("evaluate")


def _result_of(trainer: Trainer) -> Mapping[str, Any]:
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


_MAY_DIFFER = ("data", "batch.global", "seed")
"""What may be another one: only weights are taken from the checkpoint."""


def measure_checkpoint(trainer: Trainer, *, checkpoint: str | None) -> None:
    """Evaluates once.

    Args:
        checkpoint: whose weights; None: those that the model has after loading.

    Raises:
        IncompleteError: a signal stopped it.
        DamageError, UsageError: the checkpoint cannot be used.
    """
    trainer.observer.begin(0)
    if checkpoint is None:
        trainer.observer.say(f"  {trainer.task.note}")
    else:
        trainer.observer.say(f"  weights from {checkpoint}")
        trainer.state.step = _load_weights(trainer, Path(checkpoint)).step
    trainer.end_phase("load")
    trainer.evaluate()
    trainer.ahead.close()
    trainer.observer.flush()
    trainer.ranks.barrier()
    if trainer.state.evaluation_due:
        raise IncompleteError(
            "the evaluation was stopped by a signal.", "Run the same command again."
        )


def _load_weights(trainer: Trainer, checkpoint: Path) -> TrainingState:
    """Loads a checkpoint.

    Raises:
        DamageError: it is not as it was written.
        UsageError: it is of another model, engine or precision.
    """
    if problem := trainer.checkpoints.problem_with(checkpoint):
        raise DamageError(
            f"{checkpoint}: {problem}.", "Evaluate another one: --checkpoint step-N, or best."
        )
    found, now = read_state(checkpoint), trainer.state
    same = {key: now.signature[key] for key in _MAY_DIFFER if key in now.signature}
    check_resumable(replace(found, signature={**found.signature, **same}), now, checkpoint)
    trainer.engine.load(checkpoint)
    return found


BYTES = {"cuda": 2**28, "cpu": 2**24}
TIMES = 3


def all_reduce(config: RunConfig, rank: Rank) -> dict[str, Any]:
    """Joins the other ranks, and adds up a vector over all of them.

    Returns:
        `ranks`, `backend`, `bytes`, `seconds` of the fastest, and `GB/s` per rank: what each sends
        and receives (2 (n - 1) / n of the vector).

    Raises:
        StageError: the ranks cannot meet.
    """
    info = rank.info
    device, _ = find_device(info.local_rank, info.local_world_size, config.slurm)
    meet(rank, open_store(rank), config.engine.name, device.type)
    size = BYTES[device.type]
    vector = torch.ones(size // 4, device=device)
    least = float("inf")
    for _ in range(TIMES + 1):  # the first one connects
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        if device.type == "cuda":
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - began)
    ranks = info.world_size
    moved = 2 * (ranks - 1) / ranks * size
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {
        "ranks": ranks,
        "backend": backend,
        "bytes": size,
        "seconds": least,
        "GB/s": moved / least / 1e9,
    }
