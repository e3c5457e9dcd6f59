"""How fast a step was: samples and tokens a second, the share of the time spent waiting for data, and MFU.

Model FLOPs utilization is what the model's arithmetic needs over what the devices could do (PaLM, arXiv:2204.02311,
appendix B): recomputed activations do not count. It is told only for devices whose peak is published and known here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from runner.config import RunConfig
from runner.errors import StageError
from runner.plan import Plan
from runner.shapes import Device, ModelShape

# Dense peaks in FLOP/s, from NVIDIA's data sheets; (in 16 bit on tensor cores, in fp32 without TF32). Looked up by the
# first name that is in the device's own, so the longer come first.
PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H800 PCIe": (756e12, 51e12),
    "H800": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "GH200": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A30": (165e12, 10.3e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "V100-PCIE": (112e12, 14e12),
    "V100S": (130e12, 16.4e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "TITAN RTX": (130e12, 16.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}
_WORDS = frozenset({"H20", "A10", "A30", "A40", "L4", "T4", "L40"})
"""Names that are the beginning of other devices' names: they must stand alone."""


def peak_flops(device: Device, precision: str) -> float | None:
    """FLOP/s of one device in `precision` (bf16, fp16, fp32); None where it is not known."""
    words = device.name.replace("-", " ").split()
    for name, (low, full) in PEAKS.items():
        if (name in words) if name in _WORDS else (name in device.name):
            return full if precision == "fp32" else low
    return None


def flops_per_token(shape: ModelShape, sequence_length: int, *, all_weights: bool = True) -> float:
    """FLOPs of forward and backward for one token: 6 a parameter, and attention's 12 x layers x hidden x length.

    Args:
        all_weights: False where most are frozen (LoRA): no gradients are computed for them, 4 a parameter remain.
    """
    attention = 12 * shape.layers * shape.hidden * sequence_length
    return (6 if all_weights else 4) * shape.num_parameters + attention


@dataclass
class StepClock:
    """Measures the steps of one rank.

    Attributes:
        flops_a_token: None where nobody knows (images, devices without a published peak).
        peak: FLOP/s of all devices of the run together.
    """

    flops_a_token: float | None = None
    peak: float = 1.0
    _began: float = field(default=0.0, init=False)
    _data_s: float = field(default=0.0, init=False)
    _is_first: bool = field(default=True, init=False)

    @staticmethod
    def of(config: RunConfig, shape: ModelShape, plan: Plan, device: Device) -> StepClock:
        """For a run on devices of this kind."""
        peak = peak_flops(device, plan.precision)
        if peak is None or config.task == "image-classification" or not shape.num_parameters:
            return StepClock()
        flops = flops_per_token(shape, plan.sequence_length, all_weights=config.lora is None)
        return StepClock(flops, peak * plan.world_size)

    def begin(self) -> None:
        """A step begins: first its data is made ready."""
        self._began = time.monotonic()

    def data_ready(self) -> None:
        """The data is there; now it is computed."""
        self._data_s = time.monotonic() - self._began

    def measures(self, samples: int, tokens: float) -> dict[str, float]:
        """What metrics.jsonl says of a step that ends now, over all ranks.

        Args:
            samples: sequences or images of the step.
            tokens: real ones, without padding.
        """
        elapsed = time.monotonic() - self._began
        said = {
            "tokens": tokens,
            "tokens_per_s": tokens / elapsed,
            "samples_per_s": samples / elapsed,
            "step_s": elapsed,
            "data_wait": self._data_s / elapsed,
        }
        if self.flops_a_token is not None:
            said["mfu"] = self.flops_a_token * tokens / elapsed / self.peak
        if self._is_first:
            self._is_first = False
            said["first_step_s"] = since_process_start()
        return said


def refuse_number(step: int, what: str, value: float, by_rank: Sequence[float], checkpoints: Path) -> NoReturn:
    """Ends a run whose loss or gradient is no number any more: every later step would only spread it.

    Args:
        what: `loss`, ...
        by_rank: of each rank; empty for what is of all together.

    Raises:
        StageError: always; says the step and the ranks.
    """
    ranks = [str(rank) for rank, own in enumerate(by_rank) if not math.isfinite(own)]
    together = " summed over the ranks" if by_rank else ""
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else together
    raise StageError(
        f"step {step}: the {what} is {value}{where}. Nothing was saved after it; the checkpoints before it in "
        f"{checkpoints} are whole.",
        "Lower optimizer.lr, set precision: bf16 or fp32 instead of fp16, or look at that step's data; then run "
        "the command again with that change: it goes on from the last checkpoint. If it ends so again at once, that "
        "one was made on the way down: remove it (rm -r), and the one before it is taken.",
        exit_code=1,
    )


def since_process_start() -> float:
    """Seconds since this process was started, its imports included (proc(5), stat, field 22; CPU time elsewhere)."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        started = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError):
        return time.process_time()
