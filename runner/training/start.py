"""One rank: it joins the others, decides `auto` settings, and loads data, model and engine.

`start` returns the `Trainer`; `train` runs it to the end.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from runner.config.run_config import RunConfig
from runner.data.prepare import check_together, open_prepared
from runner.data.recipe import data_key, recipes
from runner.data.store import Stores
from runner.disks import what_is_used_up
from runner.errors import IncompleteError, LostPeerError, StageError
from runner.inputs import Inputs, running_tree, unreadable
from runner.job.plan import TrainingPlan, check_step, decide, num_steps
from runner.job.shapes import Device, shape_of
from runner.launch.environment import MEETING_FILE, RankEnvironment
from runner.processes import threads_variable
from runner.run_folder.checkpoints import TrainingState, newest_first, signature
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import RunFolder, environment_record, exported, write_json
from runner.training.components.batch_norm import RunningStatistics
from runner.training.components.batches import Order, Part
from runner.training.components.device import StopRequest, find_device, gpu_uuid
from runner.training.components.memory import PhaseMemory
from runner.training.components.metrics import Console, Observer, open_console
from runner.training.components.process_group import (
    RankConfigDigest,
    check_agreement,
    is_lost_peer,
    meet,
)
from runner.training.components.throughput import StepClock
from runner.training.engines import make_engine
from runner.training.loop import Trainer
from runner.training.out_of_memory import explain, is_out_of_memory
from runner.training.reporting import Phases
from runner.training.saving.checkpoints import Checkpoints
from runner.training.saving.export import read_companions, read_origin
from runner.training.schedule import Schedule
from runner.training.tasks import task_named


def to_the_end(trainer: Trainer) -> None:
    """Trains from the newest valid checkpoint, if there is one, to the exported model."""
    trainer.resume()
    if trainer.run():
        trainer.export()


def train(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    place: RankEnvironment,
    heartbeat: Heartbeat,
    work: Callable[[Trainer], None] = to_the_end,
) -> None:
    """Builds the model and the engine, and does the work of a rank.

    Args:
        place: this rank's number and the addresses.
        heartbeat: where this rank shows that it is alive.
        work: what to do with them.

    Raises:
        UsageError: the data is not prepared, the checkpoint is of another run, or the plan is not
            possible.
        DamageError: a file of the bundle cannot be read.
        IncompleteError: the disk is full or gives an error, or another rank was lost.
        StageError: a loss or gradient is not finite; the ranks cannot reach each other.
    """
    stop = StopRequest()
    stop.listen()
    log = folder.logs / f"rank-{place.rank}.log"
    trainer: Trainer | None = None
    with open_console(log) as console:
        try:
            trainer = start(config, inputs, folder, place, stop, console, heartbeat)
            try:
                work(trainer)
            finally:
                trainer.observer.close()
        except OSError as error:
            raise disk_error(error, inputs.bundle, folder, trainer.step if trainer else 0) from None
        except SafetensorError as error:
            if (fault := write_error(error)) is None:
                raise unreadable(inputs.model.path, f"its weights: {error}") from None
            step = trainer.step if trainer else 0
            raise disk_error(fault, inputs.bundle, folder, step) from None
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise _no_memory(error, config, inputs, place, trainer) from None
            if not is_lost_peer(error):
                raise
            traceback.print_exc()
            raise LostPeerError(
                f"rank {place.rank} lost another rank; the other logs in {folder.logs} show why.",
                "Run the same command again: it resumes from the last checkpoint.",
            ) from None
        torch.distributed.destroy_process_group()


def start(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    place: RankEnvironment,
    stop: StopRequest,
    console: Console,
    heartbeat: Heartbeat,
) -> Trainer:
    """Joins the other ranks, decides what is `auto`, opens the data and builds the model."""
    device, facts = find_device(place.local_rank, place.local_world_size, config.slurm)
    memory = PhaseMemory(device)
    torch.set_num_threads(int(threads_variable(os.environ, 1)[0]["OMP_NUM_THREADS"]))
    ranks = meet(config.engine.name, device.type, place, os.environ.get(MEETING_FILE), heartbeat)
    shape = shape_of(config, inputs.model)
    plan = decide(config, shape, facts, ranks.world_size)
    digest = RankConfigDigest.of(plan, facts, config, inputs, gpu_uuid(device))
    check_agreement(ranks.gather(digest))
    companions = read_companions(inputs.model) if ranks.is_first else {}
    first = config.model.folder or inputs.model.path
    origin = read_origin(first) if ranks.is_first and config.model.init != "scratch" else ()
    stores, order, key = _open_data(config, inputs, folder, plan.sequence_length)
    few = check_step(config, len(order), plan.total)
    steps = num_steps(config, len(order), plan.total)
    # The precision decides how LoRA stores the weights that it does not train.
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]  # one of its values
    task = task_named(config.task)(decided, inputs.model, stores["train"].facts)
    engine = make_engine(task.module, config, plan, device)
    if ranks.is_first:
        record = _facts(config, inputs, plan, facts, steps, len(order))
        write_json(folder.environment, record | exported(folder))
    settings = config.to_mapping() if config.wandb else None
    observer = Observer(folder, steps, console, is_first=ranks.is_first, wandb=settings)
    if few is not None and ranks.is_first:
        observer.say(f"warning: {few[0]}\n  -> {few[1]}")
    clock = StepClock.of(
        config, shape, plan, facts, logits_at_predictions=task.logits_at_predictions
    )
    state = TrainingState(
        step=0,
        world_size=plan.world_size,
        zero=plan.zero,
        precision=plan.precision,
        signature=signature(config, inputs, key, plan.total),
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
        schedule=Schedule(config, steps, plan.total, len(order)),
        state=state,
        clock=clock,
        phases=Phases(observer, heartbeat, memory, ranks, config.compile),
        companions=companions,
        origin=origin,
    )


def _open_data(
    config: RunConfig, inputs: Inputs, folder: RunFolder, length: int
) -> tuple[dict[str, Stores], Order, str]:
    """The prepared data by role, the order of the training samples, and the key of their recipes.

    Args:
        length: tokens per sequence.
    """
    command = f"runner prepare {config.path} --bundle {inputs.bundle} --output {folder.root}"
    wanted = recipes(config, inputs, length)
    opened = {
        role: [open_prepared(recipe, folder.stores, command) for recipe in several]
        for role, several in wanted.items()
    }
    check_together(opened)
    stores = {role: Stores(several) for role, several in opened.items()}
    weights = [recipe.dataset.weight for recipe in wanted["train"]]
    parts = [Part(len(s), w) for s, w in zip(stores["train"].parts, weights, strict=True)]
    return stores, Order(parts, config.seed), data_key(wanted["train"])


def _no_memory(
    error: BaseException,
    config: RunConfig,
    inputs: Inputs,
    place: RankEnvironment,
    trainer: Trainer | None,
) -> StageError:
    """Explains a lack of memory, while loading (`trainer` is None) or training."""
    shape = shape_of(config, inputs.model)
    _, device = find_device(place.local_rank, place.local_world_size, config.slurm)
    plan = trainer.plan if trainer else decide(config, shape, device, place.world_size)
    where = f"after step {trainer.step}" if trainer else "while loading"
    return explain(error, config, shape, plan, device, f"rank {place.rank}, {where}")


def write_error(error: SafetensorError) -> OSError | None:
    """Returns the system's error if safetensors could not write; None: it could not read.

    Its own words: `Error while serializing: I/O error: No space left on device (os error 28)`.
    """
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None or "while serializing" not in str(error):
        return None
    return OSError(int(number[1]), os.strerror(int(number[1])))


def disk_error(error: OSError, bundle: Path, folder: RunFolder, step: int) -> StageError:
    """Explains an error of a disk: a file of the bundle cannot be read, or a disk cannot be
    written.

    Args:
        error: what was raised.
        bundle: its folder.
        folder: the run folder.
        step: the number of steps done.

    Returns:
        The error to raise.
    """
    name = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
    if name is not None and name.is_relative_to(bundle):
        return unreadable(name, error.strerror or str(error))
    # transformers raises an OSError without a number, which names the folder.
    if error.errno is None and str(bundle) in str(error):
        return unreadable(bundle, str(error).strip().splitlines()[0].rstrip("."))
    whole = next(iter(newest_first(folder.checkpoints)), None)
    safe = f"{whole} was written before and is whole" if whole else "no checkpoint had been written"
    words, remedy = str(error.strerror or error), "Correct that"
    if used_up := what_is_used_up(folder.root, error):
        words, remedy = ": ".join(filter(None, (words, used_up[0]))), used_up[1]
    elif not error.errno:  # torch's disk errors have no number
        remedy = "Look at space, quota and permissions there"
    return IncompleteError(
        f"{name or folder.root}: {words}, after step {step}; {safe}.",
        f"{remedy}, then run the same command again"
        + (f": it resumes from {whole.name}." if whole else "."),
    )


def _facts(
    config: RunConfig,
    inputs: Inputs,
    plan: TrainingPlan,
    device: Device,
    num_steps: int,
    num_sequences: int,
) -> dict[str, Any]:
    """The content of `environment.json`: what is trained, where, and on which devices."""
    facts = {
        "bundle_id": inputs.bundle_id,
        "lock_digest": inputs.bundle_id,
        "environment_tree": running_tree(),
        "model": f"{inputs.model.source}@{inputs.model.commit}",
        "seed": config.seed,
        "num_steps": num_steps,
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
