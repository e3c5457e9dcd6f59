"""`stage env`: environments that arrive whole. Parses and prints, as `stage.cli` does.

Each command imports what it needs inside itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from stage.terminal import Group, bundle_argument


@click.group(cls=Group)
def env() -> None:
    """Environments: lock for a cluster's profile, create offline, check whether a cluster can run them."""


@env.command()
@bundle_argument
@click.argument("asset")
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--route",
    type=click.Choice(["image", "packages", "conda", "venv"]),
    help="image (default): unpack what the laptop made. packages: lay them out again here, to the same tree. "
    "conda: this cluster's conda or micromamba. venv: the wheels alone, on a Python of this cluster.",
)
def create(bundle: Path, asset: str, prefix: Path, route: str | None) -> None:
    """Create the environment ASSET of BUNDLE at PREFIX, without network.

    It is there whole, or not at all. Where airlift is not installed: sh BUNDLE/data/envs/ASSET/bootstrap.sh PREFIX
    """
    from stage.environment.create import create as create_environment

    click.echo(f"route: {route or 'image (the default: it needs nothing of this machine)'}")
    create_environment(bundle, asset, prefix, route or "image", click.echo)
