"""How fast a step was: samples and tokens per second, time spent waiting for data, and MFU.

Model FLOPs utilization (MFU) is the FLOPs that the model needs, divided by the FLOPs that the
devices could do (PaLM, arXiv:2204.02311, appendix B). Recomputed activations do not count, nor do
logits that are never computed. MFU is written only for devices in `runner.job.gpus`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.config.tasks import data_of
from runner.errors import StageError
from runner.job.gpus import peak_flops
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.processes import birth_time
from runner.run_folder.checkpoints import newest_first
from runner.training.components.speed import uses_tf32


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
            logits_at_predictions: as in `Task`.
        """
        is_tf32 = plan.precision == "fp32" and device.has_bf16 and uses_tf32(os.environ)
        peak = peak_flops(device.name, "tf32" if is_tf32 else plan.precision)
        if peak is None or data_of(config.task) == "images" or not shape.num_parameters:
            return StepClock()
        all_weights = config.lora is None
        flops = flops_per_token(shape, plan.sequence_length, all_weights=all_weights)
        logits = flops_per_prediction(shape, all_weights=all_weights)
        # Labelled data has logits of a few classes, not of the vocabulary.
        apart = logits if logits_at_predictions or data_of(config.task) == "labelled" else 0.0
        predicted = apart if data_of(config.task) != "labelled" else 0.0
        return StepClock(flops - apart, peak * plan.world_size, predicted)

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
    saved = newest_first(checkpoints)
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
