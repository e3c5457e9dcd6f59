"""The whole bench: it searches every strategy, prints progress, and writes the results.

A trial is ranks in their own processes, and how they ended.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runner import kept
from runner.data.store import Store
from runner.errors import (
    StageError,
    UsageError,
    format_age,
    human_count,
    human_size,
    write_atomically,
)
from runner.inputs import check_not_inside
from runner.job.check import check_run
from runner.job.findings import report
from runner.job.run import Asked
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start, as_launcher
from runner.launch.resolved import Resolved
from runner.launch.train import (
    check_all_installed,
    prepare_in_sandbox,
    ranks_of,
)
from runner.run_folder.layout import RunFolder, write_json
from runner.run_folder.logs import last_lines
from runner.trials.apart import OUT_OF_MEMORY, RESULT, start_apart
from runner.trials.search import (
    SearchResult,
    Trial,
    as_markdown,
    as_text,
    overrides,
    result_rows,
    search,
)

READ, LAST_WORDS = 100, 12  # lines of a failed trial's log in which its error is looked for


@dataclass(frozen=True)
class Request:
    """The arguments of `runner bench`.

    Attributes:
        run_file: the run file.
        bundle: the folder of the bundle.
        output: for the results; None: `output/<name>-bench`.
        overrides: `--set` texts.
        strategies: names, see `strategies.STRATEGIES`.
        processes: ranks on this machine; None in a Slurm job.
        steps: of each trial.
        most: the largest micro batch that is tried.
        memory_gib: per rank; None: what is there.
        limit_s: the most seconds a trial may take.
    """

    run_file: Path
    bundle: Path
    output: Path | None
    overrides: tuple[str, ...]
    strategies: tuple[str, ...]
    processes: int | None
    steps: int
    most: int
    memory_gib: float | None
    limit_s: float


@dataclass(frozen=True)
class Bench:
    """What all trials share.

    Attributes:
        wanted: the arguments of the command.
        folder: holds one run folder per trial.
        start: which ranks a trial has.
    """

    wanted: Request
    folder: Path
    start: Start

    def load(self, strategy: str, micro: int, folder: Path | None) -> TrainingRun:
        """The run of one trial.

        Raises:
            UsageError: this version or run file does not support the strategy.
        """
        wanted = self.wanted
        sets = overrides(strategy, micro, self.start.world_size, wanted.overrides)
        return TrainingRun.load(wanted.run_file, wanted.bundle, folder, sets)


def run_trial(bench: Bench, strategy: str, micro: int) -> Trial:
    """Makes one trial and waits for its end."""
    folder, wanted = bench.folder / f"{strategy}-micro{micro}", bench.wanted
    shutil.rmtree(folder, ignore_errors=True)
    log = folder / "trial.log"
    try:
        run = bench.load(strategy, micro, folder)
        # An epoch of few data is shorter, and the step after the last has no sample.
        run = replace(run, config=replace(run.config, steps=wanted.steps, epochs=None))
        run.folder.make()
        run.write_config()
        resolved = Resolved.of(run, steps=wanted.steps, memory_gib=wanted.memory_gib)
        code = start_apart(resolved, "trial", bench.start, log, os.environ, limit_s=wanted.limit_s)
    except StageError as error:
        return Trial(strategy, micro, "failed", error.message)
    return judge_trial(strategy, micro, code, kept.read(folder / RESULT) or {}, log, wanted.limit_s)


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
        measures = {key: result[key] for key in Trial.__dataclass_fields__ if key in result}
        return Trial(strategy, micro, **measures)
    if result.get("outcome") == OUT_OF_MEMORY:
        return Trial(strategy, micro, "out of memory", OUT_OF_MEMORY)
    if code is None:
        return Trial(strategy, micro, "too slow", f"not done after {limit_s:.0f} s")
    said = _last_words(log) or f"exit code {code}"
    return Trial(strategy, micro, "failed", f"{said} (see {log})")


def _last_words(log: Path) -> str:
    # The line of an exception, of a signal, or of srun; what is behind it is mostly a remedy.
    tail = [line.strip() for line in last_lines(log, READ)[0] if line.strip()][-LAST_WORDS:]
    errors = [line for line in tail if "rror" in line or "SIG" in line or "Out Of Memory" in line]
    return (errors or tail or [""])[-1][:200]


def compare(wanted: Request, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Runs the bench.

    Args:
        wanted: the arguments of the command.
        environ: the environment variables.
        say: prints a line.

    Returns:
        The folder with `results.json`, `table.md` and the logs of all trials.

    Raises:
        StageError: nothing could be tried, or every trial failed.
    """
    run = TrainingRun.load(wanted.run_file, wanted.bundle, wanted.output, wanted.overrides)
    folder = (wanted.output or Path("output") / f"{run.config.name}-bench").absolute()
    check_not_inside(folder, run.inputs.bundle)
    run = replace(run, folder=RunFolder(folder), environ=environ)
    start = as_launcher(Start.of(environ, wanted.processes), "bench")
    check_all_installed(run, start)
    report(check_run(run), say)
    for line in replace(run, asked=Asked(ranks_of(start))).accelerators:
        say(line)
    num_sequences = prepare_trials(run, start)
    bench = Bench(wanted, folder, start)
    say(
        f"{', '.join(wanted.strategies)}: for each, micro batches 1, 2, 4, ... while "
        f"they fit, {wanted.most} at most, then sizes in between; "
        f"{human_count(wanted.steps, 'step')} per trial on {human_count(start.world_size, 'rank')} "
        f"started for it, {wanted.limit_s:.0f} s at most; trials and results in {folder}"
    )
    found: list[SearchResult] = []
    began = time.monotonic()
    for done, strategy in enumerate(wanted.strategies, start=1):
        found.append(_search(bench, strategy, say))
        spent = format_age(time.monotonic() - began)
        say(f"{strategy}: {done} of {len(wanted.strategies)} done, {spent} so far")
        # Written after each strategy, so that the results so far survive any end of the bench.
        _write(folder, run.config.name, found, num_sequences)
    say(as_text(result_rows(found, num_sequences)))
    if not any(one.best for one in found):
        raise StageError(
            f"no strategy ran; the logs of all trials are in {folder}.",
            f"less {folder}/*/trial.log",
            1,
        )
    return folder


def _search(bench: Bench, strategy: str, say: Callable[[str], None]) -> SearchResult:
    try:
        bench.load(strategy, 1, None)
    except UsageError as error:
        say(f"{strategy}: not tried: {error.message}")
        return SearchResult(strategy, refused=f"not tried: {error.message}")

    def try_one(micro: int) -> Trial:
        began = time.monotonic()
        trial = run_trial(bench, strategy, micro)
        took = time.monotonic() - began
        measured = (
            f"{trial.step_s:.2f} s per step, {trial.tokens_per_s:,.0f} tokens/s, "
            f"{human_size(trial.memory_gib * 2**30)} per rank"
        )
        say(
            f"{strategy}: micro {micro}: "
            f"{measured if trial.outcome == 'fits' else trial.words} ({took:.0f} s)"
        )
        return trial

    return search(strategy, bench.wanted.most, try_one)


def prepare_trials(run: TrainingRun, start: Start) -> int:
    """Tokenises once for all trials. Returns the number of sequences per epoch."""
    run.folder.root.mkdir(parents=True, exist_ok=True)
    prepare_in_sandbox(run, in_job=start.job is not None)
    link = run.folder.root / run.folder.stores.name
    # Each trial is a run folder, and expects prepared data beside it.
    if not link.is_symlink():
        link.symlink_to(Path("..") / link.name)
    return sum(len(Store(path)) for path in run.stores["train"])


def _write(folder: Path, name: str, found: Sequence[SearchResult], num_sequences: int) -> None:
    title = f"runner bench: {name}"
    strategies = [
        {
            "strategy": one.strategy,
            "refused": one.refused,
            "trials": [asdict(t) for t in one.trials],
        }
        for one in found
    ]
    write_json(
        folder / "results.json",
        {"format": 1, "name": name, "sequences": num_sequences, "strategies": strategies},
    )
    write_atomically(
        folder / "table.md", as_markdown(title, result_rows(found, num_sequences)).encode()
    )
