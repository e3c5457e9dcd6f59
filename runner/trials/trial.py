"""One trial: ranks in their own processes, and how it ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.child import runner_command
from runner.disks import use_local_caches
from runner.errors import UsageError
from runner.job.job import Job
from runner.launch import environment as ranks_environment
from runner.launch.resolved import Resolved
from runner.launch.srun import end_ranks
from runner.launch.start import start_work
from runner.processes import die_with_parent
from runner.run_folder.layout import write_json
from runner.slurm.environment import SlurmJobEnvironment
from runner.trials.search import Outcome, Trial
from runner.trials.strategies import overrides

TRIAL_FLAG = "AIRLIFT_TRIAL"
"""Set to 1 in the launcher of a trial, which is `runner bench` too, and in its ranks."""

RESULT, OUT_OF_MEMORY = "trial.json", "out of memory"

LAST_WORDS = 12  # lines of a failed trial's log in which its error is looked for


@dataclass(frozen=True)
class Bench:
    """What all trials share.

    Attributes:
        run_file: the run file.
        bundle: the folder of the bundle.
        theirs: the user's `--set` texts.
        folder: holds one run folder per trial.
        world_size: the number of ranks.
        processes: ranks on this machine; None in a Slurm job.
        steps: of each trial; the first is not counted.
        memory_gib: per rank; None: what is there.
        limit_s: a trial that takes longer is ended.
    """

    run_file: Path
    bundle: Path
    theirs: tuple[str, ...]
    folder: Path
    world_size: int
    processes: int | None
    steps: int
    memory_gib: float | None
    limit_s: float

    def command(self, strategy: str, micro: int) -> list[str]:
        """The command of a trial's launcher, and of its ranks."""
        sets = overrides(strategy, micro, self.world_size, self.theirs)
        return runner_command(
            "bench", str(self.run_file.absolute()), "--bundle", str(self.bundle.absolute()),
            "--output", str(self.trial_folder(strategy, micro)), "--steps", str(self.steps),
            *(["--memory", str(self.memory_gib)] if self.memory_gib is not None else []),
            *(["--processes", str(self.processes)] if self.processes is not None else []),
            *(word for text in sets for word in ("--set", text)),
        )  # fmt: skip

    def trial_folder(self, strategy: str, micro: int) -> Path:
        """The run folder of one trial."""
        return self.folder / f"{strategy}-micro{micro}"


def run_trial(bench: Bench, strategy: str, micro: int) -> Trial:
    """Makes one trial and waits for its end."""
    folder = bench.trial_folder(strategy, micro)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "trial.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            bench.command(strategy, micro),
            env={**os.environ, TRIAL_FLAG: "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own group: Ctrl-C ends the bench, which ends the trial, and not both at once.
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            code: int | None = process.wait(bench.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return judge(strategy, micro, code, _result(folder), log, bench.limit_s)


def judge(
    strategy: str,
    micro: int,
    code: int | None,
    result: Mapping[str, Any],
    log: Path,
    limit_s: float,
) -> Trial:
    """Makes a `Trial` from how a trial ended.

    Args:
        strategy: its name.
        micro: samples per micro batch.
        code: the exit code of its launcher; None: it was ended after `limit_s` seconds.
        result: its `trial.json`; empty where the ranks failed for another reason than memory.
        log: of its launcher.
        limit_s: the most seconds it could take.
    """
    if result.get("outcome") == "fits" and code == 0:
        measures = {
            key: result[key]
            for key in Trial.__dataclass_fields__
            if key in result and key != "outcome"
        }
        return Trial(strategy, micro, "fits", **measures)
    if result.get("outcome") == OUT_OF_MEMORY:
        return Trial(strategy, micro, "out of memory", OUT_OF_MEMORY)
    if code is None:
        return Trial(strategy, micro, "too slow", f"not done after {limit_s:.0f} s")
    said = _last_words(log)
    outcome: Outcome = "failed"
    return Trial(strategy, micro, outcome, f"{said or f'exit code {code}'} (see {log})")


def launch_trial(
    run: Job,
    processes: int | None,
    steps: int,
    memory_gib: float | None,
    environ: Mapping[str, str],
) -> int:
    """Starts the ranks of one trial and waits.

    Args:
        run: the trial's run.
        processes: ranks on this machine; None in a Slurm job.
        steps: of the trial.
        memory_gib: per rank; None: what is there.
        environ: the environment variables.

    Returns:
        The exit code.
    """
    use_local_caches(os.environ)
    run.folder.make()
    run.write_config()
    role = ranks_environment.role(environ, processes)
    resolved = Resolved.of(run, steps=steps, memory_gib=memory_gib)
    outcome = start_work(resolved, "trial", role, processes or 1, environ)
    if outcome.kind == "no_memory":
        write_json(run.folder.root / RESULT, {"outcome": OUT_OF_MEMORY})
    return outcome.exit_code


def refusal(bench: Bench, strategy: str) -> str | None:
    """Why this version or run file does not support a strategy; None if it does."""
    try:
        Job.load(
            bench.run_file,
            bench.bundle,
            None,
            overrides(strategy, 1, bench.world_size, bench.theirs),
        )
    except UsageError as error:
        return error.message
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher that still runs. Its ranks end with it, on other nodes too.

    Only the launcher is killed. srun is in the same group: it ends the ranks when its launcher is
    gone, and could not do so if it were killed too.
    """
    if process.poll() is None:
        process.kill()
        process.wait()
        if job := SlurmJobEnvironment.from_environ(os.environ):
            end_ranks(job.job_id, process.pid)


def _result(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_words(log: Path) -> str:
    tail = [line.strip() for line in _tail(log).splitlines() if line.strip()][-LAST_WORDS:]
    errors = [line for line in tail if "rror" in line or "SIG" in line or "Out Of Memory" in line]
    return (errors or tail or [""])[-1][:200]


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - 20_000))
        return file.read().decode("utf-8", "replace")
