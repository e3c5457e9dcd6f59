"""`stage sign`: signs a bundle with an OpenSSH key."""

from __future__ import annotations

from pathlib import Path

import click

from stage.cli.base import quiet_option, say, silent


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="An OpenSSH private key, or the .pub of a key that is in your agent.",
)
@quiet_option
def sign(bundle: Path, key: Path, quiet: bool) -> None:
    """Sign BUNDLE with an OpenSSH key: one signature covers every byte.

    The signature is of the tag manifest.

    \b
    Examples:
      stage sign bundle --key ~/.ssh/id_ed25519
      stage verify bundle --signers allowed_signers    # at the receiver
    """
    from stage.bundle.bundle import SIGNATURE
    from stage.bundle.signature import sign as sign_bundle

    fingerprint = sign_bundle(bundle, key)
    with silent(if_=quiet):
        say(f"{bundle / SIGNATURE}: signed with {fingerprint}")
