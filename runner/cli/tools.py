"""The commands `exec`, `status`, `logs`, `report` and `bench`: parse options and print."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click

from runner.errors import UsageError, as_shown

ASK_SLURM_EVERY_S = 20

bundle_option = click.option(
    "--bundle",
    required=True,
    type=click.Path(path_type=Path),
    help="The bundle's folder, verified beforehand.",
)


@click.command(name="exec", context_settings={"allow_interspersed_args": False})
@bundle_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(bundle: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND, unmodified, with the bundle as its Hub: under the same names, offline.

    \b
    runner exec --bundle B -- python their_script.py --epochs 3
    runner exec --bundle B -- accelerate launch their_script.py
    srun runner exec --bundle B -- python their_script.py
    """
    from runner.exec.run import run

    run(command, bundle, os.environ)


@click.command()
@click.argument("run")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there."
)
def status(run: str, as_json: bool) -> None:
    """Print the state of RUN: a run folder, a run file, or a Slurm job's number."""
    from runner.run_folder.status import find
    from runner.run_folder.status import status as look

    found = look(*find(run))
    click.echo(
        json.dumps(found.document(), indent=1) if as_json else as_shown("\n".join(found.lines()))
    )


@click.command()
@click.argument("run")
@click.option(
    "--rank",
    type=click.IntRange(0),
    metavar="N",
    help="The log of one rank. Default: the newest job's.",
)
@click.option(
    "--lines",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="How many of the last lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the run is over, or Ctrl-C.")
def logs(run: str, rank: int | None, lines: int, follow: bool) -> None:
    """Print the log of RUN: a run folder, a run file, or a Slurm job's number."""
    from runner.run_folder import logs as reading
    from runner.run_folder.history import History
    from runner.run_folder.status import find
    from runner.run_folder.status import status as look

    folder, job = find(run)
    try:
        path = reading.log_of(History.read(folder), rank)
    except UsageError as error:
        ended = look(folder, job).job if rank is None and folder.is_dir() else None
        if ended is None:
            raise
        raise UsageError(f"{error.message} {ended.describe()}.", error.remedy) from None
    click.echo(as_shown(f"{path}:"), err=True)
    shown, position = reading.last_lines(path, lines)
    click.echo(as_shown("".join(f"{line.expandtabs()}\n" for line in shown)), nl=False)
    if rank is None and not path.name.startswith("slurm-"):
        steps = path.parent.parent / "metrics.jsonl"
        click.echo(
            as_shown(f"the steps of a run on one machine are in {steps}: runner status {run}"),
            err=True,
        )
    if not follow:
        return
    asked, over = 0.0, False

    def is_over() -> bool:
        nonlocal asked, over
        # Slurm's controller serves the whole cluster, so it is asked rarely.
        if time.monotonic() - asked > ASK_SLURM_EVERY_S:
            asked, over = time.monotonic(), look(folder, job).state not in ("running", "waiting")
        return over

    for text in reading.follow(path, position, is_over):
        click.echo(as_shown(text.replace("\r", "\n").expandtabs()), nl=False)
        sys.stdout.flush()


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUNFOLDER...", type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The page. Default: report.html in the run folder; of several runs, here.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML page on one run or on several: curves, settings and their origin."""
    from runner.report import write

    click.echo(as_shown(str(write(runs, output))))


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@bundle_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="For the results. Default: output/<name>-bench.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file."
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Ranks on this machine. In a Slurm job srun starts them.",
)
@click.option(
    "--strategies",
    metavar="A,B",
    help="Which to compare, e.g. ddp,zero2,fsdp-full. Default: all but offload.",
)
@click.option(
    "--steps", type=click.IntRange(2), default=8, show_default=True, help="Steps of a trial."
)
@click.option(
    "--largest",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="No larger micro batch is tried.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, min_open=True),
    metavar="GIB",
    help="Memory of a rank, at most. Default: all of the device.",
)
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds a trial may take.",
)
def bench(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    strategies: str | None,
    steps: int,
    largest: int,
    memory: float | None,
    limit: float,
) -> None:
    """Find the largest micro batch of RUN that fits, and its speed, for each strategy."""
    from runner import isolation, offline
    from runner.bench.compare import Request, become_part, compare
    from runner.bench.strategies import chosen
    from runner.bench.trial import TRIAL_FLAG
    from runner.launch.train import Run

    offline.set_variables(os.environ)
    isolation.isolate(os.environ, click.echo)
    if os.environ.get(TRIAL_FLAG) == "1":
        loaded = Run.load(run, bundle, output, overrides)
        sys.exit(become_part(loaded, sys.argv[1:], processes, steps, memory, os.environ))
    wanted = Request(
        run, bundle, output, overrides, chosen(strategies), processes, steps, largest, memory, limit
    )
    folder = compare(wanted, os.environ, lambda text: click.echo(as_shown(text)))
    click.echo(f"table: {folder / 'table.md'}  plot: {folder / 'bench.svg'}")
