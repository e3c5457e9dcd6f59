"""Runs a script against the recorder, and says what it asked for."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import urllib3

from stage.download.http import Connections, tls_context
from stage.errors import IncompleteError, UsageError, as_shown
from stage.lock.manifest import FORMAT
from stage.lock.yaml_lines import scalar
from stage.processes import Ended
from stage.serve import children
from stage.serve.entries import Entry, asset_lines, entries_of, names_of
from stage.serve.record import gather
from stage.serve.recorder import Recorder
from stage.staging.new_manifest import asset_names
from stage.staging.sources.source import Sources

CACHES = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
    "HF_DATASETS_CACHE",
    "HF_EVALUATE_CACHE",
    "HF_MODULES_CACHE",
)
"""Caches that are empty for the script: what is in a cache already is not always asked for."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
_STRAYS = "strays"
_TIMEOUT_S = 60.0
_TIME_TO_END_S = 10.0
"""After an interruption, for the script to end by itself, and again after SIGTERM."""


@dataclass(frozen=True)
class Traced:
    """The result of a run.

    Attributes:
        status: of the script.
        interrupted: Ctrl-C or a signal that ended the script; None: it ended by itself.
        addresses: plain http addresses that the script read.
        hosts: hosts that it asked over https, which hides the rest of the address.
        strays: commands that it started with variables of their own, so they were not seen.
    """

    status: int
    interrupted: BaseException | None
    entries: list[Entry]
    addresses: list[str]
    hosts: list[str]
    strays: list[str]


def trace(
    command: Sequence[str], sources: Sources, environ: Mapping[str, str], *, allow_code: bool
) -> Traced:
    """Runs the command once. Its streams are this process's own.

    Args:
        sources: for the real Hub.

    Raises:
        UsageError: no such program.
        IncompleteError: the Hub cannot be reached.
    """
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise UsageError(
            f"{command[0]}: no such program on PATH.", "stage trace -- python their_script.py ..."
        )
    hub = sources.hub
    connections = Connections(read_timeout_s=_TIMEOUT_S, at_once=32, trust=tls_context())
    try:
        connections.request("HEAD", f"{hub.endpoint}/api/models?limit=1", {}).close()
    except urllib3.exceptions.HTTPError as error:
        raise IncompleteError(
            f"{hub.name}: cannot be reached: {error}.",
            "Set HF_ENDPOINT, or --endpoint, to the Hub or a mirror that this machine reaches.",
        ) from None
    with (
        Recorder(hub.endpoint, connections) as recorder,
        tempfile.TemporaryDirectory(prefix="airlift-trace-", ignore_cleanup_errors=True) as folder,
    ):
        variables = environment(environ, recorder.address, Path(folder))
        shutil.copyfile(children.__file__, Path(folder, "sitecustomize.py"))
        status, interrupted = _run([program, *command[1:]], variables)
        recorded = Path(folder, _STRAYS)
        strays = recorded.read_text("utf-8").splitlines() if recorded.exists() else []
    entries = entries_of(gather(recorder.exchanges), hub, allow_code=allow_code)
    return Traced(
        status, interrupted, entries, list(recorder.addresses), recorder.other_hosts, strays
    )


def _run(command: list[str], variables: dict[str, str]) -> tuple[int, BaseException | None]:
    """Runs the script; its exit status, and what interrupted it.

    Ctrl-C reaches the script too, which may save its work. A signal to this process alone does not.
    """
    interrupted: BaseException | None = None
    with subprocess.Popen(command, env=variables) as process:
        try:
            process.wait()
        except (KeyboardInterrupt, Ended) as error:
            interrupted = error
            for end in (process.terminate, process.kill):
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.wait(_TIME_TO_END_S)
                    break
                end()
    return process.returncode, interrupted


def manifest_text(command: Sequence[str], manifest: Path, traced: Traced) -> str:
    """The text for a manifest of what a run asked for."""
    lines = [f"# What this asked for: {as_shown(' '.join(shlex.join(command).split()))}"]
    if traced.interrupted is not None:
        lines.append("# It was interrupted: what it would have asked for later is not here.")
    elif traced.status:
        lines.append(
            f"# It ended with {traced.status}: what it would have asked for later is not here."
        )
    lines += [
        f"# Next: {shlex.join(['stage', 'fetch', manifest.name, '-o', 'bundle'])}",
        f"format: {FORMAT}",
        f"name: {scalar(manifest.stem)}",
        "assets:",
        *asset_lines(traced.entries),
    ]
    lines += [f"  # {line}" for line in url_lines(traced)]
    lines += [f"  # asked over https, which hides the rest: {as_shown(h)}" for h in traced.hosts]
    return "\n".join(lines) + "\n"


def url_lines(traced: Traced) -> list[str]:
    """Lines of a manifest that bring the plain addresses, once the script reads a file instead."""
    names = asset_names(
        (address.rstrip("/").rpartition("/")[2] or "file" for address in traced.addresses),
        names_of(traced.entries),
    )
    return [
        f"{scalar(name)}: {{url: {scalar(address)}}}"
        for name, address in zip(names, traced.addresses, strict=True)
    ]


def environment(environ: Mapping[str, str], address: str, folder: Path) -> dict[str, str]:
    """The script's variables: the recorder is its Hub and its proxy; caches are in the folder."""
    removed = {*OFFLINE, "all_proxy", "ALL_PROXY"}
    kept = {name: value for name, value in environ.items() if name not in removed}
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {
        **kept,
        **dict.fromkeys(proxies, address),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        **{name: str(folder / name.lower()) for name in CACHES},
        children.STRAYS: str(folder / _STRAYS),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH")))),
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",  # so that files come over HTTP, and are seen
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }
