"""The commands `status`, `logs`, `pull` and `report`: parse options and print."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import click

from runner.cli.options import to_option
from runner.from_stage import (
    UsageError,
    json_option,
    print_json,
    print_line,
    quiet_option,
    silent,
)

ASK_SLURM_EVERY_S = 20


@click.command()
@click.argument("run", required=False)
@to_option("On this cluster, by ssh.")
@json_option
def status(run: str | None, to: str | None, as_json: bool) -> None:
    """Print the state of RUN, or of all runs below output/.

    RUN is a run folder, a folder of them (a sweep), a run file, or a Slurm job's number.

    \b
    Examples:
      runner status
      runner status output/my
      runner status --to cluster
    """
    if to is not None:
        from runner.remote.there import status as ask

        sys.exit(ask(to, run, as_json=as_json))
    from runner.run_folder.status import all_runs, find, runs_of, table
    from runner.run_folder.status import status as look

    folder, job = (Path("output"), None) if run is None else find(run)
    if run is None or runs_of(folder):
        runs = all_runs(folder)
        if as_json:
            print_json({"runs": [found.document() for found in runs]})
        else:
            print_line("\n".join(table(runs, folder.absolute())))
        return
    found = look(folder, job)
    if as_json:
        print_json(found.document())
    else:
        print_line("\n".join(found.lines()))


@click.command()
@click.argument("run")
@click.option(
    "--rank",
    type=click.IntRange(0),
    metavar="N",
    help="The log of one rank. Default: the newest job's, on one machine rank 0's.",
)
@click.option(
    "--lines",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="How many of the last lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the run is over, or Ctrl-C.")
@to_option("On this cluster, by ssh.")
def logs(run: str, rank: int | None, lines: int, follow: bool, to: str | None) -> None:
    """Print the log of RUN: its steps, warnings and errors.

    RUN is a run folder, a run file, or a Slurm job's number.

    \b
    Examples:
      runner logs output/my -f
      runner logs 4711 --rank 3
      runner logs runs/my.yaml --to cluster -f
    """
    with suppress(KeyboardInterrupt):  # the way to end `-f`
        if to is None:
            _logs(run, rank, lines, follow)
        else:
            from runner.remote.there import logs as read

            read(to, run, rank=rank, lines=lines, follow=follow)


def _logs(run: str, rank: int | None, lines: int, follow: bool) -> None:
    from runner.run_folder import logs as reading
    from runner.run_folder.status import find, runs_of
    from runner.run_folder.status import status as look

    folder, job = find(run)
    try:
        path = reading.log_of(folder, rank)
    except UsageError as error:
        is_one = rank is None and folder.is_dir() and not runs_of(folder)
        ended = look(folder, job).job if is_one else None
        if ended is None:
            raise
        raise UsageError(f"{error.message} {ended.describe()}.", error.remedy) from None
    print_line(f"{path}:", err=True)
    shown, position = reading.last_lines(path, lines)
    for line in shown:
        print_line(reading.readable(line))
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
        for line in text.splitlines():
            print_line(reading.readable(line))
        sys.stdout.flush()


@click.command()
@click.argument("run")
@click.option("--to", metavar="CLUSTER", required=True, help="As for `submit`; or a carried disk.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where to. Default: output/<name>.",
)
@click.option(
    "--checkpoints",
    is_flag=True,
    help="Also the newest checkpoint. Of a command: all, and files above 1 GB.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only the files of this name, folder or pattern. Repeatable.",
)
@quiet_option
def pull(
    run: str, to: str, output: Path | None, checkpoints: bool, only: tuple[str, ...], quiet: bool
) -> None:
    """Bring model, metrics and report of RUN here, every byte compared.

    Of a command: what it wrote in its working folder, without checkpoints and files above 1 GB.

    RUN is a run file, or the name of a run. Run it again after any interruption: it goes on.

    \b
    Examples:
      runner pull runs/my.yaml --to cluster
      runner pull my --to /media/disk/
    """
    from runner.remote.pull import Wanted
    from runner.remote.pull import pull as bring

    sys.exit(bring(run, to, output, Wanted(checkpoints, only), quiet=quiet))


@click.command(hidden=True)
@click.option("--checkpoints", is_flag=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("patterns", nargs=-1)
def results(folder: Path, patterns: tuple[str, ...], checkpoints: bool) -> None:
    """List the results of a command, with size and sha256. `go.sh --list` asks this."""
    from runner.remote.listing import list_results

    click.echo("== results")  # what a login shell prints stands before it
    for line in list_results(folder, patterns, every=checkpoints):
        click.echo(line)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The page. Default: report.html in the folder; of several, here.",
)
@quiet_option
def report(runs: tuple[Path, ...], output: Path | None, quiet: bool) -> None:
    """Write one HTML page on runs: curves, settings and their origin.

    RUN is a run folder, a folder of them (a sweep), or a run file.

    \b
    Examples:
      runner report output/my
      runner report output/* -o compare.html
    """
    from runner.run_folder.history import is_run_folder
    from runner.run_folder.report import write_report
    from runner.run_folder.status import find, members

    def may_be_run(path: Path) -> bool:
        if path.is_dir():
            return is_run_folder(path) or bool(members(path))
        return path.suffix in (".yaml", ".yml") or not path.exists()

    if len(runs) == 1 and members(runs[0]):
        output = output or runs[0] / "report.html"
    # `output/*` gives more than runs.
    given = [run for run in runs if may_be_run(run)] or runs
    others = ", ".join(str(run) for run in runs if run not in given)
    found = [find(str(run))[0] if run.is_file() else run for run in given]
    runs = tuple(one for run in found for one in members(run) or [run])
    with silent(if_=quiet):
        if others:
            print_line(f"passed over, for they are no runs: {others}", err=True)
        print_line(str(write_report(runs, output)))
