"""The commands round the carrying of a bundle: sign, push, init. Parses and prints, as `stage.cli` does.

`stage.cli` adds them to its group; each imports what it needs inside itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from stage.errors import as_shown


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="An OpenSSH private key, or the .pub of a key that is in your agent.",
)
def sign(bundle: Path, key: Path) -> None:
    """Sign BUNDLE with an OpenSSH key: one signature, of the tag manifest, covers every byte.

    Who receives it checks with: stage verify BUNDLE --signers ALLOWED_SIGNERS
    """
    from stage.bundle import SIGNATURE
    from stage.sign import sign as sign_bundle

    fingerprint = sign_bundle(bundle, key)
    click.echo(as_shown(f"{bundle / SIGNATURE}: signed with {fingerprint}"))
