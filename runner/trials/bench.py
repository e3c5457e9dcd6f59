"""The whole bench: it searches every strategy, prints progress, and writes the results.

A trial is ranks in their own processes, and how they ended. The size of the micro batch doubles
until one does not fit. Then the gap is halved until it is an eighth of the size that fits: each
trial costs the start of all ranks, and the last few per cent are worth less.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from runner.data.store import Store
from runner.from_stage import (
    StageError,
    UsageError,
    format_age,
    human_count,
    human_size,
    suggest,
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
from runner.run_folder.layout import RunFolder, read_json, write_json
from runner.run_folder.logs import last_lines
from runner.run_folder.status import format_duration, in_columns
from runner.trials.apart import OUT_OF_MEMORY, RESULT, start_apart

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
    return judge_trial(strategy, micro, code, read_json(folder / RESULT) or {}, log, wanted.limit_s)


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
        result: its `trial.json`: the measures, or what ended the ranks; empty: neither is known.
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
    said = result.get("words") or _last_words(log) or f"exit code {code}"
    return Trial(strategy, micro, "failed", f"{said} (see {log})")


def _last_words(log: Path) -> str:
    """The error in the log of a launcher that ended before its ranks began; empty: none."""
    # The line of an exception, of a signal, or of srun; what is behind it is mostly a remedy.
    tail = [line.strip() for line in last_lines(log, READ)[0] if line.strip()][-LAST_WORDS:]
    errors = [line for line in tail if "rror" in line or "SIG" in line or "Out Of Memory" in line]
    return (errors or tail or [""])[-1][:200]


STRATEGIES = {
    "ddp": "{name: ddp}",
    "zero0": "{name: deepspeed, zero: 0}",
    "zero1": "{name: deepspeed, zero: 1}",
    "zero2": "{name: deepspeed, zero: 2}",
    "zero3": "{name: deepspeed, zero: 3}",
    "fsdp-grad-op": "{name: fsdp, sharding: grad_op}",
    "fsdp-full": "{name: fsdp, sharding: full}",
    "zero2-offload": "{name: deepspeed, zero: 2, offload: cpu}",
    "zero3-offload": "{name: deepspeed, zero: 3, offload: cpu}",
    "fsdp-full-offload": "{name: fsdp, sharding: full, offload: cpu}",
}
"""Name -> the value of the run file's `engine:`."""


BY_DEFAULT = tuple(name for name in STRATEGIES if not name.endswith("-offload"))
"""Without offload, which is slow and only for models that do not fit otherwise."""


def chosen(text: str | None) -> tuple[str, ...]:
    """The strategies of `--strategies a,b`; by default those without offload.

    Raises:
        UsageError: a name is not a strategy, or there is none. The message lists all strategies.
    """
    if text is None:
        return BY_DEFAULT
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(
            f"--strategies {unknown[0]}: no such strategy.",
            suggest(unknown[0], STRATEGIES, f"There are: {', '.join(STRATEGIES)}."),
        )
    if not names:
        raise UsageError("--strategies names none.", f"There are: {', '.join(STRATEGIES)}.")
    return names


def overrides(strategy: str, micro: int, world_size: int, theirs: Sequence[str]) -> list[str]:
    """The `--set` texts of one trial: the user's, then the strategy with one micro batch per rank.

    Args:
        strategy: its name.
        micro: samples per micro batch.
        world_size: the number of ranks.
        theirs: the user's `--set` texts.
    """
    ours = (
        f"engine={STRATEGIES[strategy]}",
        f"batch.micro={micro}",
        f"batch.global={micro * world_size}",
    )
    return [*theirs, *ours]


Outcome = Literal["fits", "out of memory", "too slow", "failed"]


@dataclass(frozen=True)
class Trial:
    """One try.

    Attributes:
        strategy: its name.
        micro: samples per micro batch.
        outcome: how it ended.
        words: why it did not fit, as text for people.
        world_size: the number of ranks.
        tokens_per_s, samples_per_s, step_s: medians over the measured steps, of all ranks together.
        memory_gib: the most of any rank, of its device.
        memory: phase -> `device` and `host` -> the most of any rank, GiB.
        mfu: model FLOPs utilization, 0 to 1; None where unknown.
        note: text for the table.
    """

    strategy: str
    micro: int
    outcome: Outcome
    words: str = ""
    world_size: int = 0
    tokens_per_s: float = 0.0
    samples_per_s: float = 0.0
    step_s: float = 0.0
    memory_gib: float = 0.0
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    mfu: float | None = None
    note: str = ""


@dataclass
class SearchResult:
    """The result of one strategy.

    Attributes:
        strategy: its name.
        trials: every trial, in the order of trying.
        refused: why it was not tried; empty if it was.
    """

    strategy: str
    trials: list[Trial] = field(default_factory=list)
    refused: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial with the largest micro batch that fits."""
        return max(
            (t for t in self.trials if t.outcome == "fits"), key=lambda t: t.micro, default=None
        )

    @property
    def fastest(self) -> Trial | None:
        """The trial with the most samples per second. It is not always the largest."""
        return max(
            (t for t in self.trials if t.outcome == "fits"),
            key=lambda t: t.samples_per_s,
            default=None,
        )

    @property
    def end(self) -> str:
        """Why the search ended."""
        stopped = [t for t in self.trials if t.outcome != "fits"]
        if self.refused:
            return self.refused
        return (
            f"micro {stopped[-1].micro}: {stopped[-1].words or stopped[-1].outcome}"
            if stopped
            else ""
        )


def search(strategy: str, most: int, try_one: Callable[[int], Trial]) -> SearchResult:
    """Tries micro batches of one strategy.

    Args:
        strategy: its name.
        most: the largest micro batch to try.
        try_one: makes one trial.
    """
    found = SearchResult(strategy)
    fits, too_large, micro = 0, most + 1, 1
    while fits < micro < too_large:
        trial = try_one(micro)
        found.trials.append(trial)
        if trial.outcome == "failed":  # a larger one would fail too
            break
        if trial.outcome == "fits":
            fits = micro
        else:
            too_large = micro
        micro = next_micro(fits, too_large, most)
    return found


def next_micro(fits: int, too_large: int, most: int) -> int:
    """The next size to try; `fits` where it is known well enough."""
    if too_large > most:
        return min(max(1, fits * 2), most)
    gap = too_large - fits
    return fits if gap <= max(1, fits // 8) else fits + gap // 2


HEADINGS = (
    "strategy",
    "largest micro batch",
    "per step",
    "tokens/s",
    "samples/s",
    "per epoch",
    "device: load, train, evaluate",
    "host: load, train, evaluate",
    "the search ended at",
)


def result_rows(found: Sequence[SearchResult], num_sequences: int) -> list[tuple[str, ...]]:
    """One row per strategy, under `HEADINGS`.

    Args:
        found: the results.
        num_sequences: sequences per epoch.
    """
    return [_row(one, num_sequences) for one in found]


def _row(one: SearchResult, num_sequences: int) -> tuple[str, ...]:
    best = one.best
    if best is None:
        return (one.strategy, "none" if one.trials else "", *([""] * 6), one.end)
    note = f"{best.note}; " if best.note else ""
    fastest = one.fastest
    if (
        fastest is not None
        and fastest.micro != best.micro
        and fastest.samples_per_s > 1.05 * best.samples_per_s
    ):
        note += f"micro {fastest.micro} is faster: {fastest.samples_per_s:.3g} samples/s; "
    return (
        one.strategy,
        f"{best.micro} x {best.world_size}",
        f"{best.step_s:.3g} s",
        f"{best.tokens_per_s:,.0f}" + (f" (MFU {best.mfu:.0%})" if best.mfu is not None else ""),
        f"{best.samples_per_s:.3g}",
        format_duration(num_sequences / best.samples_per_s),
        _memory(best, "device"),
        _memory(best, "host"),
        (note + (one.end or "the largest that --largest allows")),
    )


def _memory(trial: Trial, where: str) -> str:
    """The most memory of a rank in each phase; a CPU is no device of its own."""
    known = [phase[where] for phase in trial.memory.values() if where in phase]
    return ", ".join(human_size(gib * 2**30) for gib in known) or "-"


def as_text(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, for a terminal."""
    return "\n".join(in_columns([HEADINGS, *table]))


def as_markdown(title: str, table: Sequence[Sequence[str]]) -> str:
    """The table in Markdown, for a README or a report."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *table]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return f"# {title}\n\n{body}\n"
