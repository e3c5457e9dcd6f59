"""`stage env`: environments that arrive whole. Parses and prints, as `stage.cli` does.

Each command imports what it needs inside itself.
"""

from __future__ import annotations

import click

from stage.terminal import Group


@click.group(cls=Group)
def env() -> None:
    """Environments: lock for a cluster's profile, create offline, check whether a cluster can run them."""


@env.command()
@click.option("--script", is_flag=True, help="Print the script itself, to run where airlift is not: sh env-probe.sh.")
@click.pass_context
def probe(context: click.Context, script: bool) -> None:
    """Print the profile of this node: what environments for it must fit. Redirect it into a file and copy it back.

    On a login node without a GPU it says the srun command that reaches one. It asks only; nothing is changed.
    """
    from stage.environment.scripts import PROBE, read_script, run_script

    if script:
        click.echo(read_script(PROBE), nl=False)
    else:
        context.exit(run_script(PROBE))
