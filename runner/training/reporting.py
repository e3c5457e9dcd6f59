"""What a rank measures and shows while it works: sums, speed, memory, heartbeats.

No rank waits for the sums over the ranks: they are started in one step and read in the next. On
GPUs a sum is made on the device (NCCL) and copied to pinned memory; on CPUs a thread of gloo makes
it during the step.

Model FLOPs utilization (MFU) is the FLOPs that the model needs, divided by the FLOPs that the
devices could do (PaLM, arXiv:2204.02311, appendix B). Recomputed activations do not count, nor do
logits that are never computed. MFU is written only for devices in `runner.job.devices`.

The most memory of each phase: of a GPU, torch counts what is allocated and begins anew when it is
asked to. Of the host, Linux keeps the high water mark of a process and begins anew when 5 is
written to /proc/self/clear_refs (proc(5)). Where that is refused (some containers), the mark is the
most since the start.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from runner.config.run_config import RunConfig
from runner.errors import StageError
from runner.job.devices import peak_flops
from runner.job.host_memory import data_limit
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.processes import birth_time
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.training_state import newest_first
from runner.tasks import task_named
from runner.training.components.device import uses_tf32
from runner.training.components.metrics import Observer
from runner.training.components.process_group import Ranks


class HostValue:
    """A vector's copy on the host, which is made when the device gets there.

    Args:
        value: a number or scalar is a vector of one.
    """

    def __init__(self, value: float | torch.Tensor) -> None:
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1)
        self._copy, self._made = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record()

    def read(self) -> list[float]:
        """The values of a vector. Waits until the device got there."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy.tolist()


class Totals:
    """Sums over all ranks, in float64. All ranks make it at the same time.

    Args:
        ranks: this rank among the others.
        device: of this rank.
        computed: scalars on the device.
        known: values that the host knows.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        computed: Sequence[torch.Tensor],
        known: Sequence[float],
    ) -> None:
        on_host = torch.tensor([0.0] * len(computed) + list(known), dtype=torch.float64)
        on_gpu = device.type == "cuda"
        if on_gpu:
            on_host = on_host.pin_memory()
        self._values = on_host.to(device, non_blocking=True)
        for number, scalar in enumerate(computed):
            self._values[number].copy_(scalar)
        self._work = dist.all_reduce(
            self._values, group=None if on_gpu else ranks.group, async_op=True
        )
        self._host: HostValue | None = None

    def on_device(self) -> torch.Tensor:
        """The sums, shape (number of values,). On a GPU only later work of the device waits."""
        if self._host is None:
            self._work.wait()
            self._host = HostValue(self._values)
        return self._values

    def read(self) -> list[float]:
        """The sums, on the host."""
        self.on_device()
        assert self._host is not None
        return self._host.read()


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
        self._left -= self._left > 0
        if not self._left:
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
