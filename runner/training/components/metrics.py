"""What rank 0 prints and logs while it trains: metrics.jsonl, TensorBoard, wandb, a line or a
progress bar.

Messages of Airlift and output of libraries are kept apart. While a rank works, file descriptors 1
and 2 lead to its log, so that lines of DeepSpeed, warnings of Python and output of C++ are there.
`Console` holds the streams from before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, Literal, TextIO

from runner.errors import format_age
from runner.processes import outliving
from runner.run_folder.layout import MetricsLog, RunFolder


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


LINE_EVERY_S = 10.0


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
