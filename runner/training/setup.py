"""One rank: it joins the others, learns the plan, and loads data, model and engine.

`start` returns the `Trainer`; `run_work` does the work of the rank with it.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from runner.data.prepare import check_together, open_prepared
from runner.data.store import Stores
from runner.disks import what_is_used_up
from runner.errors import (
    IncompleteError,
    LostPeerError,
    NoMemoryError,
    StageError,
    UsageError,
    as_shown,
    human_size,
)
from runner.inputs import on_site, running_tree, unreadable
from runner.job.checks.any_run import verified
from runner.job.findings import raise_errors
from runner.job.looks import count_parameters
from runner.job.plan import can_be_smaller, check_step, num_steps, with_micro
from runner.job.shapes import Device
from runner.job.training_run import TrainingRun
from runner.launch.rank_process import Rank
from runner.launch.ranks import RankInfo
from runner.launch.resolved import Resolved, tried_with, write_resolved
from runner.processes import threads_variable
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import RunFolder, environment_record, exported, write_json
from runner.run_folder.run_lock import hold_run_folder
from runner.run_folder.training_state import TrainingState, newest_first, signature
from runner.tasks import task_named
from runner.training.components.batches import Order, WeightedDataset
from runner.training.components.device import StopRequest, find_device, gpu_uuid
from runner.training.components.metrics import Console, Observer, open_console
from runner.training.components.optimization import Schedule
from runner.training.components.process_group import (
    RankFacts,
    Ranks,
    check_facts,
    is_lost_peer,
    meet,
    open_store,
    weakest,
)
from runner.training.engines import make_engine
from runner.training.loop import Trainer
from runner.training.out_of_memory import explain, is_out_of_memory
from runner.training.reporting import FirstSteps, PhaseMemory, Phases, StepClock
from runner.training.saving.checkpoints import Checkpoints
from runner.training.saving.export import read_companions, read_origin
from runner.training.weights import RunningStatistics


def to_the_end(trainer: Trainer) -> None:
    """Trains from the newest valid checkpoint, if there is one, to the exported model."""
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
    bundle = job.inputs.bundle
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
            seen = RankFacts.of(info, facts, gpu_uuid(device), bundle)
            whole = decide_once(ranks, resolved, seen)
            trainer = make_trainer(whole, ranks, device, facts, stop, console, rank.heartbeat)
            try:
                work(trainer, **whole.options)
            finally:
                trainer.observer.close()
        except OSError as error:
            raise disk_error(error, bundle, folder, trainer.step if trainer else 0) from None
        except SafetensorError as error:
            if (fault := write_error(error)) is None:
                raise unreadable(job.inputs.model.path, f"its weights: {error}") from None
            raise disk_error(fault, bundle, folder, trainer.step if trainer else 0) from None
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                if whole is None or facts is None:
                    raise _no_memory_to_begin(error, facts, info) from None
                raise _no_memory(error, whole, trainer, facts, info) from None
            if not is_lost_peer(error):
                raise
            traceback.print_exc()
            raise LostPeerError(
                f"rank {info.rank} lost another rank; the other logs in {folder.logs} show why.",
                "Run the same command again: it resumes from the last checkpoint.",
            ) from None
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


def _no_memory_to_begin(error: BaseException, device: Device | None, info: RankInfo) -> StageError:
    """Explains a lack of memory before anything of the run is loaded; less of it would not help."""
    on = f" on {device.name} ({human_size(device.memory)})" if device else ""
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return IncompleteError(
        f"rank {info.rank}: out of memory{on}, and nothing of this run is loaded yet: other "
        f"processes have it, or a limit is too low. Its last words: {as_shown(said)}",
        "nvidia-smi   (there: which processes; take another GPU or node, or end them. On a CPU: "
        "ulimit -a). Then run it again.",
    )


def _no_memory(
    error: BaseException, whole: Resolved, trainer: Trainer | None, device: Device, info: RankInfo
) -> NoMemoryError:
    """Explains a lack of memory. Only our launcher starts the ranks again with a smaller micro
    batch: those of another one end with 2, because the run file has to say it.
    """
    when = f"after step {trainer.step}" if trainer else "while loading"
    config, plan = whole.run.config, whole.decided()
    if trainer is not None:
        trainer.phases.first_steps.lift()
    fault = explain(error, config, plan, device, f"rank {info.rank}, {when}")
    if trainer is not None and trainer.phases.first_steps.are_tried and not info.is_ours:
        fault.exit_code = UsageError.exit_code
    return fault


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

    def decide_rest() -> dict[str, Any]:
        check_facts(found)
        config, device = resolved.run.config, weakest(found)
        run = resolved.run.on(device, ranks.world_size)
        if resolved.shape.num_parameters:
            run = run.given(TrainingRun.shape, resolved.shape)
        else:  # no weights: the launcher could not count
            first = config.model.folder or run.inputs.model.path
            run = run.given(TrainingRun.counted, count_parameters(config, first))
        plan = run.plan
        sequences = len(open_data(resolved)[1])
        few = check_step(config, sequences, plan.total)
        notes = [f"warning: {few[0]}\n  -> {few[1]}"] if few else []
        if len({one.device.name for one in found}) > 1:
            notes.append(f"the ranks have {device.name}: all of them do what each of them can")
        decided: dict[str, Any] = {
            "shape": run.shape,
            "plan": plan,
            "device": device,
            "steps": num_steps(config, sequences, plan.total),
            "notes": tuple(notes),
        }
        whole, bound = replace(resolved, **decided), resolved.bound
        if bound is not None and bound.tried_with == tried_with(whole):
            decided["plan"] = with_micro(config, plan, bound)
        write_resolved(replace(resolved, **decided))
        return decided

    return replace(resolved, **ranks.from_first(decide_rest))


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
    memory = PhaseMemory(device)
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
        record = _facts(resolved, facts, len(order))
        write_json(folder.environment, record | exported(folder))
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
        phases=Phases(observer, heartbeat, memory, ranks, config.compile, FirstSteps(heartbeat)),
        companions=companions,
        origin=origin,
    )


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
