"""The whole bench: it searches every strategy, prints progress, and writes the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runner.data.store import Store
from runner.errors import StageError, format_age, human_count, human_size, write_atomically
from runner.inputs import check_not_inside
from runner.job.check import check_run
from runner.job.findings import report
from runner.job.run import Asked
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start, as_launcher
from runner.launch.train import (
    check_all_installed,
    prepare_in_sandbox,
    ranks_of,
)
from runner.run_folder.layout import RunFolder, write_json
from runner.trials.search import SearchResult, Trial, as_markdown, as_text, result_rows, search
from runner.trials.trial import Bench, refusal, run_trial


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
    ranks = start.world_size
    check_all_installed(run, start)
    report(check_run(run), say)
    for line in replace(run, asked=Asked(ranks_of(start))).accelerators:
        say(line)
    num_sequences = prepare_trials(run, start)
    bench = Bench(
        run_file=wanted.run_file,
        bundle=wanted.bundle,
        theirs=wanted.overrides,
        folder=folder,
        start=start,
        steps=wanted.steps,
        memory_gib=wanted.memory_gib,
        limit_s=wanted.limit_s,
    )
    say(
        f"{', '.join(wanted.strategies)}: for each, micro batches 1, 2, 4, ... while "
        f"they fit, {wanted.most} at most, then sizes in between; "
        f"{human_count(wanted.steps, 'step')} per trial on {human_count(ranks, 'rank')} "
        f"started for it, {wanted.limit_s:.0f} s at most; trials and results in {folder}"
    )
    found: list[SearchResult] = []
    began = time.monotonic()
    for done, strategy in enumerate(wanted.strategies, start=1):
        found.append(_search(bench, strategy, wanted.most, say))
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


def _search(bench: Bench, strategy: str, most: int, say: Callable[[str], None]) -> SearchResult:
    why_not = refusal(bench, strategy)
    if why_not is not None:
        say(f"{strategy}: not tried: {why_not}")
        return SearchResult(strategy, refused=f"not tried: {why_not}")

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

    return search(strategy, most, try_one)


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
