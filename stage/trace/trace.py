"""Runs a script against the recorder, and writes the manifest of what it asked for."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stage.download.http import Connections, check_proxies, tls_context
from stage.errors import UsageError, as_shown
from stage.fetch.sources import Sources
from stage.manifest.manifest import FORMAT
from stage.trace.entries import Entry, asset_lines, entries_of
from stage.trace.record import gather
from stage.trace.recorder import Recorder
from stage.util.yaml_lines import scalar

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
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Traced:
    """The result of a run: the script's exit status, and the manifest's text."""

    status: int
    text: str
    num_assets: int


def trace(
    command: Sequence[str],
    manifest: Path,
    sources: Sources,
    environ: Mapping[str, str],
    *,
    allow_code: bool,
) -> Traced:
    """Runs the command once. Its streams are this process's own.

    Args:
        manifest: the file that the text is for; it is not written here.
        sources: for the real Hub.

    Raises:
        UsageError: no such program.
        StageError: the Hub does not answer.
    """
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise UsageError(
            f"{command[0]}: no such program on PATH.", "stage trace -- python their_script.py ..."
        )
    check_proxies()
    hub = sources.hub
    connections = Connections(read_timeout_s=_TIMEOUT_S, at_once=32, trust=tls_context())
    with (
        Recorder(hub.endpoint, connections) as recorder,
        tempfile.TemporaryDirectory(prefix="airlift-trace-", ignore_cleanup_errors=True) as caches,
    ):
        variables = environment(environ, recorder.address, Path(caches))
        status = subprocess.run([program, *command[1:]], env=variables, check=False).returncode
    entries = entries_of(gather(recorder.exchanges), hub, allow_code=allow_code)
    entries += [_url(address) for address in recorder.addresses]
    lines = _head(command, manifest, status)
    lines += asset_lines(entries)
    lines += [
        f"  # asked for over https, which hides all but the host: {as_shown(host)}. If the job "
        "needs it: `url: https://...`, and let the script read the file"
        for host in recorder.other_hosts
    ]
    return Traced(status, "\n".join(lines) + "\n", sum(bool(entry.lines) for entry in entries))


def _url(address: str) -> Entry:
    note = "the script must read this file from the bundle: data/files/ and the asset's name"
    return Entry(
        address.rstrip("/").rpartition("/")[2] or "file", [f"url: {scalar(address)}"], [note]
    )


def _head(command: Sequence[str], manifest: Path, status: int) -> list[str]:
    lines = [f"# What this asked for: {as_shown(' '.join(shlex.join(command).split()))}"]
    if status:
        lines.append(f"# It ended with {status}: what it would have asked for later is not here.")
    next_command = shlex.join(["stage", "fetch", manifest.name, "-o", "bundle"])
    return [
        *lines,
        f"# Next: {next_command}",
        f"format: {FORMAT}",
        f"name: {scalar(manifest.stem)}",
        "assets:",
    ]


def environment(environ: Mapping[str, str], address: str, caches: Path) -> dict[str, str]:
    """The script's variables: the recorder is its Hub and its proxy, and its caches are empty."""
    removed = {*OFFLINE, "all_proxy", "ALL_PROXY"}
    kept = {name: value for name, value in environ.items() if name not in removed}
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {
        **kept,
        **dict.fromkeys(proxies, address),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        **{name: str(caches / name.lower()) for name in CACHES},
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",  # so that files come over HTTP, and are seen
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }
