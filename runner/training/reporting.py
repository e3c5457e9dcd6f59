"""What a rank measures and shows while it works: speed, memory, heartbeats; lines, logs, a bar.

Messages of Airlift and output of libraries are kept apart. While a rank works, file descriptors 1
and 2 lead to its log, so that lines of DeepSpeed, warnings of Python and output of C++ are there.
`Console` holds the streams from before.

Model FLOPs utilization (MFU) is the FLOPs that the model needs, divided by the FLOPs that the
devices could do (PaLM, arXiv:2204.02311, appendix B). Recomputed activations do not count, nor do
logits that are never computed. MFU is written only for devices in `runner.job.devices`.

The most memory of each phase: of a GPU, torch counts what is allocated and begins anew when it is
asked to. Of the host, Linux keeps the high water mark of a process and begins anew when 5 is
written to /proc/self/clear_refs (proc(5)). Where that is refused (some containers), the mark is the
most since the start.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, Literal, TextIO

import torch

from runner.config.run_config import RunConfig
from runner.from_stage import StageError, format_age
from runner.job.devices import peak_flops
from runner.job.host_memory import data_limit
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.processes import birth_time, outliving
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import MetricsLog, RunFolder
from runner.run_folder.training_state import by_step_newest_first
from runner.tasks import task_named
from runner.training.components.device import uses_tf32
from runner.training.components.process_group import Ranks


@dataclass(frozen=True)
class Console:
    """The streams that this process was started with."""

    out: TextIO
    err: TextIO

    def say(self, text: str) -> None:
        """Prints a line for the user, and logs it."""
        print(text, file=self.out, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Appends a line to the log of this rank, which is its stdout while it works."""
        with contextlib.suppress(OSError):  # the run must not end because of its log
            print(text, flush=True)


@contextlib.contextmanager
def open_console(log: Path) -> Iterator[Console]:
    """Appends all output to `log`; yields the streams from before."""
    _flush()
    kept = os.dup(1), os.dup(2)
    with (
        outliving(kept[0], lambda: _note_closed("stdout")) as out,
        outliving(kept[1], lambda: _note_closed("stderr")) as err,
    ):
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield Console(out, err)
        finally:
            _flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def _note_closed(name: str) -> None:
    with contextlib.suppress(OSError):  # the run must not end because of its log
        print(f"nobody reads {name} any more: from now on nothing is printed there", flush=True)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


LINE_EVERY_S = 10.0  # the log of a day has 8,640 such lines


class _Board:
    """TensorBoard's events.

    Args:
        resumed_step: the run resumes after it. Steps that it repeats would be there twice.
    """

    def __init__(self, folder: RunFolder, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._writer: Any = SummaryWriter(str(folder.tensorboard), purge_step=resumed_step + 1)

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds a line, as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if name not in ("step", "epoch")
        ]
        self._writer.file_writer.add_summary(Summary(value=scalars), values["step"])

    def flush(self) -> None:
        """Writes all that was added."""
        self._writer.flush()

    close = flush


class _Wandb:
    """The same scalars as a run of Weights & Biases, kept in the run folder: nothing is sent.

    A fault of wandb is said once and ends no training; metrics.jsonl has everything.

    Args:
        settings: of the run file; `name` is the run's.
        say: prints a line.
    """

    def __init__(
        self, folder: RunFolder, settings: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._run: Any = None
        self._try(lambda: self._begin(folder, settings))

    def _begin(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        import wandb

        name = settings["name"]
        self._run = wandb.init(
            mode="offline",
            dir=str(folder.root),
            name=name,
            group=name,
            config=dict(settings),
            # Its console capture and signal handlers are for the main thread of a script.
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        kept = Path(self._run.dir).parent
        self._say(f"wandb: offline, in {kept}; where there is a network: wandb sync {kept}")

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as problem:  # noqa: BLE001 - whatever a foreign library raises
            self._run = None
            self._say(f"wandb: nothing more is logged with it ({problem}); metrics.jsonl has all")

    def add(self, values: Mapping[str, Any]) -> None:
        """Logs a line."""
        if (run := self._run) is not None:
            scalars = {name: value for name, value in values.items() if name != "step"}
            self._try(lambda: run.log(scalars, step=values["step"]))

    def flush(self) -> None:
        """Nothing: wandb's own process writes."""

    def close(self) -> None:
        """Ends wandb's process."""
        if (run := self._run) is not None:
            self._run = None
            self._try(run.finish)


class _Logs:
    """Writes metrics.jsonl, TensorBoard's events and wandb's, in a thread.

    Args:
        metrics: the file.
        open_boards: opens the other logs, at the first line.
    """

    def __init__(self, metrics: Path, open_boards: Callable[[], list[_Board | _Wandb]]) -> None:
        self._open_boards = open_boards
        self._metrics = MetricsLog(metrics)
        self._lines: Queue[Mapping[str, Any] | Literal["flush", "close"]] = Queue()
        self._problem: BaseException | None = None
        # A daemon: a rank that gives up must not wait for a dead file system.
        threading.Thread(target=self._work, name="logs", daemon=True).start()

    def _work(self) -> None:
        boards: list[_Board | _Wandb] = []
        while True:
            values = self._lines.get()
            try:
                if isinstance(values, str):
                    for board in boards:
                        getattr(board, values)()
                elif self._problem is None:
                    self._metrics.write(values)
                    boards = boards or self._open_boards()
                    for board in boards:
                        board.add(values)
            except BaseException as problem:  # noqa: BLE001 - raised in the thread that trains
                self._problem = problem
            finally:
                self._lines.task_done()

    def write(self, values: Mapping[str, Any]) -> None:
        """Begins to write a line.

        Raises:
            OSError: an earlier line could not be written.
        """
        self._check()
        self._lines.put(values)

    def finish(self, how: Literal["flush", "close"] = "flush") -> None:
        """Waits until everything is written.

        Raises:
            OSError: it could not be.
        """
        self._lines.put(how)
        self._lines.join()
        self._check()

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem


class Observer:
    """Prints and logs the progress of a run. On ranks other than 0 it does nothing.

    `say` works at once; `step` works after `begin`.

    Args:
        wandb: the settings of the run, if it is logged with wandb too.
    """

    def __init__(
        self,
        folder: RunFolder,
        num_steps: int,
        console: Console,
        *,
        is_first: bool,
        wandb: Mapping[str, Any] | None = None,
    ) -> None:
        self._active = is_first
        self._folder, self._num_steps, self._console = folder, num_steps, console
        self._last_line = 0.0
        self._first: tuple[int, float] | None = None
        self._bar: Any = None
        self._wandb = wandb
        self._logs: _Logs | None = None

    def begin(self, resumed_step: int) -> None:
        """Opens the logs and drops what they have after `resumed_step`, where the run resumes."""
        if not self._active:
            return
        metrics = self._folder.metrics
        if lost := MetricsLog(metrics).cut_back(resumed_step):
            self.say(f"warning: {lost}")
        self._logs = _Logs(metrics, lambda: self._open_boards(resumed_step))
        if self._console.err.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._num_steps,
                initial=resumed_step,
                unit="step",
                desc="train",
                file=self._console.err,
            )

    def _open_boards(self, resumed_step: int) -> list[_Board | _Wandb]:
        board = _Board(self._folder, resumed_step)
        if self._wandb is None:
            return [board]
        return [board, _Wandb(self._folder, self._wandb, self.say)]

    def say(self, text: str) -> None:
        """Prints a line for the user."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._console.err)
            self._console.log(text)
        else:
            self._console.say(text)

    def step(self, values: Mapping[str, Any]) -> None:
        """Logs one optimizer step."""
        if not self._active:
            return
        self.write(values)
        if self._bar is not None:
            self._bar.set_postfix(
                loss=f"{values['loss']:.4f}",
                tokens_s=f"{values['tokens_per_s']:.0f}",
                refresh=False,  # `update` does, ten times a second at most
            )
            self._bar.update(1)
        now, step = time.monotonic(), values["step"]
        self._first = self._first or (step, now)
        if now - self._last_line > LINE_EVERY_S or step in (1, self._num_steps):
            self._last_line = now
            # A bar shows the step already.
            tell = self.say if self._bar is None else self._console.log
            tell(
                f"step {step}/{self._num_steps}  epoch {values['epoch']:.2f}  "
                f"loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
                f"grad {values['grad_norm']:.2f}  {values['tokens_per_s']:.0f} tokens/s"
                f"{self._remaining(step, now)}"
            )

    def _remaining(self, step: int, now: float) -> str:
        """The time left, at the pace since this process's slow first step."""
        first, began = self._first or (step, now)
        if not first < step < self._num_steps:
            return ""
        return f"  {format_age((now - began) / (step - first) * (self._num_steps - step))} to go"

    def validation(self, values: Mapping[str, Any]) -> None:
        """Logs one evaluation."""
        self.write(values)
        measures = "  ".join(
            f"{name.removeprefix('validation_')} {value:.4f}"
            for name, value in values.items()
            if name.startswith("validation_")
        )
        # A run that is evaluated may have made more steps than its run file now asks for.
        end = f"/{self._num_steps}" if values["step"] <= self._num_steps else ""
        self.say(f"step {values['step']}{end}  validation {measures}")

    def write(self, values: Mapping[str, Any]) -> None:
        """Logs a line."""
        if self._active:
            assert self._logs is not None, "`begin` comes first"
            self._logs.write(values)

    def flush(self) -> None:
        """Waits until everything is written: a checkpoint needs the lines of its steps.

        Raises:
            OSError: it could not be.
        """
        if self._logs is not None:
            self._logs.finish()

    def close(self) -> None:
        """Writes everything to disk."""
        if self._logs is not None:
            self._logs.finish("close")
        if self._bar is not None:
            self._bar.close()


def flops_per_token(shape: ModelShape, sequence_length: int, *, all_weights: bool = True) -> float:
    """FLOPs of forward and backward for one token, with its logits.

    6 per parameter, and for attention 12 x layers x hidden x length.

    Args:
        shape: the model.
        sequence_length: in tokens.
        all_weights: False where most are frozen (LoRA): they need no gradients, so 4 per parameter.
    """
    attention = 12 * shape.layers * shape.hidden * sequence_length
    return (6 if all_weights else 4) * shape.num_parameters + attention


def flops_per_prediction(shape: ModelShape, *, all_weights: bool = True) -> float:
    """The part of these FLOPs that computes the logits of one token.

    It is done for predicted tokens alone where the task computes no other logits: 15 % of the
    tokens of masked-lm.
    """
    return (6 if all_weights else 4) * shape.vocabulary * shape.hidden


@dataclass
class StepClock:
    """Measures the steps of one rank.

    Attributes:
        token_flops: FLOPs per token; None where unknown (images, devices without a published peak).
        prediction_flops: more FLOPs per predicted token; 0: they are in `token_flops`.
        peak: FLOP/s of all devices of the run together.
    """

    token_flops: float | None = None
    peak: float = 1.0
    prediction_flops: float = 0.0
    _began: float = field(default=0.0, init=False)
    _is_first: bool = field(default=True, init=False)

    @staticmethod
    def of(
        config: RunConfig,
        shape: ModelShape,
        plan: TrainingPlan,
        device: Device,
        *,
        logits_at_predictions: bool = False,
    ) -> StepClock:
        """A clock for a run on devices of this kind.

        Args:
            logits_at_predictions: as in `Objective`.
        """
        is_tf32 = plan.precision == "fp32" and device.has_bf16 and uses_tf32(os.environ)
        peak = peak_flops(device.name, "tf32" if is_tf32 else plan.precision)
        task = task_named(config.task)
        if peak is None or not task.has_tokens or not shape.num_parameters:
            return StepClock()
        all_weights = config.lora is None
        flops = flops_per_token(shape, plan.sequence_length, all_weights=all_weights)
        logits = flops_per_prediction(shape, all_weights=all_weights)
        if task.has_classes:  # logits of a few classes, not of the vocabulary
            return StepClock(flops - logits, peak * plan.world_size)
        apart = logits if logits_at_predictions else 0.0
        return StepClock(flops - apart, peak * plan.world_size, apart)

    def begin(self) -> None:
        """Starts a step."""
        self._began = time.monotonic()

    def measures(
        self, samples: int, tokens: float, waited_s: float, predictions: float = 0.0
    ) -> dict[str, float]:
        """The speed of the step that ends now, over all ranks, for metrics.jsonl.

        Args:
            samples: sequences or images of the step.
            tokens: tokens of the step, without padding.
            waited_s: seconds of the step in which this rank waited for its data.
            predictions: tokens of the step that are predicted.
        """
        elapsed = time.monotonic() - self._began
        measured = {
            "tokens": tokens,
            "tokens_per_s": tokens / elapsed,
            "samples_per_s": samples / elapsed,
            "step_s": elapsed,
            "data_wait": waited_s / elapsed,
        }
        if self.token_flops is not None:
            flops = self.token_flops * tokens + self.prediction_flops * predictions
            measured["mfu"] = flops / elapsed / self.peak
        if self._is_first:
            self._is_first = False
            measured["first_step_s"] = since_process_start()
        return measured


def not_finite(
    step: int, what: str, value: float, by_rank: Sequence[float], checkpoints: Path
) -> StageError:
    """The error for a loss or gradient that is nan or inf: every later step would only spread it.

    Args:
        step: the number of steps done.
        what: `loss`, ...
        value: over all ranks.
        by_rank: the value of each rank; empty for a value that only exists for all together.
        checkpoints: the folder of the run's checkpoints.

    Returns:
        The error to raise: it names the step and the ranks.
    """
    ranks = [str(rank) for rank, own in enumerate(by_rank) if not math.isfinite(own)]
    together = " summed over the ranks" if by_rank else ""
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else together
    saved = by_step_newest_first(checkpoints)
    kept = f"the newest checkpoint before it is {saved[0]}" if saved else "there is no checkpoint"
    then = (
        "it resumes from that checkpoint. If it ends the same way at once, the checkpoint has bad "
        f"weights: remove it (rm -r), and {'the one before it' if len(saved) > 1 else 'step 0'} "
        "is where it begins."
        if saved
        else "it begins at step 0."
    )
    return StageError(
        f"step {step}: the {what} is {value}{where}. Nothing was saved after it; {kept}.",
        "Lower optimizer.lr, set precision: bf16 or fp32 instead of fp16, or look at that step's "
        f"data. Then run the command again with that change: {then}",
        exit_code=1,
    )


def since_process_start() -> float:
    """Seconds since this process was started, its imports included; or its CPU time."""
    ticks = birth_time(os.getpid())
    if ticks is None:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


_PROC = Path("/proc/self")


def most_memory(device: torch.device) -> dict[str, float]:
    """The high water marks of this process since the last call, or since its start.

    Returns:
        `host` and, on a GPU, `device` -> the most in GiB.
    """
    lines = (_PROC / "status").read_text().splitlines()
    marks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    found = {"host": sum(marks) / 2**20}
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
    return found


STEPS = 2
"""Two, because Adam makes its moments at the end of the first."""


class FirstSteps:
    """The first steps of a start, which try whether an automatic `batch.micro` fits.

    Shows in the heartbeat that the steps are a trial, and on a CPU limits this rank's memory.

    With the limit, too much is an error that says so: the kernel kills no rank. It is lifted after
    these steps, because rank 0 may hold more than its share later, while it exports.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat, self._left = heartbeat, 0
        self._limits: tuple[int, int] | None = None

    def begin(self, device: torch.device) -> None:
        """Begins the trial, after everything is loaded."""
        self._left = STEPS
        self._heartbeat.tries = True
        if device.type == "cpu":
            self._limits = resource.getrlimit(resource.RLIMIT_DATA)
            most = data_limit(int(os.environ["LOCAL_WORLD_SIZE"]), os.environ)
            resource.setrlimit(resource.RLIMIT_DATA, (most, self._limits[1]))

    @property
    def are_tried(self) -> bool:
        """Whether the trial is not over."""
        return self._left > 0

    def count(self) -> None:
        """Counts a step."""
        self._left = max(0, self._left - 1)
        if self._left == 0:
            self._heartbeat.tries = False
            self.lift()

    def lift(self) -> None:
        """Lifts the limit: an error must be reported, too."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            self._limits = None


@dataclass
class Phases:
    """The phases of a rank, one after another: load, train, evaluate.

    Attributes:
        compiles: whether the first use of a phase compiles, and may take as long as a start.
        first_steps: whether they are a trial of `batch.micro`.
        known: phases that were used before.
        measured: the step at which the last phase ended.
    """

    observer: Observer
    heartbeat: Heartbeat
    device: torch.device
    ranks: Ranks
    compiles: bool
    first_steps: FirstSteps
    known: set[str] = field(default_factory=set)
    measured: int = 0

    def beat(self, phase: str) -> None:
        """Writes a heartbeat."""
        is_slow = self.compiles and phase not in self.known
        self.heartbeat.beat("start" if is_slow else phase)

    def end(self, phase: str, step: int, epoch: float) -> None:
        """Logs the most memory of any rank in the phase that ends here. All ranks call it.

        Checkpoints count to the phase that follows them, so mostly to `train`.
        """
        mine = most_memory(self.device)
        each = self.ranks.gather(mine)
        most = {f"{phase}_{where}_gib": max(one[where] for one in each) for where in mine}
        self.observer.write({"step": step, "epoch": epoch, **most})
        self.measured = step
