"""The commands `init`, `exec` and `bench`: parse options and print."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runner.cli.options import (
    bundle_option,
    optional_bundle_option,
    output_option,
    processes_option,
    set_option,
)
from runner.errors import (
    Choice,
    UsageError,
    print_line,
    quiet_option,
    quoted,
    silent,
    write_new,
)
from runner.tasks import TASKS


@click.command()
@click.argument("task", type=Choice(tuple(TASKS)), metavar="TASK")
@optional_bundle_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The run file to write; never one that is there. Default: TASK.yaml.",
)
@quiet_option
def init(task: str, bundle: Path | None, output: Path | None, quiet: bool) -> None:
    """Write a run file for TASK, with what is in the bundle.

    TASK: masked-lm, causal-lm, instruction, text-classification, token-classification or
    image-classification. Without a bundle, the file is the example for TASK.

    \b
    Example:
      runner init masked-lm --bundle bundle -o runs/my.yaml
    """
    from runner.inputs.far import to_option
    from runner.job.examples import new_run_file

    path = output or Path(f"{task}.yaml")
    text, said = new_run_file(task, path, bundle)
    write_new(path, text)
    with silent(if_=quiet):
        for line in said:
            print_line(line)
        words = f"{quoted(path)} --bundle {quoted(bundle or 'BUNDLE')}"
        to = to_option(path) if "\nmanifest: " in text else ""
        print_line(f"next: runner submit {words} {to}" if to else f"next: runner check {words}")


@click.command(name="exec", context_settings={"allow_interspersed_args": False})
@bundle_option
@click.option("--to", hidden=True, is_eager=True)
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(bundle: Path, to: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, unmodified, offline, with the bundle as its Hub.

    COMMAND finds models and datasets under the names that they have on the Hub.

    \b
    Examples:
      runner exec --bundle B -- python their_script.py --epochs 3
      runner exec --bundle B -- accelerate launch their_script.py
      srun runner exec --bundle B -- python their_script.py   # it reads SLURM_PROCID itself
    """
    if to is not None:
        raise UsageError(
            "runner exec: --to is for run files; a command of your own is started there by hand.",
            f"rsync -a --exclude /bundle ./ {to}:work/; stage push bundle {to}:work/bundle; then "
            f"on {to}, in work/: "
            "sh bundle/data/envs/ASSET/bootstrap.sh env; . env/activate; "
            "srun runner exec --bundle bundle -- COMMAND",
        )
    from runner.exec.user_script import run

    run(command, bundle, os.environ)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@bundle_option
@output_option("For the results. Default: output/<name>-bench.")
@set_option
@processes_option
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
@quiet_option
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
    quiet: bool,
) -> None:
    """Find the largest batch of RUN that fits, and its speed.

    For each strategy: DDP, ZeRO, FSDP. The results are a table, a plot and JSON.

    \b
    Examples:
      runner bench runs/my.yaml --bundle bundle --processes 2
      runner bench runs/my.yaml --bundle bundle --strategies ddp,zero2,fsdp-full
    """
    from runner import isolation, offline
    from runner.trials.bench import Request, compare
    from runner.trials.strategies import chosen

    offline.set_variables(os.environ)
    wanted = Request(
        run, bundle, output, overrides, chosen(strategies), processes, steps, largest, memory, limit
    )
    with silent(if_=quiet):
        isolation.isolate(os.environ, print_line)
        folder = compare(wanted, os.environ, print_line)
        print_line(f"table: {folder / 'table.md'}")
