"""What one rank does, from the first step to the exported model.

Reads as prose; the rest of the wing is its vocabulary. `start` makes the `Trainer`.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass

import torch

from runner.card import model_card
from runner.config import RunConfig
from runner.data.store import Stores
from runner.errors import human_count
from runner.inputs import Inputs
from runner.launch import SENTINEL
from runner.plan import Plan
from runner.records import EXPORTED, RunFolder, exported, note_export, read_metrics
from runner.resume import TrainingState, check_not_past_the_end, check_resumable, signature
from runner.training.batches import Order, by_length
from runner.training.checkpoint import Checkpoints
from runner.training.device import peak_memory
from runner.training.engines import Engine
from runner.training.evaluation import evaluate
from runner.training.export import export
from runner.training.observer import Observer
from runner.training.ranks import Ranks
from runner.training.running_statistics import RunningStatistics
from runner.training.schedule import rate, warmup_steps
from runner.training.signals import StopRequest
from runner.training.tasks import Task
from runner.training.throughput import StepClock, refuse_number
from runner.vitals import Vitals

# Steps in a row that update nothing; in fp16 the loss scale begins at 2^16 and is halved at each.
MOST_SKIPPED, MOST_SKIPPED_SCALED = 10, 40


@dataclass
class Trainer:
    """Everything one rank works with."""

    config: RunConfig
    inputs: Inputs
    folder: RunFolder
    plan: Plan
    task: Task
    engine: Engine
    ranks: Ranks
    stores: dict[str, Stores]
    data: str
    order: Order
    checkpoints: Checkpoints
    observer: Observer
    statistics: RunningStatistics
    stop: StopRequest
    vitals: Vitals
    device: torch.device
    num_steps: int
    clock: StepClock
    step: int = 0
    should_stop: bool = False
    evaluation_due: bool = False
    is_best: bool = False
    skipped: int = 0
    was_finished: bool = False
    warm: frozenset[str] = frozenset()

    def resume(self) -> None:
        """Goes on from the newest valid checkpoint, if there is one; then begins to tell."""
        found = self.checkpoints.newest_valid()
        if found is not None:
            path, state = found
            check_resumable(state, self.state(), path)
            check_not_past_the_end(state.step, self.num_steps, path)
            self.engine.load(path)
            self.step, self.evaluation_due = state.step, state.evaluation_due
            if self.step == self.num_steps and self.ranks.gather(self.is_exported())[0]:
                self.was_finished, self.evaluation_due = True, False
        if self.ranks.is_first and not self.was_finished:
            note_export(self.folder, None)  # a kill from here on leaves a model/ that is not this run's
        self.observer.begin(self.step)
        if found is not None:
            self.observer.say(f"resumed from {found[0].name}")
        for choice in self.plan.choices:
            self.observer.say(f"  {choice.key}: {choice.value}  ({choice.reason})")
        for note in (self.task.note, *self.engine.notes):
            self.observer.say(f"  {note}")
        ranks = human_count(self.ranks.world_size, "rank")
        self.observer.say(f"training {self.num_steps} steps of {self.plan.total} sequences on {ranks}")

    def run(self) -> bool:
        """Trains to the end, or until all ranks agree to stop. Returns whether the end was reached."""
        if self.evaluation_due:
            self.evaluate()
        while self.step < self.num_steps and not self.should_stop:
            self.train_step()
            self.evaluation_due = self.is_evaluation_time()
            if self.evaluation_due and not self.should_stop:
                self.evaluate()
            if self.should_stop or self.is_best or self.checkpoints.is_due(self.step) or self.step == self.num_steps:
                self.save()
        self.vitals.beat("save")
        self.checkpoints.finish()
        finished = self.step >= self.num_steps and not self.evaluation_due
        if not finished:
            self.leave()
        return finished

    def train_step(self) -> None:
        """One optimizer step: all micro batches forward and backward, then one update."""
        self.clock.begin()
        # Dropout belongs to step and rank, not to how long the process lives: a resumed run draws the same.
        torch.manual_seed(hash((self.config.seed, self.step, self.ranks.rank)) % 2**63)
        batches = self.micro_batches()
        self.clock.data_ready()
        predictions, tokens = self.ranks.total(
            sum(self.task.num_predictions(batch) for batch in batches),
            sum(self.task.num_tokens(batch) for batch in batches),
        )
        summed = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            self.beat("train")
            last = number == len(batches)
            loss = self.engine.forward(batch, last=last) / predictions
            self.engine.backward(loss, last=last)
            summed += loss.detach()
        lr = self.rate()
        norm = self.engine.step(lr)
        self.statistics.agree()
        self.warm |= {"train"}
        self.step += 1
        loss_of_step, stops, unsaved = self.ranks.total(
            summed.item(), float(self.stop.received is not None), float(self.checkpoints.have_failed())
        )
        self.should_stop = stops > 0
        self.observer.step({
            "step": self.step, "epoch": self.epoch(), "loss": loss_of_step, "lr": lr, "grad_norm": norm,
            **self.clock.measures(self.plan.total, int(tokens)), "memory_gib": peak_memory(self.device),
        })  # fmt: skip
        if unsaved:
            self.checkpoints.finish()
        self.require_number("loss", loss_of_step, summed.item())
        self.tell_skipped(norm)

    def beat(self, phase: str) -> None:
        """Says that this rank gets on with it. What is compiled the first time takes as long as a start may."""
        self.vitals.beat("start" if self.config.compile and phase not in self.warm else phase)

    def tell_skipped(self, norm: float) -> None:
        """Says which step had a gradient that is no number; ends a run that has nothing else any more.

        Raises:
            StageError: on every rank.
        """
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        scaled = self.plan.precision == "fp16"  # there it is how the loss scale is found
        if self.skipped and not scaled:
            self.observer.say(f"step {self.step}: its gradient is no number ({norm}), so it has updated nothing")
        if self.skipped >= (MOST_SKIPPED_SCALED if scaled else MOST_SKIPPED):
            self.require_number(f"gradient of {self.skipped} steps in a row", norm)

    def require_number(self, what: str, value: float, *own: float) -> None:
        """Ends the run if a value that is the same on all ranks is none.

        Args:
            own: this rank's part of it, if it has one.

        Raises:
            StageError: on every rank.
        """
        if not math.isfinite(value):
            self.checkpoints.finish()
            by_rank = [each for part in self.ranks.gather(own) for each in part]
            refuse_number(self.step, what, value, by_rank, self.folder.checkpoints)

    def micro_batches(self) -> list[dict[str, torch.Tensor]]:
        """This rank's part of the step."""
        store, rank = self.stores["train"], self.ranks
        parts = self.order.step(self.step, self.plan.total, rank.rank, rank.world_size, self.plan.micro)
        if store.facts.documents == "alone":
            parts = by_length(parts, lambda sample: store.lengths([sample.index])[0])
        return [self.task.collate(store.rows([s.index for s in part]), part) for part in parts]

    def rate(self) -> float:
        """This step's learning rate."""
        schedule = self.config.schedule
        warmup = warmup_steps(schedule.warmup, self.num_steps)
        decay = warmup_steps(schedule.decay, self.num_steps)
        return rate(schedule.name, self.config.optimizer.lr, warmup, self.num_steps, self.step, decay)

    def epoch(self) -> float:
        """Epochs done."""
        return self.step * self.plan.total / len(self.order)

    def is_evaluation_time(self) -> bool:
        """After every so many steps, or where the last one crossed into another epoch; and at the end."""
        every = self.config.evaluation.every
        if self.step == self.num_steps:
            return True
        if every != "epoch":
            return self.step % every == 0
        before, now = ((step * self.plan.total) // len(self.order) for step in (self.step - 1, self.step))
        return now > before

    def evaluate(self) -> None:
        """Reads the validation split. A stop signal ends it early; then it is still due when the run goes on."""
        store = self.stores.get("validation")
        self.evaluation_due = store is not None
        if store is None:
            return

        def should_stop() -> bool:
            self.beat("evaluate")
            return self.stop.received is not None

        found = evaluate(self.task, self.engine, store, self.ranks, self.plan.micro, should_stop)
        self.warm |= {"evaluate"}
        self.should_stop = self.should_stop or found is None
        if found is not None:
            self.evaluation_due = False
            self.vitals.beat("save")
            self.observer.validation({"step": self.step, "epoch": self.epoch(), **found})
            self.require_number("validation loss", found["validation_loss"])
            self.is_best = self.checkpoints.mark_best(self.step, found["validation_loss"])

    def save(self) -> None:
        """Writes a checkpoint."""
        began = time.monotonic()
        self.vitals.beat("save")
        self.checkpoints.save(self.engine, self.state())
        self.is_best = False
        done = " is being written" if self.config.checkpoint.asynchronous else ""
        self.observer.say(f"checkpoint step-{self.step}{done} ({time.monotonic() - began:.1f} s)")

    def leave(self) -> None:
        """All ranks have saved: rank 0 leaves the word that there is more to do."""
        if self.ranks.is_first:
            (self.folder.root / SENTINEL).write_text(f"{self.stop.received or 'a signal on another rank'}\n")
        self.observer.say(f"stopped by a signal after step {self.step}; saved")
        self.ranks.barrier()

    def export(self) -> None:
        """Writes the final model; rank 0 holds it whole for a moment. A run that was finished keeps its own."""
        if self.was_finished:
            self.observer.say(f"finished already: {self.step} of {self.num_steps} steps; {self.folder.model} is there")
            return
        self.vitals.beat("export")
        lora = self.config.lora
        state = self.engine.export(frozen=lora is None or (lora.merge and self.config.quantization is None))
        if self.ranks.is_first:
            weights = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
            record = json.loads(self.folder.environment.read_text(encoding="utf-8"))
            card = model_card(self.config, self.inputs, self.plan, record, read_metrics(self.folder.metrics))
            export(self.task.model, weights, lora, self.inputs.model, card, self.folder.model)
            note_export(self.folder, self.step)
        self.ranks.barrier()
        self.observer.say(f"model exported to {self.folder.model}")

    def is_exported(self) -> bool:
        """Whether `model/` is there, and of this step: that of an extended run is older until the export."""
        return self.folder.model.is_dir() and exported(self.folder).get(EXPORTED) == self.step

    def state(self) -> TrainingState:
        """What the next run must know."""
        plan = self.plan
        constant = signature(self.config, self.inputs, self.data, plan.total)
        engine, due = self.config.engine.name, self.evaluation_due
        return TrainingState(self.step, plan.world_size, plan.zero, plan.precision, constant, due, engine)
