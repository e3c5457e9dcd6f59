"""One rank: it joins the others, learns the plan, and loads data, model and engine.

`make_trainer` returns the `Trainer`; `run_work` does the work of the rank with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from runner.config.run_config import RunConfig
from runner.data.prepare import check_together, open_prepared
from runner.data.store import Stores
from runner.inputs import running_tree
from runner.job.checks.any_run import verified
from runner.job.findings import raise_errors
from runner.job.installed import check_fsdp
from runner.job.model_probe import count_parameters
from runner.job.plan import TrainingPlan, can_be_smaller, check_step, num_steps, with_micro
from runner.job.shapes import Device
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Rank
from runner.launch.resolved import Resolved, tried_with, write_resolved
from runner.processes import threads_variable
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import environment_record, exported, write_json
from runner.run_folder.resume import signature
from runner.run_folder.run_lock import hold_run_folder
from runner.run_folder.training_state import TrainingState
from runner.tasks import task_named
from runner.training.components.batches import Order, WeightedDataset
from runner.training.components.device import StopRequest, find_device, gpu_uuid
from runner.training.components.optimization import Schedule
from runner.training.components.process_group import (
    RankFacts,
    Ranks,
    check_facts,
    meet,
    open_store,
    weakest,
)
from runner.training.engines.base import Engine
from runner.training.faults import explained
from runner.training.loop import Trainer
from runner.training.reporting import Console, FirstSteps, Observer, Phases, StepClock, open_console
from runner.training.saving.checkpoints import Checkpoints
from runner.training.saving.export import read_companions, read_origin
from runner.training.weights import RunningStatistics, check_batch_norm
from stage.environment.check import on_site


def to_the_end(trainer: Trainer) -> None:
    """Trains from the newest whole checkpoint, if there is one, to the exported model."""
    trainer.resume()
    if can_be_smaller(trainer.config, trainer.plan):
        trainer.phases.first_steps.begin(trainer.device)
        trainer.ranks.barrier()  # each has seen what is free before another takes of it
    if trainer.run():
        trainer.export()


def run_work(rank: Rank, resolved: Resolved, work: Callable[..., None]) -> None:
    """Joins the other ranks, learns the plan, builds the trainer, and does the work.

    Args:
        rank: this rank.
        resolved: what was decided before the ranks started.
        work: what to do with the trainer, and with the options of the work.

    Raises:
        UsageError: the data is not prepared, the checkpoint is of another run, or the plan is not
            possible; without our launcher: another process works in the run folder.
        DamageError: a file of the bundle cannot be read.
        IncompleteError: the disk is full or gives an error, or another rank was lost.
        StageError: a loss or gradient is not finite; the ranks cannot reach each other.
    """
    store = open_store(rank)
    stop = StopRequest()
    stop.listen()
    info, job, folder = rank.info, resolved.run, resolved.run.folder
    facts: Device | None = None
    whole: Resolved | None = None
    trainer: Trainer | None = None
    with ExitStack() as held, open_console(folder.logs / f"rank-{info.rank}.log") as console:
        try:
            device, facts = find_device(info.local_rank, info.local_world_size, job.config.slurm)
            threads = threads_variable(os.environ, 1)[0]["OMP_NUM_THREADS"]
            torch.set_num_threads(int(threads))
            ranks = meet(rank, store, job.config.engine.name, device.type)
            if not info.is_ours:  # else our launcher has done it
                ranks.from_first(lambda: _take(job, held))
            seen = RankFacts.of(info, facts, gpu_uuid(device), job.inputs.bundle)
            whole = decide_once(ranks, resolved, seen)
            trainer = make_trainer(whole, ranks, device, facts, stop, console, rank.heartbeat)
            try:
                work(trainer, **whole.options)
            finally:
                trainer.observer.close()
        except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
            if (fault := explained(error, info, job, facts, whole, trainer)) is None:
                raise
            raise fault from None
        dist.destroy_process_group()


def _take(job: TrainingRun, held: ExitStack) -> None:
    """Takes the run folder in rank 0, and looks at the bundle, as our launcher does at each start.

    Only here, after the ranks have met, can a refusal reach all of them.

    Args:
        held: gives the folder back at its end.

    Raises:
        UsageError: another process works in the folder.
        StageError: the bundle is damaged, or is not verified where that is required.
    """
    held.enter_context(hold_run_folder(job.folder, os.environ))
    raise_errors(verified.find(job))
    job.folder.stopped.unlink(missing_ok=True)


def decide_once(ranks: Ranks, resolved: Resolved, facts: RankFacts) -> Resolved:
    """What is decided about the run, on every rank.

    Rank 0 decides what the launcher could not, for the devices of all ranks, writes it down, and
    sends it to the others.

    Args:
        resolved: what was decided before the ranks started.
        facts: what this rank sees.

    Raises:
        UsageError: the ranks do not fit together, or the plan is not possible; on every rank.
    """
    found = ranks.gather(facts)

    def decide_rest() -> Resolved:
        check_facts(found)
        config, device = resolved.run.config, weakest(found)
        run = resolved.run.on(device, ranks.world_size)
        if resolved.shape.num_parameters:
            run = run.given(TrainingRun.shape, resolved.shape)
        else:  # no weights: the launcher could not count
            first = config.model.folder or run.inputs.model.path
            run = run.given(TrainingRun.counted, count_parameters(config, first))
        plan, bound = run.plan, resolved.bound
        sequences = len(open_data(resolved)[1])
        notes = [str(finding) for finding in check_step(config, sequences, plan.total)]
        if len({one.device.name for one in found}) > 1:
            notes.append(
                f"the GPUs differ ({device.name}): all ranks use only what the weakest one has"
            )
        whole = replace(
            resolved,
            shape=run.shape,
            plan=plan,
            device=device,
            steps=num_steps(config, sequences, plan.total),
            notes=tuple(notes),
        )
        if bound is not None and bound.tried_with == tried_with(whole):
            whole = replace(whole, plan=with_micro(config, plan, bound))
        write_resolved(whole)
        return whole

    return ranks.from_first(decide_rest)


def make_trainer(
    resolved: Resolved,
    ranks: Ranks,
    device: torch.device,
    facts: Device,
    stop: StopRequest,
    console: Console,
    heartbeat: Heartbeat,
) -> Trainer:
    """Opens the data, and builds the model and the engine.

    Args:
        facts: what this rank's device can do.
    """
    job, plan = resolved.run, resolved.decided()
    config, inputs, folder = job.config, job.inputs, job.folder
    companions = read_companions(inputs.model) if ranks.is_first else {}
    first = config.model.folder or inputs.model.path
    origin = read_origin(first) if ranks.is_first and config.model.init != "scratch" else ()
    stores, order = open_data(resolved)
    # The precision decides how LoRA stores the weights that it does not train.
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]  # one of its values
    task = task_named(config.task).objective(decided, inputs.model, stores["train"].facts)
    engine = make_engine(task.module, config, plan, device)
    if ranks.is_first:
        write_json(folder.environment, _facts(resolved, facts, len(order)) | exported(folder))
    settings = config.to_mapping() if config.wandb else None
    observer = Observer(folder, resolved.steps, console, is_first=ranks.is_first, wandb=settings)
    for note in resolved.notes if ranks.is_first else ():
        observer.say(note)
    clock = StepClock.of(
        config,
        resolved.shape,
        plan,
        facts,
        logits_at_predictions=task.logits_at_predictions,
    )
    state = TrainingState(
        step=0,
        world_size=plan.world_size,
        zero=plan.zero,
        precision=plan.precision,
        signature=signature(config, inputs, resolved.data, plan.total),
        engine=config.engine.name,
    )
    return Trainer(
        config=config,
        inputs=inputs,
        folder=folder,
        plan=plan,
        task=task,
        engine=engine,
        ranks=ranks,
        stores=stores,
        order=order,
        checkpoints=Checkpoints(folder.checkpoints, config.checkpoint, ranks, observer.say),
        observer=observer,
        statistics=RunningStatistics(task.module),
        stop=stop,
        device=device,
        schedule=Schedule(config, resolved.steps, plan.total, len(order)),
        state=state,
        clock=clock,
        phases=Phases(observer, heartbeat, device, ranks, config.compile, FirstSteps(heartbeat)),
        companions=companions,
        origin=origin,
    )


def make_engine(
    module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
) -> Engine:
    """The engine for a run file's `engine.name`. All ranks call it, after they have joined.

    Args:
        module: float32 on the CPU, the same on every rank.
        config: the run file.
        plan: precision, batch sizes and ZeRO stage of the run.
        device: of this rank.

    Raises:
        UsageError: the model does not have the layers to wrap, or has batch norm that would be in
            16 bits; this torch has FSDP2 for GPUs only.
    """
    check_batch_norm(module, config, plan.precision)
    # Imported only where it is used: DDP and FSDP do not need DeepSpeed.
    if config.engine.name == "ddp":
        from runner.training.engines.native import DDPEngine

        return DDPEngine(module, config, plan, device)
    if config.engine.name == "fsdp":
        check_fsdp(config, device.type)
        from runner.training.engines.native import FSDPEngine

        return FSDPEngine(module, config, plan, device)
    from runner.training.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(module, config, plan, device)


def open_data(resolved: Resolved) -> tuple[dict[str, Stores], Order]:
    """The prepared data by role, and the order of the training samples.

    Raises:
        UsageError: it is not prepared.
    """
    job = resolved.run
    command = job.command("prepare")
    opened = {
        role: [open_prepared(path, f"the data of `{role}`", command) for path in several]
        for role, several in resolved.stores.items()
    }
    check_together(opened)
    stores = {role: Stores(several) for role, several in opened.items()}
    weights = [data.settings.weight for data in job.inputs.datasets]
    parts = [
        WeightedDataset(len(s), w) for s, w in zip(stores["train"].parts, weights, strict=True)
    ]
    return stores, Order(parts, job.config.seed)


def _facts(resolved: Resolved, device: Device, num_sequences: int) -> dict[str, Any]:
    """The content of `environment.json`: what is trained, where, and on which devices."""
    config, inputs, plan = resolved.run.config, resolved.run.inputs, resolved.decided()
    facts = {
        "bundle_id": inputs.bundle_id,
        "lock_digest": inputs.bundle_id,
        "environment_tree": running_tree(),
        **({"site": site} if (site := on_site.provided()) else {}),
        "model": f"{inputs.model.source}@{inputs.model.commit}",
        "seed": config.seed,
        "num_steps": resolved.steps,
        "num_sequences": num_sequences,
        "pid": os.getpid(),
        "world_size": plan.world_size,
        "sequence_length": plan.sequence_length,
        "batch": {"global": plan.total, "micro": plan.micro, "accumulation": plan.accumulation},
        "device": device.name,
        "device_memory_gib": round(device.memory / 2**30, 1),
        "precision": plan.precision,
        "zero": plan.zero,
        "engine": config.engine.name,
        "decided": {choice.key: [choice.value, choice.reason] for choice in plan.choices},
    }
    return environment_record(facts, os.environ)
