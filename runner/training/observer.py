"""What rank 0 tells while it trains: metrics.jsonl, TensorBoard, and a line or a bar on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from runner.errors import age_in_words
from runner.records import MetricsLog, RunFolder
from runner.training.console import Console

LINE_EVERY_S = 10.0


class Observer:
    """Tells of a run. On other ranks than 0 it tells nothing.

    `say` works at once; steps can be told after `begin`.
    """

    def __init__(self, folder: RunFolder, num_steps: int, console: Console, *, is_first: bool) -> None:
        self._active = is_first
        self._folder, self._num_steps, self._console = folder, num_steps, console
        self._metrics = MetricsLog(folder.metrics)
        self._last_line = 0.0
        self._first: tuple[int, float] | None = None
        self._bar: Any = None
        self._board: Any = None

    def begin(self, resumed_step: int) -> None:
        """Opens what steps are written to; what was logged after `resumed_step` is cut off, the run goes on there."""
        if not self._active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._metrics.cut_back(resumed_step)
        # What a resumed run tells again must not stand there twice.
        self._board = SummaryWriter(str(self._folder.tensorboard), purge_step=resumed_step + 1)
        if self._console.err.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._num_steps, initial=resumed_step, unit="step", desc="train", file=self._console.err
            )

    def say(self, text: str) -> None:
        """A line for people."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._console.err)
        else:
            self._console.say(text)

    def step(self, values: Mapping[str, Any]) -> None:
        """One optimizer step."""
        if not self._active:
            return
        self._write(values)
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix(loss=f"{values['loss']:.4f}", tokens_s=f"{values['tokens_per_s']:.0f}")
        now, step = time.monotonic(), values["step"]
        self._first = self._first or (step, now)
        if self._bar is None and (now - self._last_line > LINE_EVERY_S or step in (1, self._num_steps)):
            self._last_line = now
            self.say(
                f"step {step}/{self._num_steps}  epoch {values['epoch']:.2f}  loss {values['loss']:.4f}  "
                f"lr {values['lr']:.2e}  grad {values['grad_norm']:.2f}  {values['tokens_per_s']:.0f} tokens/s"
                f"{self._to_go(step, now)}"
            )

    def _to_go(self, step: int, now: float) -> str:
        """How long the rest takes at the pace since this process's first step, which is slow and not counted."""
        first, began = self._first or (step, now)
        if not first < step < self._num_steps:
            return ""
        return f"  {age_in_words((now - began) / (step - first) * (self._num_steps - step))} to go"

    def validation(self, values: Mapping[str, Any]) -> None:
        """One evaluation."""
        if self._active:
            self._write(values)
            told = "  ".join(
                f"{name.removeprefix('validation_')} {value:.4f}"
                for name, value in values.items()
                if name.startswith("validation_")
            )
            self.say(f"step {values['step']}/{self._num_steps}  validation {told}")

    def _write(self, values: Mapping[str, Any]) -> None:
        self._metrics.write(values)
        for name, value in values.items():
            if name not in ("step", "epoch"):
                self._board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Puts everything on disk."""
        if self._board is not None:
            self._board.close()
        if self._bar is not None:
            self._bar.close()
