"""What one rank does, from the first step to the exported model.

The methods of `Trainer` are the steps of a training run, in order. `setup.py` makes the `Trainer`.
What changes and is saved is `TrainingState`; what the last step has left to read is `PendingStep`.

The batches of the next step are made in a thread while this step computes (`Ahead`). What is made
depends on its number only, so order and random numbers are the same as without the thread, and a
resumed run has the same.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from runner.config.run_config import RunConfig
from runner.data.store import IGNORED, Stores
from runner.from_stage import human_count
from runner.inputs import Inputs
from runner.job.plan import TrainingPlan
from runner.run_folder.layout import (
    EXPORTED,
    WEIGHTS_OF,
    RunFolder,
    exported,
    note_export,
    read_metrics,
)
from runner.run_folder.resume import check_not_past_the_end, check_resumable
from runner.run_folder.training_state import TrainingState
from runner.tasks import task_named
from runner.tasks.shared.task import Objective
from runner.training.components.batches import (
    Order,
    SamplePlace,
    by_length,
    evaluation_batches,
)
from runner.training.components.device import StopRequest, dropout_seed, peak_memory, seed, tune
from runner.training.components.optimization import Schedule
from runner.training.components.process_group import HostValue, Ranks, Totals
from runner.training.engines.base import Engine
from runner.training.reporting import Observer, Phases, StepClock, not_finite
from runner.training.saving.checkpoints import Checkpoints
from runner.training.saving.export import export, model_card
from runner.training.weights import RunningStatistics

T = TypeVar("T")


class Load(NamedTuple):
    """What one rank computes in a step.

    Attributes:
        batches: its micro batches, as keyword arguments of the task's module.
        predictions: how many predictions their losses are the sum of.
        tokens: without padding.
    """

    batches: list[dict[str, torch.Tensor]]
    predictions: int
    tokens: int

    @staticmethod
    def of(
        batches: list[dict[str, torch.Tensor]], task: Objective[Any], device: torch.device
    ) -> Load:
        """Counts the predictions and tokens of batches.

        For a GPU they are put into pinned memory, from which it copies while it computes.
        """
        predictions = sum(task.num_predictions(batch) for batch in batches)
        tokens = sum(task.num_tokens(batch) for batch in batches)
        if device.type == "cuda":
            batches = [{name: t.pin_memory() for name, t in batch.items()} for batch in batches]
        return Load(batches, predictions, tokens)

    def on(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """The micro batches on the device. The copy does not wait for what the device computes."""
        return [
            {name: t.to(device, non_blocking=True) for name, t in batch.items()}
            for batch in self.batches
        ]


NO_LOAD = Load([], 0, 0)
"""What is computed behind the last step."""


class Ahead(Generic[T]):
    """Makes items one number ahead, in a thread. For use by one thread.

    Args:
        make: number -> item. It is called in the thread only.
        end: the number after the last one.
        device: a GPU is made the thread's own before the first item: pinned memory belongs to it.
    """

    def __init__(self, make: Callable[[int], T], end: int, device: torch.device) -> None:
        self.end = end
        self._make, self._device = make, device
        self._asked: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        self._coming: dict[int, Future[T]] = {}
        self._waited_s = 0.0
        # A daemon: a rank that gives up must not wait for a read from a dead file system.
        threading.Thread(target=self._work, name="data", daemon=True).start()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (asked := self._asked.get()) is not None:
            number, future = asked
            try:
                item = self._make(number)
            except BaseException as problem:  # noqa: BLE001 - raised by `take`
                future.set_exception(problem)
            else:
                future.set_result(item)

    def take(self, number: int) -> T:
        """The item of a number; the next one is begun.

        Raises:
            BaseException: what making it raised, with its traceback.
        """
        item = self._wait(number).result()
        # Items are taken in order, so only this one is left here. It would keep a step's batches in
        # memory.
        self._coming.clear()
        if number + 1 < self.end:
            self._ask(number + 1)
        return item

    def peek(self, number: int) -> T | None:
        """The item of a number that will be taken next; None behind the end, or if it failed.

        `take` will raise the error.
        """
        if number >= self.end:
            return None
        future = self._wait(number)
        return None if future.exception() else future.result()

    def waited(self) -> float:
        """Seconds that the caller has waited for items since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def close(self) -> None:
        """Ends the thread after the item it is making."""
        self._asked.put(None)

    def _ask(self, number: int) -> Future[T]:
        if number not in self._coming:
            self._coming[number] = Future()
            self._asked.put((number, self._coming[number]))
        return self._coming[number]

    def _wait(self, number: int) -> Future[T]:
        began = time.monotonic()
        future = self._ask(number)
        wait([future])
        self._waited_s += time.monotonic() - began
        return future


def evaluate(
    task: Objective[Any],
    engine: Engine,
    store: Stores,
    ranks: Ranks,
    micro: int,
    should_stop: Callable[[], bool],
    device: torch.device,
    most: int | None = None,
) -> dict[str, float] | None:
    """Evaluates on a split. All ranks call it.

    Args:
        task: the model and its loss.
        engine: runs the model.
        store: the validation split.
        ranks: this rank among the others.
        micro: samples per batch of one rank.
        should_stop: is called before each batch; true on one rank stops all ranks, one batch later.
        device: of this rank.
        most: the first samples of the split that are read; None: all.

    Returns:
        What `Objective.metrics` returns, for example `validation_loss`; None if it was stopped.
    """
    if ranks.any(should_stop()):
        return None
    samples = len(store) if most is None else min(most, len(store))
    parts = evaluation_batches(samples, ranks.rank, ranks.world_size, micro)
    batches = _batches(task, store, parts, device)
    module: Any = task.module
    module.eval()
    try:
        # Of as many sums as the task has: the first addition makes the vector as long.
        sums, count = torch.zeros(1, dtype=torch.float64, device=device), 0
        stopping: Totals | None = None
        with torch.no_grad():
            for number in range(batches.end):
                flag = Totals(ranks, device, (), [should_stop()])
                if stopping is not None and stopping.read()[0]:
                    flag.read()  # no sum stays on its way: the result is known already
                    return None
                stopping = flag
                load = batches.take(number)
                sums = sums + engine.forward(load.on(device)[0]).reshape(-1).double()
                count += load.predictions
        if stopping is not None:
            stopping.read()  # no sum stays on its way: the process may end next
    finally:
        module.train()
        batches.close()
    *totals, predictions = ranks.total(*sums.tolist(), count)
    return task.metrics(totals, predictions)


def _batches(
    task: Objective[Any],
    store: Stores,
    parts: list[list[tuple[SamplePlace, bool]]],
    device: torch.device,
) -> Ahead[Load]:
    """This rank's batches, one item each; `parts` as `evaluation_batches` gives them."""

    def make(number: int) -> Load:
        samples = [sample for sample, _ in parts[number]]
        rows = store.rows([sample.index for sample in samples], task.rows)
        batch = task.collate(rows, samples)
        for row, (_, counts) in enumerate(parts[number]):
            if not counts:
                batch["labels"][row] = IGNORED
        return Load.of([batch], task, device)

    return Ahead(make, len(parts), device)


# A run ends after this many steps in a row that update nothing. In fp16 the loss scale begins at
# 2^16 and each such step halves it, so more steps are allowed.
MOST_SKIPPED, MOST_SKIPPED_SCALED = 10, 40


class Sums(NamedTuple):
    """What the ranks add up together: numbers on the host, or scalars on the device.

    No rank waits for a sum, so that its device always has work. The sums are started when the last
    backward of a step has been queued, and are read one step later, when they are long there. So
    one vector has the loss of the step that ends and the counts of the step that comes, which
    divides each of its losses by the predictions of all ranks.

    Attributes:
        loss: of the step that ends.
        stops: how many ranks have got a stop signal.
        saves: how many ranks find that it is time to save.
        predictions: of the next step.
        tokens: of the next step, without padding.
    """

    loss: Any
    stops: Any
    saves: Any
    predictions: Any
    tokens: Any


class PendingStep(NamedTuple):
    """A step whose sums have not been read.

    Attributes:
        values: its line in metrics.jsonl, without loss and norm.
        totals: its `Sums`, which `Trainer.add_up` has started.
        norm: of its gradient.
        summed: this rank's loss.
    """

    values: dict[str, Any]
    totals: Totals
    norm: HostValue
    summed: torch.Tensor


@dataclass
class Trainer:
    """Everything one rank works with.

    Attributes:
        companions: file name -> content of the files that are exported unchanged. Rank 0 only.
        origin: how an earlier run made the first weights, by `read_origin`. Rank 0 only.
    """

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    plan: TrainingPlan
    task: Objective[Any]
    engine: Engine
    ranks: Ranks
    stores: dict[str, Stores]
    order: Order
    checkpoints: Checkpoints
    observer: Observer
    statistics: RunningStatistics
    stop: StopRequest
    device: torch.device
    schedule: Schedule
    state: TrainingState
    clock: StepClock
    phases: Phases
    companions: Mapping[str, bytes]
    origin: tuple[str, ...] = ()
    should_stop: bool = False
    is_best: bool = False
    is_time_to_save: bool = False
    skipped: int = 0
    was_finished: bool = False
    totals: Totals | None = None
    pending: PendingStep | None = None
    ahead: Ahead[Load] = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.load, self.schedule.num_steps, self.device)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def resume(self) -> None:
        """Resumes from the newest whole checkpoint, if there is one, and opens the metrics log."""
        found = self.checkpoints.newest_whole()
        if found is not None:
            path, saved = found
            check_resumable(saved, self.state, path)
            check_not_past_the_end(saved.step, self.schedule.num_steps, path)
            self.engine.load(path)
            self.state.resume(saved)
            # The step is the same on all ranks: all of them gather, or none does. Rank 0 wrote the
            # model, and another node may not see it yet.
            if self.is_at_end() and self.ranks.gather(self.is_exported())[0]:
                # A model is exported after the last evaluation. The checkpoint may be older than
                # this evaluation, and still say that it is due.
                self.was_finished, self.state.evaluation_due = True, False
        if self.ranks.is_first and not self.was_finished:
            # After a kill from here on, model/ does not belong to this run.
            note_export(self.folder, None)
        self.observer.begin(self.step)
        if found is not None:
            self.observer.say(f"resumed from {found[0].name}")
        self.phases.measured = self.step
        if not self.was_finished:
            self.end_phase("load")
        for choice in self.plan.choices:
            self.observer.say(f"  {choice.key}: {choice.value}  ({choice.reason})")
        tuned = tune(self.device, images=not task_named(self.config.task).has_tokens)
        for note in (self.task.note, *self.engine.notes, *tuned):
            self.observer.say(f"  {note}")
        self.observer.say(self.schedule.describe(human_count(self.ranks.world_size, "rank")))

    def run(self) -> bool:
        """Trains to the end, or until all ranks agree to stop.

        Returns:
            Whether the end was reached.
        """
        if self.state.evaluation_due:
            self.evaluate()
        while not self.is_at_end() and not self.should_stop:
            self.train_step()
            self.phases.first_steps.count()
            self.state.evaluation_due = self.schedule.evaluates_after(self.step)
            ends_epoch = self.schedule.ends_epoch(self.step)
            is_due = self.checkpoints.is_due(self.step, ends_epoch=ends_epoch)
            if self.should_stop or self.is_time_to_save or self.state.evaluation_due or is_due:
                self.read_pending_sums()
            if self.state.evaluation_due and not self.should_stop:
                self.evaluate()
            at_end = self.is_at_end()
            if self.should_stop or self.is_best or self.is_time_to_save or at_end or is_due:
                self.save()
        self.ahead.close()
        if self.step > self.phases.measured:
            self.end_phase("train")
        finished = self.is_at_end() and not self.state.evaluation_due
        if not finished:
            self.request_continuation()
        return finished

    def train_step(self) -> None:
        """One optimizer step: all micro batches forward and backward, then one update.

        Nothing here waits for the device or for other ranks (see `Sums`).
        """
        self.clock.begin()
        # Dropout depends on step and rank only, so a resumed run draws the same numbers.
        seed(dropout_seed(self.config.seed, self.step, self.ranks.rank), self.device)
        before = self.totals
        if before is None:  # no step of this process has counted for this one
            before = self.add_up(torch.zeros((), device=self.device), self.step)
        batches = self.ahead.take(self.step).on(self.device)
        predictions = Sums(*before.on_device()).predictions.float()
        summed = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            self.phases.beat("train")
            last = number == len(batches)
            loss = self.engine.forward(batch, last=last) / predictions
            self.engine.backward(loss, last=last)
            summed += loss.detach()
        self.totals = self.add_up(summed, self.step + 1)
        lr = self.schedule.rate(self.step)
        norm = self.engine.step(lr)
        # After the step's last forward, which changes them, and before what reads them: an
        # evaluation, a checkpoint, the exported model.
        self.statistics.agree()
        self.phases.known.add("train")
        self.state.step += 1
        self.read_pending_sums()
        counts = Sums(*before.read())
        values = {
            "step": self.step,
            "epoch": self.schedule.epoch(self.step),
            "loss": math.nan,
            "lr": lr,
            "grad_norm": math.nan,
            **self.clock.measures(
                self.plan.total, int(counts.tokens), self.ahead.waited(), counts.predictions
            ),
            "memory_gib": peak_memory(self.device),
        }
        self.pending = PendingStep(values, self.totals, HostValue(norm), summed)

    def add_up(self, summed: torch.Tensor, next_step: int) -> Totals:
        """Starts the sums over the ranks after a step's last backward.

        Args:
            summed: this rank's loss of the step.
            next_step: the step that will begin with these sums.
        """
        load = self.ahead.peek(next_step) or NO_LOAD
        sums = Sums(
            loss=summed,
            stops=self.stop.received is not None,
            saves=self.checkpoints.is_time(),
            predictions=load.predictions,
            tokens=load.tokens,
        )
        # Readers take the vector for a `Sums`: it has the fields in their order. Only the first
        # one is on the device.
        return Totals(self.ranks, self.device, [sums.loss], sums[1:])

    def read_pending_sums(self) -> None:
        """Reads and logs what the ranks have added up for the last step, if that is not done.

        It comes before all that needs to know that the step was sound: a checkpoint, an evaluation.

        Raises:
            StageError: on every rank: the loss is not finite, or too many gradients were not.
        """
        if self.pending is None:
            return
        step, self.pending = self.pending, None
        sums = Sums(*step.totals.read())
        (norm,) = step.norm.read()
        self.should_stop = self.should_stop or sums.stops > 0
        self.is_time_to_save = self.is_time_to_save or sums.saves > 0
        self.observer.step({**step.values, "loss": sums.loss, "grad_norm": norm})
        if not math.isfinite(sums.loss):
            self.check_finite("loss", sums.loss, step.summed.item(), step=step.values["step"])
        self.check_skipped(norm, step.values["step"])

    def check_skipped(self, norm: float, step: int) -> None:
        """Prints which step had a gradient that is not finite; ends a run that has too many in a
        row.

        Args:
            norm: the gradient norm of the step.
            step: its number, from 1.

        Raises:
            StageError: on every rank.
        """
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        scaled = self.plan.precision == "fp16"  # fp16 finds its loss scale this way
        if self.skipped and not scaled:
            self.observer.say(
                f"step {step}: the gradient is not finite ({norm}); this step updates nothing"
            )
        if self.skipped >= (MOST_SKIPPED_SCALED if scaled else MOST_SKIPPED):
            self.check_finite(f"gradient of {self.skipped} steps in a row", norm, step=step)

    def check_finite(self, what: str, value: float, *own: float, step: int) -> None:
        """Ends the run if a value that is the same on all ranks is nan or inf.

        Args:
            what: the name of the value, for the message.
            own: this rank's part of the value, if it has one.
            step: whose value it is, from 1.

        Raises:
            StageError: on every rank.
        """
        if not math.isfinite(value):
            by_rank = [each for part in self.ranks.gather(own) for each in part]
            raise not_finite(step, what, value, by_rank, self.folder.checkpoints)

    def load(self, step: int) -> Load:
        """This rank's part of a step. Called in another thread.

        Args:
            step: counted from 0.
        """
        store, rank = self.stores["train"], self.ranks
        parts = self.order.step(step, self.plan.total, rank.rank, rank.world_size, self.plan.micro)
        if store.facts.documents == "alone":
            parts = by_length(parts, lambda sample: store.lengths([sample.index])[0])
        batches = [
            self.task.collate(store.rows([s.index for s in part], self.task.rows), part)
            for part in parts
        ]
        return Load.of(batches, self.task, self.device)

    def ends_early(self) -> bool:
        """Whether `evaluation.patience` is used up."""
        patience = self.config.evaluation.patience
        return patience is not None and self.state.without_gain >= patience

    def is_at_end(self) -> bool:
        """Whether no step is left to make."""
        return self.step >= self.schedule.num_steps or self.ends_early()

    def note_loss(self, loss: float) -> None:
        """Counts the evaluations without a lower loss; prints when there are too many."""
        state = self.state
        state.note_loss(loss)
        if self.ends_early() and self.step < self.schedule.num_steps:
            self.observer.say(
                f"the run ends early: no lower validation loss in "
                f"{human_count(state.without_gain, 'evaluation')} since step {state.lowest_step} "
                f"({state.lowest:.4f})  (evaluation.patience)"
            )

    def end_phase(self, phase: str) -> None:
        """Logs the most memory of any rank in a phase. All ranks call it."""
        self.phases.end(phase, self.step, self.schedule.epoch(self.step))

    def evaluate(self) -> None:
        """Evaluates on the validation split.

        A stop signal ends the evaluation early. Then a resumed run evaluates first.
        """
        store = self.stores.get("validation")
        self.state.evaluation_due = store is not None
        if store is None:
            return
        if self.step > self.phases.measured:
            self.end_phase("train")

        def should_stop() -> bool:
            self.phases.beat("evaluate")
            return self.stop.received is not None

        found = evaluate(
            self.task, self.engine, store, self.ranks, self.plan.micro, should_stop, self.device
        )
        self.phases.known.add("evaluate")
        self.should_stop = self.should_stop or found is None
        if found is not None:
            self.state.evaluation_due = False
            self.end_phase("evaluate")
            self.phases.heartbeat.beat("save")
            self.observer.validation(
                {"step": self.step, "epoch": self.schedule.epoch(self.step), **found}
            )
            self.check_finite("validation loss", found["validation_loss"], step=self.step)
            self.note_loss(found["validation_loss"])
            self.is_best = self.checkpoints.mark_best(self.step, found["validation_loss"])

    def save(self) -> None:
        """Writes a checkpoint."""
        began = time.monotonic()
        self.phases.heartbeat.beat("save")
        self.observer.flush()  # a run that resumes from it needs the lines of its steps
        self.checkpoints.save(self.engine, self.state)
        self.is_best = self.is_time_to_save = False
        self.observer.say(f"checkpoint step-{self.step} ({time.monotonic() - began:.1f} s)")

    def request_continuation(self) -> None:
        """Leaves a file that says there is more to do. All ranks have saved before."""
        if self.ranks.is_first:
            self.folder.stopped.write_text(f"{self.stop.received or 'a signal on another rank'}\n")
        self.observer.say(f"stopped by a signal after step {self.step}; saved")
        self.ranks.barrier()

    def export(self) -> None:
        """Writes the final model. Rank 0 holds all weights in memory meanwhile.

        A run that was finished before keeps its model.
        """
        if self.was_finished:
            self.observer.say(
                f"finished already: step {self.step} of {self.schedule.num_steps}; "
                f"the model is in {self.folder.model}"
            )
            return
        self.phases.heartbeat.beat("export")
        self.observer.flush()
        if self.ranks.is_first:  # a kill in the last save may have left some
            self.checkpoints.drop_old(self.step)
        chosen = self.checkpoints.load_best(self.engine, self.step)
        lora = self.config.lora
        # Frozen weights are left out where an adapter is exported alone. A quantised base is merged
        # from the model itself (`merged` unpacks it), which each rank has whole.
        state = self.engine.export(
            frozen=lora is None or (lora.merge and self.config.quantization is None)
        )
        if self.ranks.is_first:
            # The engine has the task's module, whose `model` is exported. What else the module has
            # is for the loss alone.
            weights = {
                name.removeprefix("model."): t
                for name, t in state.items()
                if name.startswith("model.")
            }
            record = json.loads(self.folder.environment.read_text(encoding="utf-8"))
            record |= {EXPORTED: self.step, WEIGHTS_OF: chosen}
            lines = read_metrics(self.folder.metrics)
            card = model_card(self.config, self.inputs, self.plan, record, lines, self.origin)
            export(self.task.model, weights, lora, self.companions, card, self.folder.model)
            early = self.step < self.schedule.num_steps
            note_export(self.folder, self.step, early=early, weights=chosen)
        self.ranks.barrier()
        how = self.folder.model / "README.md"
        alone = f": an adapter; {how} says how to load it" if lora and not lora.merge else ""
        self.observer.say(f"model exported to {self.folder.model}{alone}")

    def is_exported(self) -> bool:
        """Whether `model/` exists and is of this step. The model of an extended run is older until
        it is exported.
        """
        return self.folder.model.is_dir() and exported(self.folder).get(EXPORTED) == self.step
