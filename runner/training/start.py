"""One rank from joining the others to its end: what `auto` means, data, model and engine -> a `Trainer` that runs."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from typing import Any

import torch

from runner.config import RunConfig
from runner.data.prepare import open_prepared
from runner.data.recipe import data_key, recipes
from runner.data.store import Stores
from runner.errors import IncompleteError, LostPeerError
from runner.inputs import Inputs
from runner.launch import MEETING_FILE, RankEnvironment
from runner.node_local import running_tree
from runner.plan import Plan, decide, num_steps
from runner.preflight import shape_of
from runner.records import RunFolder, environment_record, exported, write_json
from runner.resume import newest_first
from runner.shapes import Device
from runner.training.agreement import Standpoint, check_agreement
from runner.training.batches import Order, Part
from runner.training.checkpoint import Checkpoints
from runner.training.console import Console, open_console
from runner.training.device import find_device, gpu_uuid
from runner.training.engines import make_engine
from runner.training.loop import Trainer
from runner.training.observer import Observer
from runner.training.ranks import Ranks, is_lost_peer, join
from runner.training.running_statistics import RunningStatistics
from runner.training.signals import StopRequest
from runner.training.tasks import task_named
from runner.training.throughput import StepClock
from runner.vitals import Vitals


def train(config: RunConfig, inputs: Inputs, folder: RunFolder, place: RankEnvironment, vitals: Vitals) -> None:
    """Trains. Resumes from the newest valid checkpoint by itself.

    Args:
        vitals: where this rank shows that it gets on.

    Raises:
        UsageError: data that is not prepared, a checkpoint of something else, a plan that cannot be.
        IncompleteError: the disk is full.
    """
    stop = StopRequest()
    stop.listen()
    log = folder.logs / f"rank-{place.rank}.log"
    trainer: Trainer | None = None
    with open_console(log) as console:
        try:
            trainer = start(config, inputs, folder, place, stop, console, vitals)
            try:
                trainer.resume()
                if trainer.run():
                    trainer.export()
            finally:
                trainer.observer.close()
        except OSError as error:
            raise cannot_write(error, folder, trainer.step if trainer else 0) from None
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            traceback.print_exc()
            raise LostPeerError(
                f"rank {place.rank} lost another rank; see the other logs in {folder.logs} for why.",
                "Run the same command again: it goes on from the last checkpoint.",
            ) from None
        torch.distributed.destroy_process_group()


def start(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    place: RankEnvironment,
    stop: StopRequest,
    console: Console,
    vitals: Vitals,
) -> Trainer:
    """Joins the other ranks, decides what is `auto`, opens the data, builds the model."""
    device, facts = find_device(place.local_rank, place.local_world_size)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join(config.engine.name, device.type, place, os.environ.get(MEETING_FILE))
    ranks = Ranks()
    shape = shape_of(config, inputs.model)
    plan = decide(config, shape, facts, ranks.world_size)
    check_agreement(ranks.gather(Standpoint.of(plan, facts, config, inputs, gpu_uuid(device))))
    command = f"runner prepare {config.path} --bundle {inputs.bundle} --output {folder.root}"
    wanted = recipes(config, inputs, plan.sequence_length)
    stores = {
        role: Stores([open_prepared(recipe, folder.stores, command) for recipe in several])
        for role, several in wanted.items()
    }
    weights = [recipe.dataset.weight for recipe in wanted["train"]]
    order = Order([Part(len(s), w) for s, w in zip(stores["train"].parts, weights, strict=True)], config.seed)
    steps = num_steps(config, len(order), plan.total)
    # How LoRA keeps what it does not train follows from the precision.
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]  # one of its values
    task = task_named(config.task)(decided, inputs.model, stores["train"].facts)
    engine = make_engine(task.module, config, plan, device)
    if ranks.is_first:
        write_json(folder.environment, _facts(config, inputs, plan, facts, steps) | exported(folder))

    observer = Observer(folder, steps, console, is_first=ranks.is_first)
    return Trainer(
        config=config,
        inputs=inputs,
        folder=folder,
        plan=plan,
        task=task,
        engine=engine,
        ranks=ranks,
        stores=stores,
        data=data_key(wanted["train"]),
        order=order,
        checkpoints=Checkpoints(folder.checkpoints, config.checkpoint, ranks, observer.say),
        observer=observer,
        statistics=RunningStatistics(task.module),
        stop=stop,
        vitals=vitals,
        device=device,
        num_steps=steps,
        clock=StepClock.of(config, shape, plan, facts),
    )


def cannot_write(error: OSError, folder: RunFolder, step: int) -> IncompleteError:
    """A disk that takes no more, in words: where, after which step, and what is safe.

    Args:
        step: steps done.
    """
    whole = next(iter(newest_first(folder.checkpoints)), None)
    safe = f"{whole} was written before and is whole" if whole else "no checkpoint had been written"
    return IncompleteError(
        f"{error.filename or folder.root}: {error.strerror or error}, after step {step}; {safe}.",
        "Free space or quota there (older runs, checkpoints), then run the same command again"
        + (f": it goes on from {whole.name}." if whole else "."),
    )


def _facts(config: RunConfig, inputs: Inputs, plan: Plan, device: Device, num_steps: int) -> dict[str, Any]:
    """`environment.json`: what was trained, where, on what."""
    facts = {
        "bundle_id": inputs.bundle_id,
        "lock_digest": inputs.bundle_id,
        "environment_tree": running_tree(),
        "model": f"{inputs.model.source}@{inputs.model.commit}",
        "seed": config.seed,
        "num_steps": num_steps,
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
