"""One trial: ranks in their own processes, and how it ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner import kept
from runner.errors import StageError, UsageError
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved
from runner.run_folder.logs import last_lines
from runner.trials.apart import OUT_OF_MEMORY, RESULT, start_apart
from runner.trials.search import Outcome, Trial, overrides

READ, LAST_WORDS = 100, 12  # lines of a failed trial's log in which its error is looked for


@dataclass(frozen=True)
class Bench:
    """What all trials share.

    Attributes:
        run_file: the run file.
        bundle: the folder of the bundle.
        theirs: the user's `--set` texts.
        folder: holds one run folder per trial.
        start: which ranks a trial has.
        steps: of each trial; the first is not counted.
        memory_gib: per rank; None: what is there.
        limit_s: a trial that takes longer is ended.
    """

    run_file: Path
    bundle: Path
    theirs: tuple[str, ...]
    folder: Path
    start: Start
    steps: int
    memory_gib: float | None
    limit_s: float

    def trial_folder(self, strategy: str, micro: int) -> Path:
        """The run folder of one trial."""
        return self.folder / f"{strategy}-micro{micro}"


def run_trial(bench: Bench, strategy: str, micro: int) -> Trial:
    """Makes one trial and waits for its end."""
    folder = bench.trial_folder(strategy, micro)
    shutil.rmtree(folder, ignore_errors=True)
    sets = overrides(strategy, micro, bench.start.world_size, bench.theirs)
    log = folder / "trial.log"
    try:
        run = TrainingRun.load(bench.run_file, bench.bundle, folder, sets)
        # An epoch of few data is shorter, and the step after the last has no sample.
        run = replace(run, config=replace(run.config, steps=bench.steps, epochs=None))
        run.folder.make()
        run.write_config()
        resolved = Resolved.of(run, steps=bench.steps, memory_gib=bench.memory_gib)
        code = start_apart(resolved, "trial", bench.start, log, os.environ, limit_s=bench.limit_s)
    except StageError as error:
        return Trial(strategy, micro, "failed", error.message)
    return judge_trial(strategy, micro, code, kept.read(folder / RESULT) or {}, log, bench.limit_s)


def judge_trial(
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


def refusal(bench: Bench, strategy: str) -> str | None:
    """Why this version or run file does not support a strategy; None if it does."""
    try:
        TrainingRun.load(
            bench.run_file,
            bench.bundle,
            None,
            overrides(strategy, 1, bench.start.world_size, bench.theirs),
        )
    except UsageError as error:
        return error.message
    return None


def _last_words(log: Path) -> str:
    tail = [line.strip() for line in last_lines(log, READ)[0] if line.strip()][-LAST_WORDS:]
    errors = [line for line in tail if "rror" in line or "SIG" in line or "Out Of Memory" in line]
    return (errors or tail or [""])[-1][:200]
