"""The `runner` command: parses options, prints, sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runner.cli import rehearse, tools
from runner.errors import (
    CommandGroup,
    StageError,
    UsageError,
    __version__,
    as_shown,
    human_count,
)

if TYPE_CHECKING:
    from runner.launch.train import Run


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    # RUN is optional in `train`, because of --reproduce.
    options = [
        click.argument(
            "run", type=click.Path(path_type=Path), required=command.__name__ != "train"
        ),
        click.option(
            "--bundle",
            required=True,
            type=click.Path(path_type=Path),
            help="The bundle's folder, verified beforehand.",
        ),
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help="The run folder. Default: output/<name>.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a key of the run file, e.g. batch.micro=4.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="runner")
def main() -> None:
    """Trains from a bundle, offline: in a Slurm job or on one machine.

    \b
    login node:  runner check RUN --bundle B
                 runner submit RUN --bundle B
    one machine: runner train RUN --bundle B --processes 2

    Exit codes: 0 done; 1 failure; 2 wrong usage or a bad run file; 3 refused by policy; 5 could
    not finish, run it again.
    """


@main.command()
@_run_options
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="The number of ranks to check for. Default: as `slurm:` asks for.",
)
@click.option(
    "--on",
    type=click.Choice(["node"]),
    metavar="node",
    help="Instead check a node: its devices, their speed, its limits. A job of one minute.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there."
)
def check(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    on: str | None,
    as_json: bool,
) -> None:
    """Find, before anything is queued, what would fail.

    Checks assets, weights, tokenizer, texts, columns, lengths, batch, memory, rights, disk and
    Slurm. Prints all that is wrong at once.
    """
    from runner import isolation, offline
    from runner.installed import check_installed
    from runner.launch.train import Run

    offline.set_variables(os.environ)
    if as_json:
        if on is not None:
            raise UsageError("--json cannot be combined with --on.", "Leave one of them out.")
        sys.exit(_check_as_json(run, bundle, output, overrides, processes))
    isolation.isolate(dict(os.environ), click.echo, [*sys.path])  # only prints what `train` will do
    loaded = Run.load(run, bundle, output, overrides)
    if on is not None:
        from runner.launch.node_check import check_node

        check_installed(loaded.config, loaded.inputs, ["torch", "numpy"], "checking a node")
        folder = loaded.folder.root
        check_node(loaded.config, bundle, folder, overrides, os.environ, click.echo)
        return
    from runner.launch.check import examine

    found = examine(loaded, processes, os.environ)
    for line in () if found.errors else found.lines:
        click.echo(as_shown(line))
    for finding in found.others:
        click.echo(as_shown(str(finding)))
    found.raise_errors()
    warnings = sum(finding.level == "warning" for finding in found.others)
    above = f", except {human_count(warnings, 'warning')} above" if warnings else ""
    click.echo(f"nothing found that would fail{above}")


def _check_as_json(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
) -> int:
    """Prints one JSON document with everything that `check` finds; returns the exit code."""
    from runner import isolation
    from runner.launch.check import document, examine
    from runner.launch.train import Run
    from runner.preflight.findings import Findings

    lines: list[str] = []
    isolation.isolate(dict(os.environ), lines.append, [*sys.path])
    try:
        found = examine(Run.load(run, bundle, output, overrides), processes, os.environ)
    except StageError as error:
        found = Findings(errors=list(error.parts or [error]))
    result = document(found, lines, run=str(run), bundle=str(bundle))
    click.echo(json.dumps(result, indent=1))
    return int(result["exit_code"])


@main.command()
@_run_options
def prepare(run: Path, bundle: Path, output: Path | None, overrides: tuple[str, ...]) -> None:
    """Tokenise the data once, outside the ranks. `train` does it too, if it was not done."""
    from runner import isolation, offline
    from runner.launch.train import Run, check_and_prepare

    offline.set_variables(os.environ)
    isolation.isolate(os.environ, click.echo)
    check_and_prepare(Run.load(run, bundle, output, overrides))


@main.command()
@_run_options
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Ranks on this machine. In a Slurm job srun starts them.",
)
@click.option("--dry-run", is_flag=True, help="Check and explain; start nothing.")
@click.option(
    "--reproduce",
    "recorded",
    type=click.Path(path_type=Path),
    metavar="RUNFOLDER",
    help="Instead of RUN: train what is recorded there once more, and compare every loss.",
)
def train(
    run: Path | None,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    dry_run: bool,
    recorded: Path | None,
) -> None:
    """Train what RUN describes. Resumes from the newest valid checkpoint."""
    from runner.launch.train import Run
    from runner.launch.train import train as train_run

    if (run is None) == (recorded is None):
        raise UsageError(
            "runner train: RUN or --reproduce RUNFOLDER, one of them.", "runner train --help"
        )
    if run is not None:
        sys.exit(
            train_run(
                Run.load(run, bundle, output, overrides),
                processes,
                dry_run=dry_run,
                environ=os.environ,
            )
        )
    from runner.launch.reproduce import reproduce

    if overrides or dry_run:
        raise UsageError("--reproduce cannot be combined with --set or --dry-run.")
    assert recorded is not None
    sys.exit(reproduce(recorded, bundle, output, processes, os.environ, click.echo))


@main.command()
@_run_options
@click.option(
    "--print", "only_print", is_flag=True, help="Print the sbatch script; submit nothing."
)
@click.option(
    "--array",
    "axes",
    multiple=True,
    metavar="KEY=A,B,...",
    help="A sweep: a job array with one run for each value. May be repeated: every combination.",
)
def submit(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    only_print: bool,
    axes: tuple[str, ...],
) -> None:
    """Write the sbatch script into the run folder and submit it."""
    from runner import offline
    from runner.launch.submit import request
    from runner.launch.submit import submit as submit_job
    from runner.launch.train import Run, check_not_finished
    from runner.plan.plan import check_batch
    from runner.slurm.job_array import members
    from runner.slurm.script import sbatch_script

    offline.set_variables(os.environ)
    loaded = Run.load(run, bundle, output, overrides)
    sweep = members(axes) if axes else ()
    runs = [
        Run.load(run, bundle, loaded.folder.root / member.name, (*overrides, *member.overrides))
        for member in sweep
    ]
    wanted = request(loaded.config, bundle, loaded.folder.root, overrides, sweep)
    ranks = wanted.nodes * wanted.tasks_per_node
    if only_print:
        for checked in runs or [loaded]:
            check_batch(checked.config, ranks)
        click.echo(sbatch_script(wanted), nl=False)
        return
    for checked in runs or [loaded]:
        if sweep:
            click.echo(f"{checked.folder.root.name}:")
        # The runs of a sweep share one shell, which is tried once.
        _check_request(checked, ranks, with_shell=checked is (runs or [loaded])[0])
        for line in checked.finished() if sweep else ():
            click.echo(line)
    check_not_finished(runs or [loaded])
    job = submit_job(wanted)
    click.echo(f"submitted job {job}; follow it: squeue -j {job}")
    click.echo(f"  script: {wanted.script}")
    log = str(wanted.log).replace("%j", str(job)).replace("%A", str(job)).replace("%a", "*")
    click.echo(f"  log:    {log}")


def _check_request(run: Run, ranks: int, *, with_shell: bool) -> None:
    """Checks one run that will be submitted, and prints what is found.

    Args:
        with_shell: whether the job's shell and its Python are tried, too.

    Raises:
        StageError: it cannot work, or another launcher trains in its folder.
    """
    from runner.launch.check import known_of_partition, python_of_job, surroundings
    from runner.launch.submit import device_of_job, notes_of_job
    from runner.launch.surroundings import Attempt, start
    from runner.run_folder.run_lock import check_not_held

    attempt = start(run, os.environ) if with_shell else Attempt(run)
    device = device_of_job(run.config, None, os.environ)
    found = run.examine(ranks, device, with_texts=True)
    with found.keeping():
        found.lines += notes_of_job(run.config)
    attempt.add_to(found)
    found.raise_errors()
    known = known_of_partition(run, os.environ, offers=True)
    found.others += [*python_of_job(run), *surroundings(run, os.environ), *known.others]
    found.lines += known.lines
    for line in (*found.lines, *map(str, found.others)):
        click.echo(as_shown(line))
    check_not_held(run.folder, os.environ)


for command in (
    rehearse.rehearse,
    tools.exec_,
    tools.status,
    tools.logs,
    tools.report,
    tools.bench,
):
    main.add_command(command)
