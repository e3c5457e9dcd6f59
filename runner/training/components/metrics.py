"""What rank 0 prints and logs while it trains: metrics.jsonl, TensorBoard, a line or a progress
bar.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, TextIO

from runner.errors import format_age
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
    with os.fdopen(kept[0], "w", buffering=1) as out, os.fdopen(kept[1], "w", buffering=1) as err:
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield Console(out, err)
        finally:
            _flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


LINE_EVERY_S = 10.0


class _Logs:
    """Writes metrics.jsonl and TensorBoard's events, in a thread.

    Args:
        folder: of the run.
        resumed_step: the run resumes after it.
    """

    def __init__(self, folder: RunFolder, resumed_step: int) -> None:
        self._folder, self._resumed_step = folder, resumed_step
        self._metrics = MetricsLog(folder.metrics)
        self._metrics.cut_back(resumed_step)
        self._lines: Queue[Mapping[str, Any]] = Queue()
        self._problem: BaseException | None = None
        # A daemon: a rank that gives up must not wait for a dead file system.
        threading.Thread(target=self._work, name="logs", daemon=True).start()

    def _work(self) -> None:
        board: Any = None
        while True:
            values = self._lines.get()
            try:
                if self._problem is None and values:
                    self._metrics.write(values)
                    board = board or self._open_board()
                    _add(board, values)
                elif board is not None:
                    board.flush()
            except BaseException as problem:  # noqa: BLE001 - raised in the thread that trains
                self._problem = problem
            finally:
                self._lines.task_done()

    def _open_board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        # Without `purge_step`, steps that a resumed run repeats would be there twice.
        return SummaryWriter(str(self._folder.tensorboard), purge_step=self._resumed_step + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Begins to write a line.

        Raises:
            OSError: an earlier line could not be written.
        """
        self._check()
        self._lines.put(values)

    def finish(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: it could not be.
        """
        self._lines.put({})
        self._lines.join()
        self._check()

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem


def _add(board: Any, values: Mapping[str, Any]) -> None:
    """Adds a line to TensorBoard, as one event."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    scalars = [
        Summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
        if name not in ("step", "epoch")
    ]
    board.file_writer.add_summary(Summary(value=scalars), values["step"])


class Observer:
    """Prints and logs the progress of a run. On ranks other than 0 it does nothing.

    `say` works at once; `step` works after `begin`.
    """

    def __init__(
        self, folder: RunFolder, num_steps: int, console: Console, *, is_first: bool
    ) -> None:
        self._active = is_first
        self._folder, self._num_steps, self._console = folder, num_steps, console
        self._last_line = 0.0
        self._first: tuple[int, float] | None = None
        self._bar: Any = None
        self._logs: _Logs | None = None

    def begin(self, resumed_step: int) -> None:
        """Opens the logs and drops what they have after `resumed_step`, where the run resumes."""
        if not self._active:
            return
        self._logs = _Logs(self._folder, resumed_step)
        if self._console.err.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._num_steps,
                initial=resumed_step,
                unit="step",
                desc="train",
                file=self._console.err,
            )

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
        self._write(values)
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
        if self._active:
            self._write(values)
            measures = "  ".join(
                f"{name.removeprefix('validation_')} {value:.4f}"
                for name, value in values.items()
                if name.startswith("validation_")
            )
            self.say(f"step {values['step']}/{self._num_steps}  validation {measures}")

    def _write(self, values: Mapping[str, Any]) -> None:
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
        self.flush()
        if self._bar is not None:
            self._bar.close()
