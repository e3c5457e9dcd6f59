"""`stage env`: environments that arrive whole. Parses and prints, as `stage.cli` does.

Each command imports what it needs inside itself.
"""

from __future__ import annotations

import click

from stage.terminal import Group


@click.group(cls=Group)
def env() -> None:
    """Environments: lock for a cluster's profile, create offline, check whether a cluster can run them."""
