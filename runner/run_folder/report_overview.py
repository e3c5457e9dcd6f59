"""What is at the top of the page: the state of each run, its duration and its GPU-hours. Pure."""

from __future__ import annotations

from runner.run_folder.history import History, numbers, points
from runner.run_folder.report_names import short_names

HEADINGS = ("Run", "Status", "Steps", "Time in steps", "GPU-hours", "Last loss", "Best validation")


def overview(runs: list[History], running: list[bool]) -> list[list[str]]:
    """One row per run, with the cells of `HEADINGS`."""
    return [
        [
            name,
            status(run, running=now),
            _steps(run),
            duration(seconds_in_steps(run)),
            device_hours(run),
            _last_loss(run),
            _best_validation(run),
        ]
        for run, name, now in zip(runs, short_names(runs), running, strict=True)
    ]


def status(run: History, *, running: bool) -> str:
    """One word or two on where a run stands."""
    if running:
        return "running"
    if not run.steps:
        return "no step yet"
    if run.num_steps is not None and run.steps[-1]["step"] >= run.num_steps:
        return "finished" if run.has_exported_its_last_step else "stopped before its export"
    return "stopped" if run.num_steps is not None else "unknown"


def seconds_in_steps(run: History) -> float | None:
    """The time of all steps, without starts, evaluations and checkpoints; None if unknown."""
    total, before, known = 0.0, 0, False
    for step, seconds in points(run.steps, "step_s"):
        if seconds is not None and seconds >= 0:
            total += seconds * max(step - before, 1)
            known = True
        before = step
    return total if known and total < 1e10 else None


def duration(seconds: float | None) -> str:
    """`3 h 05 min`, `12 min 30 s`, `8.2 s`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def device_hours(run: History) -> str:
    """The GPU-hours of all steps; `none (CPU)` on CPUs, empty where they are unknown."""
    seconds, ranks = seconds_in_steps(run), run.facts.get("world_size")
    device = run.facts.get("device")
    if seconds is None or not isinstance(device, str):
        return ""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks < 10**7:
        return ""
    return "none (CPU)" if device == "CPU" else f"{seconds * ranks / 3600:,.3g}"


def _steps(run: History) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    return f"{done} of {run.num_steps}" if run.num_steps else str(done)


def _last_loss(run: History) -> str:
    found = numbers(run.steps, "loss")
    return f"{found[-1]:.4g}" if found else ""


def _best_validation(run: History) -> str:
    found = numbers(run.validations, "validation_loss")
    return f"{min(found):.4g}" if found else ""
