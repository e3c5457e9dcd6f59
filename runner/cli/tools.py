"""The commands `init`, `exec`, `bench`, `evaluate` and `rehearse`: parse options and print."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from runner.cli.options import (
    bundle_option,
    optional_bundle_option,
    output_option,
    processes_option,
    run_options,
    set_option,
)
from runner.from_stage import (
    Choice,
    IncompleteError,
    UsageError,
    print_line,
    quiet_option,
    quoted,
    silent,
    write_new,
)


class TaskName(click.ParamType):  # type: ignore[type-arg]  # that of click 8.0 is not generic
    """The name of a task. To print a help, no task is imported: that takes 0.1 s."""

    name = "task"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        return self._names().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return self._names().shell_complete(ctx, param, incomplete)

    def _names(self) -> Choice:
        from runner.tasks import TASKS

        return Choice(tuple(TASKS))


@click.command()
@click.argument("task", type=TaskName(), metavar="TASK")
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
    from runner.job.examples import new_run_file
    from stage.carry.clusters import to_option

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
    from runner.trials.bench import Request, chosen, compare

    offline.set_variables(os.environ)
    wanted = Request(
        run, bundle, output, overrides, chosen(strategies), processes, steps, largest, memory, limit
    )
    with silent(if_=quiet):
        isolation.isolate(os.environ, print_line)
        folder = compare(wanted, os.environ, print_line)
        print_line(f"table: {folder / 'table.md'}")


@click.command()
@run_options
@processes_option
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="newest, best, step-N, or none: the first weights. Default: newest, if there is one.",
)
@quiet_option
def evaluate(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    checkpoint: str | None,
    quiet: bool,
) -> None:
    """Measure RUN on its validation split; train nothing.

    It takes the newest checkpoint of the run folder, or the model of the bundle where the run has
    not begun. The run folder stays as it is.

    \b
    Examples:
      runner evaluate runs/my.yaml --bundle bundle --checkpoint best
      runner evaluate runs/my.yaml --bundle bundle --set dataset.validation=test
    """
    from runner.job.training_run import TrainingRun
    from runner.trials.evaluate import evaluate as evaluate_run

    loaded = TrainingRun.load(run, bundle, output, overrides)
    with silent(if_=quiet):
        evaluate_run(loaded, checkpoint, processes, os.environ, print_line)


@click.command()
@run_options
@click.option(
    "--job",
    is_flag=True,
    help="Instead try the partition's nodes, in a job of five minutes: what they see and reach; "
    "a `command:` runs there for three minutes.",
)
@quiet_option
def rehearse(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    quiet: bool,
) -> None:
    """Try RUN small and whole, in a minute: a step, a save, an export.

    Also a resume and an evaluation. Two ranks on this machine's CPU, the model cut to two
    layers, in the run folder's file system. Everything is removed afterwards.

    \b
    Examples:
      runner rehearse runs/my.yaml --bundle bundle
      runner rehearse runs/my.yaml --bundle bundle --job   # the nodes
    """
    from runner.config.command_config import has_command
    from runner.job.command_run import CommandRun
    from runner.job.training_run import TrainingRun
    from runner.trials import rehearse_job
    from runner.trials.rehearse import Stages

    load = partial(TrainingRun.load, run, bundle, output, overrides)
    if job and rehearse_job.FOLDER in os.environ:  # this is the job of a rehearsal
        sys.exit(rehearse_job.be_its_launcher(load, os.environ))
    stages = Stages((lambda _line: None) if quiet else _print)
    try:
        if has_command(run, overrides):
            command = CommandRun.load(run, bundle, output, overrides)
            if not job:
                raise UsageError(
                    f"{run}: a command of your own cannot be made smaller to try it here.",
                    f"Start it as it is: {command.command('train')}; or try it on the nodes: "
                    f"{command.command('rehearse')} --job",
                )
            rehearse_job.rehearse_command(command, os.environ, stages)
        elif job:
            rehearse_job.rehearse_in_job(load(), os.environ, stages)
        else:
            from runner.trials.rehearse import rehearse as rehearse_here

            stages.say(f"rehearsing {run}; nothing is kept")
            rehearse_here(load(), os.environ, stages)
    except KeyboardInterrupt:
        if job:
            raise
        what = "Interrupted. A rehearsal leaves nothing behind."
        raise IncompleteError(what, "Run the same command again.") from None
    stages.say(f"rehearsed: {', '.join(stages.names)} in {stages.seconds:.0f} s")


def _print(line: str) -> None:
    print_line(line)
    sys.stdout.flush()
