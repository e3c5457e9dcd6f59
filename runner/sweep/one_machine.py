"""The members of a sweep on this machine, or in this Slurm job: one `runner train` after another.

All are checked before the first begins. A member that fails does not end the others; a signal ends
the sweep, and the same command continues it, because finished members are left as they are.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.errors import StageError, UsageError, human_count
from runner.launch.rank import find_role
from runner.launch.train import Run, check_all_installed, report_devices, world_size
from runner.plan import devices
from runner.plan.shapes import Device
from runner.preflight.findings import Findings
from runner.ranks.environment import runner_command
from runner.ranks.processes import die_with_parent
from runner.report import write
from runner.report.overview import HEADINGS, overview
from runner.run_folder.history import History, number
from runner.slurm.job_array import Member

STOPPED = 5
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SHOWN = ("Run", "Status", "Steps", "Time in steps", "Last loss", "Best validation")


def sweep(
    alone: Run,
    members: Sequence[Member],
    processes: int | None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> int:
    """Trains every member, then compares them.

    Args:
        alone: the run file without the values of the sweep; its folder is the parent of theirs.
        processes: ranks on this machine; None: one, or those of the Slurm job.
        say: prints a line.
        dry_run: check all and start nothing.

    Returns:
        0; the exit code of the first member that failed; 5 after a signal.

    Raises:
        StageError: a member cannot work; raised before any begins.
    """
    role = find_role(environ, processes)
    if role == "rank":
        raise UsageError(
            "runner train --array starts its ranks itself.", "Call it once, without srun."
        )
    check_all_installed(alone, role)
    ranks, own_torch = report_devices(alone, role, processes or 1, environ, say)
    device = devices.here(ranks, environ, own_torch=own_torch)
    runs = _checked(alone, members, world_size(role, processes or 1, environ), device, say)
    if dry_run:
        say(f"dry run: {human_count(len(runs), 'run')} checked, nothing was started")
        return 0
    failed: dict[str, int] = {}
    for done, (name, run) in enumerate(runs.items(), start=1):
        say(f"== {name}  ({done} of {len(runs)})")
        code = _train(run, processes)
        if code == STOPPED:
            say(f"stopped in {name}; run the same command again to continue")
            return STOPPED
        if code:
            failed[name] = code
    _compare([run.folder.root for run in runs.values()], alone.folder.root, say)
    for name, code in failed.items():
        say(f"failed: {name} (exit code {code}): runner logs {runs[name].folder.root}")
    return next(iter(failed.values()), 0)


def _checked(
    alone: Run,
    members: Sequence[Member],
    num_ranks: int | None,
    device: Device | None,
    say: Callable[[str], None],
) -> dict[str, Run]:
    """Every member by its name, found able to work. What several have is said once."""
    found: dict[str, Run] = {}
    errors: dict[str, tuple[StageError, list[str]]] = {}
    for member in members:
        folder = alone.folder.root / member.name
        overrides = (*alone.overrides, *member.overrides)
        run = Run.load(alone.config.path, alone.bundle, folder, overrides)
        findings = run.examine(num_ranks, device)
        for error in findings.errors:
            errors.setdefault(str(error), (error, []))[1].append(member.name)
        for finding in findings.others:
            say(f"{member.name}: {finding}")
        found[member.name] = run
    joined = Findings()
    for error, names in errors.values():
        message = f"{', '.join(names)}: {error.message}"
        joined.errors.append(StageError(message, error.remedy, error.exit_code))
    joined.raise_errors()
    say(f"{human_count(len(found), 'run')} in {alone.folder.root}: nothing found that would fail")
    return found


def _train(run: Run, processes: int | None) -> int:
    """Runs `runner train` on a member, with our streams; signals are passed on."""
    command = runner_command(
        "train",
        str(run.config.path),
        *("--bundle", str(run.bundle.absolute())),
        *("--output", str(run.folder.root)),
        *(("--processes", str(processes)) if processes else ()),
        *(word for text in run.overrides for word in ("--set", text)),
    )
    sys.stdout.flush()
    process = subprocess.Popen(command, preexec_fn=die_with_parent())
    # Ctrl-C reaches the member by itself: it is in the same foreground group.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    for received in FORWARDED:
        before[received] = signal.signal(received, lambda n, _: process.send_signal(n))
    try:
        return process.wait()
    finally:
        for received, handler in before.items():
            signal.signal(received, handler)


def _compare(folders: Sequence[Path], parent: Path, say: Callable[[str], None]) -> None:
    """Prints one line per member and writes their page."""
    trained = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    if not trained:
        return
    runs = [History.read(folder) for folder in trained]
    columns = [HEADINGS.index(heading) for heading in SHOWN]
    rows = [SHOWN, *(tuple(row[c] for c in columns) for row in overview(runs, [False] * len(runs)))]
    widths = [max(len(row[c]) for row in rows) for c in range(len(SHOWN))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    losses = {
        run.folder.root.name: min(found)
        for run in runs
        if (
            found := [
                value
                for line in run.validations
                if (value := number(line, "validation_loss")) is not None
            ]
        )
    }
    if len(losses) > 1:
        best = min(losses, key=lambda name: losses[name])
        say(f"the lowest validation loss: {best} ({losses[best]:.4f})")
    say(f"compared in {write(trained, parent / 'report.html')}")
