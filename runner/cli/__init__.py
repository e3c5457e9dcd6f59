"""The `runner` command: parses options, prints, sets the exit code."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import click

from runner.cli import run, tools, watch
from runner.errors import CommandGroup
from runner.from_stage import __version__

_SECTIONS = {
    "Login node": ("init", "check", "rehearse", "prepare", "submit"),
    "Job, or one machine": ("train", "evaluate", "exec", "bench"),
    "During and after": ("status", "logs", "pull", "report"),
}


class _Commands(CommandGroup):
    """Knows keys of the run file that somebody gives as options, such as `--epochs 3`."""

    def remedy_of(self, error: click.ClickException, command: str) -> str:
        if isinstance(error, click.NoSuchOption) and error.ctx is not None:
            from runner.config.fields import key_of_option

            key = key_of_option(error.option_name)
            if key and any(known.name == "overrides" for known in error.ctx.command.params):
                return f"`{key}` is a key of the run file: write it there, or --set {key}=VALUE"
        if "extra argument" in error.format_message():
            return (
                f"{command} --help. The bundle is an option (--bundle FOLDER), and a setting has a "
                "`=` (--set KEY=VALUE)."
            )
        return super().remedy_of(error, command)

    def ending_signals(self) -> AbstractContextManager[None]:
        """A rank of a launcher ends by the signal itself, until the training listens to it.

        The launcher and Slurm then see that the rank was stopped and did not fail.
        """
        from runner.launch.ranks import RANK_FLAG

        if os.environ.get(RANK_FLAG) == "1":
            return nullcontext()
        return super().ending_signals()


@click.group(
    cls=_Commands,
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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


for command in (run.check, tools.rehearse, run.prepare, run.submit, run.train):
    main.add_command(command)
main.add_command(tools.evaluate)
main.add_command(run.rank)
main.add_command(run.launch)
main.add_command(run.unpack)
main.add_command(watch.results)
for command in (watch.status, watch.logs, watch.pull, watch.report):
    main.add_command(command)
for command in (tools.init, tools.exec_, tools.bench):
    main.add_command(command)
