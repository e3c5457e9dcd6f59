"""`stage serve`: parses, prints, waits for Ctrl-C or `kill`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stage.cli.base import bundle_argument, say
from stage.processes import Ended


@click.command()
@bundle_argument
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on. 0.0.0.0: every one.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="The port; 0: any that is free.",
)
def serve(bundle: Path, host: str, port: int) -> None:
    """Serve BUNDLE as a read-only Hub, until Ctrl-C.

    For unmodified clients: huggingface_hub, transformers, datasets.

    \b
    Example:
      stage serve bundle --port 8080
    """
    from stage.bundle.bundle import Bundle
    from stage.bundle.receipt import remedy_for_damage
    from stage.bundle.verifier_adapter import failure_of, verify
    from stage.serve.catalogue import Catalogue
    from stage.serve.server import BundleServer

    opened = Bundle.open(bundle)
    report = verify(bundle, "fast")
    if not report.ok:
        raise failure_of(report)(f"{bundle}: {report.findings[0]}.", remedy_for_damage(bundle))
    catalogue = Catalogue.of(opened)
    with BundleServer(catalogue, host, port, lambda text: say(text, err=True)) as server:
        say(f"bundle {opened.id[:12]} at {server.address}, read-only, until Ctrl-C")
        say(f"  export HF_ENDPOINT={server.address}")
        for name in catalogue.own_names:
            say(f"  {name}: what this bundle calls it; it has no name on the Hub")
        if host not in ("127.0.0.1", "localhost", "::1"):
            say("  anyone who reaches this address can read the bundle, gated models too", err=True)
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except (KeyboardInterrupt, Ended):  # to be stopped is how a server comes to its end
            say("stopped", err=True)
