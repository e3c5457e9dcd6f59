"""The `runner` command: parses, prints, sets the exit code; nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from runner import cli_tools
from runner.errors import CommandGroup, UsageError, __version__


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    # `train` may do without RUN (--reproduce).
    options = [
        click.argument("run", type=click.Path(path_type=Path), required=command.__name__ != "train"),
        click.option(
            "--bundle", required=True, type=click.Path(path_type=Path), help="The bundle's folder, verified beforehand."
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

    Exit codes: 0 done; 1 failure; 2 wrong usage or a bad run file; 3 refused by policy; 5 could not finish, run it
    again.
    """


@main.command()
@_run_options
@click.option("--processes", type=click.IntRange(1), help="Ranks to reckon with. Default: what `slurm:` asks for.")
def check(run: Path, bundle: Path, output: Path | None, overrides: tuple[str, ...], processes: int | None) -> None:
    """Find what would fail, before anything is queued: assets, columns, lengths, batch, memory, disk, Slurm."""
    from runner import offline
    from runner.submit import check as check_request
    from runner.submit import device_of_job, ranks_on_node, request
    from runner.train import Run

    offline.set_variables(os.environ)
    loaded = Run.load(run, bundle, output, overrides)
    slurm = loaded.config.slurm
    device = device_of_job(loaded.config, processes, os.environ)
    loaded.check(processes or slurm.nodes * ranks_on_node(slurm), click.echo, device)
    click.echo(check_request(request(loaded.config, bundle, loaded.folder.root, overrides)))
    for line in (*loaded.held(os.environ), *loaded.finished()):
        click.echo(line)
    click.echo("nothing found that would fail")


@main.command()
@_run_options
def prepare(run: Path, bundle: Path, output: Path | None, overrides: tuple[str, ...]) -> None:
    """Tokenise the data once, outside the ranks. `train` does it by itself where that is missing."""
    from runner import offline
    from runner.train import Run, prepare_behind_wall

    offline.set_variables(os.environ)
    loaded = Run.load(run, bundle, output, overrides)
    loaded.check(None, click.echo)
    prepare_behind_wall(loaded)


@main.command()
@_run_options
@click.option("--processes", type=click.IntRange(1), help="Ranks on this machine. In a Slurm job srun starts them.")
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
    """Train what RUN describes. Resumes from the newest valid checkpoint by itself."""
    from runner.train import Run
    from runner.train import train as train_run

    if (run is None) == (recorded is None):
        raise UsageError("runner train: RUN or --reproduce RUNFOLDER, one of them.", "runner train --help")
    if run is not None:
        sys.exit(train_run(Run.load(run, bundle, output, overrides), processes, dry_run=dry_run, environ=os.environ))
    from runner.reproduce import reproduce

    if overrides or dry_run:
        raise UsageError("--reproduce: goes without --set and --dry-run: it is that run or none.")
    assert recorded is not None
    sys.exit(reproduce(recorded, bundle, output, processes, os.environ, click.echo))


@main.command()
@_run_options
@click.option("--print", "only_print", is_flag=True, help="Print the sbatch script; submit nothing.")
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
    from runner.holder import refuse_held
    from runner.plan import check_batch
    from runner.sbatch import sbatch_script
    from runner.submit import device_of_job, request
    from runner.submit import submit as submit_job
    from runner.sweep import members
    from runner.train import Run, refuse_finished

    offline.set_variables(os.environ)
    loaded = Run.load(run, bundle, output, overrides)
    sweep = members(axes) if axes else ()
    runs = [
        Run.load(run, bundle, loaded.folder.root / member.name, (*overrides, *member.overrides)) for member in sweep
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
        device = device_of_job(checked.config, None, os.environ)
        checked.check(ranks, click.echo, device)
        refuse_held(checked.folder, os.environ)
        for line in checked.finished() if sweep else ():
            click.echo(line)
    refuse_finished(runs or [loaded])
    job = submit_job(wanted)
    click.echo(f"submitted job {job}; follow it: squeue -j {job}")
    click.echo(f"  script: {wanted.script}")
    log = str(wanted.log).replace("%j", str(job)).replace("%A", str(job)).replace("%a", "*")
    click.echo(f"  log:    {log}")


for command in (cli_tools.exec_, cli_tools.status, cli_tools.logs, cli_tools.report, cli_tools.bench):
    main.add_command(command)
