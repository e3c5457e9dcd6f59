"""`stage env`: environments that arrive whole. Parses and prints, as `stage.cli` does.

Each command imports what it needs inside itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from stage.terminal import Group, json_option, quiet_option


@click.group(cls=Group)
def env() -> None:
    """Environments: lock for a cluster's profile, create offline, check whether a cluster can run them."""


@env.command()
@click.argument("environment", metavar="ENVIRONMENT.yml", type=click.Path(path_type=Path))
@click.option(
    "--profile", required=True, type=click.Path(path_type=Path), metavar="FILE", help="What the cluster offers."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The lock. Default: conda-lock.yml (x.yml: x.conda-lock.yml) beside ENVIRONMENT.yml.",
)
@click.option(
    "--update", "updates", multiple=True, metavar="NAME", help="Let this locked package move. May be repeated."
)
@click.option(
    "--conda", metavar="EXE", help="Solve with this conda, mamba or micromamba. Default: yours, else py-rattler."
)
@quiet_option
@click.option("-v", "--verbose", is_flag=True, help="Also every Python package that conda provides.")
@json_option
def lock(
    environment: Path,
    profile: Path,
    output: Path | None,
    updates: tuple[str, ...],
    conda: str | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Resolve ENVIRONMENT.yml for a cluster, to exact packages with their digests; download none of them.

    A lock that still answers is left as it is. Packages that would not run on the cluster are refused.
    """
    from stage.progress import Reporter
    from stage.sources.environment.lock import lock_environment

    with Reporter(quiet=quiet or as_json, verbose=verbose) as reporter:
        outcome = lock_environment(environment, profile, reporter=reporter, output=output, updates=updates, conda=conda)
    if as_json:
        click.echo(json.dumps(outcome.to_json(), indent=1))
