"""What is at the top of the page: the state of each run, its duration and its GPU-hours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runner.run_folder.history import History
from runner.run_folder.status import format_duration

HEADINGS = ("Run", "Status", "Steps", "Time in steps", "GPU-hours", "Last loss", "Best validation")


def overview(
    runs: Sequence[History], names: Sequence[str], running: Sequence[bool]
) -> list[list[str]]:
    """One row per run, with the cells of `HEADINGS`."""
    rows = []
    for run, name, now in zip(runs, names, running, strict=True):
        seconds = seconds_in_steps(run)
        losses = run.steps.numbers("loss")
        validations = run.validations.numbers("validation_loss")
        rows.append([
            name,
            "running" if now else _status_at_rest(run),
            f"{run.done} of {run.num_steps}" if run.num_steps else str(run.done),
            "" if seconds is None else format_duration(seconds),
            device_hours(run, seconds),
            f"{losses[-1]:.4g}" if losses else "",
            f"{min(validations):.4g}" if validations else "",
        ])  # fmt: skip
    return rows


def _status_at_rest(run: History) -> str:
    """One word or two on where a run stands that does not run."""
    if not run.done:
        return "no step yet"
    if run.num_steps is None:
        return "unknown"
    if run.done < run.num_steps:
        return "stopped"
    return "finished" if run.is_exported else "stopped before its export"


def seconds_in_steps(run: History) -> float | None:
    """The time of all steps, without starts, evaluations and checkpoints; None if unknown."""
    total, before = None, 0
    for step, seconds in run.steps.points("step_s"):
        if seconds is not None and seconds >= 0:
            total = (total or 0.0) + seconds * max(step - before, 1)
        before = step
    return total if total is not None and total < 1e10 else None


def device_hours(run: History, seconds: float | None) -> str:
    """The GPU-hours of all steps; `none (CPU)` on CPUs, empty where they are unknown."""
    ranks, device = run.facts.get("world_size"), run.facts.get("device")
    if seconds is None or not isinstance(device, str) or type(ranks) is not int:
        return ""
    if not 0 < ranks < 10**7:
        return ""
    return "none (CPU)" if device == "CPU" else f"{seconds * ranks / 3600:,.3g}"
