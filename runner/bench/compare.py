"""The whole bench: every strategy searched, the result told as it grows, and written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner import launch
from runner.bench import table
from runner.bench.search import Found, Trial, search
from runner.bench.trial import Bench, be_a_rank, launch_trial, refusal, run_trial
from runner.data.prepare import open_prepared
from runner.data.recipe import recipes
from runner.errors import StageError, age_in_words, human_count, write_atomically
from runner.inputs import refuse_inside
from runner.plan import sequence_length
from runner.records import RunFolder, write_json
from runner.shapes import ModelShape
from runner.train import Run, prepare_behind_wall, world_size


@dataclass(frozen=True)
class Request:
    """What `runner bench` was asked for."""

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

    Returns:
        The folder with `results.json`, `table.md`, `bench.svg` and the logs of all trials.

    Raises:
        StageError: nothing could be tried, or every trial failed.
    """
    run = Run.load(wanted.run_file, wanted.bundle, wanted.output, wanted.overrides)
    folder = (wanted.output or Path("output") / f"{run.config.name}-bench").absolute()
    refuse_inside(folder, run.inputs.bundle)
    run = Run(run.config, run.inputs, RunFolder(folder), run.bundle, run.overrides)
    ranks = world_size(launch.role(environ, wanted.processes), wanted.processes or 1, environ)
    run.check(None, say)
    num_sequences = _prepare(run)
    bench = Bench(
        run_file=wanted.run_file,
        bundle=wanted.bundle,
        theirs=wanted.overrides,
        folder=folder,
        world_size=ranks,
        processes=wanted.processes,
        steps=wanted.steps,
        memory_gib=wanted.memory_gib,
        limit_s=wanted.limit_s,
    )
    say(
        f"{', '.join(wanted.strategies)}: for each, micro batches 1, 2, 4, ... while "
        f"they fit, {wanted.most} at most, and then between; {wanted.steps} steps a trial on "
        f"{human_count(ranks, 'rank')} started for it, {wanted.limit_s:.0f} s at most; trials and results in {folder}"
    )
    found: list[Found] = []
    began = time.monotonic()
    for done, strategy in enumerate(wanted.strategies, start=1):
        found.append(_search(bench, strategy, wanted.most, say))
        spent = age_in_words(time.monotonic() - began)
        say(f"{strategy}: {done} of {len(wanted.strategies)} done, {spent} so far")
        # After each strategy: what is known survives whatever ends the bench.
        _write(folder, run.config.name, found, num_sequences)
    say(table.text(table.rows(found, num_sequences)))
    if not any(one.best for one in found):
        raise StageError(f"no strategy ran; the logs of all trials are in {folder}.", f"less {folder}/*/trial.log", 1)
    return folder


def _search(bench: Bench, strategy: str, most: int, say: Callable[[str], None]) -> Found:
    why_not = refusal(bench, strategy)
    if why_not is not None:
        say(f"{strategy}: not tried: {why_not}")
        return Found(strategy, refused=f"not tried: {why_not}")

    def try_one(micro: int) -> Trial:
        began = time.monotonic()
        trial = run_trial(bench, strategy, micro)
        took = time.monotonic() - began
        measured = f"{trial.step_s:.2f} s a step, {trial.tokens_per_s:,.0f} tokens/s, {trial.memory_gib:.2f} GiB a rank"
        say(f"{strategy}: micro {micro}: {measured if trial.outcome == 'fits' else trial.words} ({took:.0f} s)")
        return trial

    return search(strategy, most, try_one)


def _prepare(run: Run) -> int:
    """Tokenises once for all trials, where `runner train` would; returns the sequences of an epoch."""
    run.folder.root.mkdir(parents=True, exist_ok=True)
    prepare_behind_wall(run)
    link = run.folder.root / run.folder.stores.name
    # Each trial is a run folder, and looks for prepared data beside it.
    if not link.is_symlink():
        link.symlink_to(Path("..") / link.name)
    length, _ = sequence_length(run.config, ModelShape.of(run.inputs.model.settings, None))
    wanted = recipes(run.config, run.inputs, length)["train"]
    return sum(len(open_prepared(recipe, run.folder.stores, "runner prepare")) for recipe in wanted)


def _write(folder: Path, name: str, found: Sequence[Found], num_sequences: int) -> None:
    title = f"runner bench: {name}"
    strategies = [
        {"strategy": one.strategy, "refused": one.refused, "trials": [asdict(t) for t in one.trials]} for one in found
    ]
    write_json(
        folder / "results.json", {"format": 1, "name": name, "sequences": num_sequences, "strategies": strategies}
    )
    write_atomically(folder / "table.md", table.markdown(title, table.rows(found, num_sequences)).encode())
    write_atomically(folder / "bench.svg", table.svg(title, found).encode())


def become_part(
    run: Run,
    arguments: Sequence[str],
    processes: int | None,
    steps: int,
    memory_gib: float | None,
    environ: Mapping[str, str],
) -> int:
    """What `runner bench` is inside a trial: its launcher or one of its ranks. Returns the exit code."""
    if launch.role(environ, processes) == "rank":
        return be_a_rank(run, steps, memory_gib, environ)
    return launch_trial(run, arguments, processes, environ)
