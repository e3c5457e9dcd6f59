"""`stage serve` and `stage trace`: a bundle as a Hub, and a Hub that is recorded."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from stage.cli.base import bundle_argument, endpoint_option, new_manifest_option, say
from stage.errors import IncompleteError, StageError, UsageError, quoted
from stage.files import check_new, human_count, write_new
from stage.installation import TO_FETCH, check_libraries
from stage.processes import Ended
from stage.progress import Reporter

if TYPE_CHECKING:
    from stage.serve.trace import Traced


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
    from stage.bundle.bundle import Bundle, failure_of, verify
    from stage.bundle.receipt import remedy_for_damage
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


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@new_manifest_option
@endpoint_option
@click.option(
    "--allow-code",
    is_flag=True,
    help="Allow the code that the script ran to run on the cluster too. Read it first.",
)
def trace(command: tuple[str, ...], manifest: Path, endpoint: str | None, allow_code: bool) -> None:
    """Run COMMAND once, and write the manifest of what it asks for.

    The manifest has an entry for each repository and revision, with the files that were read.
    Recorded are requests to the Hub (models, datasets, metrics of `evaluate`), plain http
    addresses, and of other https addresses the host. What a bundle cannot hold is named at the end.

    \b
    Example:
      stage trace -o my.yaml -- python their_script.py --max_steps 1
    """
    check_libraries("stage trace", *TO_FETCH)
    from stage.serve.trace import trace as run
    from stage.serve.trace import traced_manifest, url_lines
    from stage.staging.sources.source import connect

    check_new(manifest)
    with Reporter() as reporter:
        hub, _ = connect(endpoint, reporter)
        traced = run(command, hub, os.environ, allow_code=allow_code)
    assets = [entry for entry in traced.entries if entry.lines]
    if not assets:
        _raise_nothing(command, traced)
    write_new(manifest, traced_manifest(command, manifest, traced))
    for entry in traced.entries:
        say(entry.note)
    lost = [
        *(f"cannot travel: {text}" for entry in traced.entries for text in entry.cannot_travel),
        *(f"cannot travel under its own address: {address}" for address in traced.addresses),
    ]
    for text in lost:
        say(text, err=True)
    for number, line in enumerate(url_lines(traced)):
        if not number:
            say(
                "  -> In the job the script must read $AIRLIFT_BUNDLE/data/files/NAME/FILE "
                f"instead. To bring the file, remove the `#` before its line in {manifest}:",
                err=True,
            )
        say(f"  {line}", err=True)
    for host in traced.hosts:
        say(
            f"warning: {command[0]} asked {host} over https, which hides the rest of the address. "
            "If the job needs a file there: the asset `NAME: {url: https://...}` brings it; the "
            "script must read $AIRLIFT_BUNDLE/data/files/NAME/FILE",
            err=True,
        )
    for ran in traced.unrecorded:
        say(f"warning: not recorded, it ran with variables of its own: {ran}", err=True)
    say(f"{manifest}: {human_count(len(assets), 'asset')}")
    fetch = f"stage fetch {quoted(manifest)} -o bundle"
    if traced.interrupted is not None:
        raise IncompleteError(
            f"Interrupted: {manifest} has what was asked for until then.",
            f"{fetch}, or trace again: -o and another name.",
            getattr(traced.interrupted, "exit_code", None),
        )
    if traced.status:
        raise StageError(
            f"{command[0]} ended with {traced.status}: {manifest} has what it asked for until "
            "then, and no more.",
            f"Fix what its own error says, above, then trace again: rm {quoted(manifest)}"
            f" first, or -o and another name. If it always ends so: {fetch}",
            exit_code=1,
        )
    say(f"next: {fetch}")
    say(f"then, as on the cluster: runner exec --bundle bundle -- {shlex.join(command)}")
    if lost:
        sys.exit(1)


def _raise_nothing(command: tuple[str, ...], traced: Traced) -> NoReturn:
    """Raises the error for a script that asked for nothing that a bundle can hold."""
    if traced.interrupted is not None:
        raise traced.interrupted
    nothing = f"{command[0]} asked the Hub for nothing that a bundle can hold"
    why = "Does it ask in a child process with other variables, or set HF_ENDPOINT itself?"
    if traced.status:
        raise UsageError(
            f"{nothing}, and ended with {traced.status}.",
            f"Its own error is above: fix that first. {why}",
        )
    raise UsageError(f"{nothing}.", why)
