"""Measures `stage serve` beside nginx and Caddy: 200 clients that each read 1 GiB at once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import MIB, ROOT, Candidate, Workload, fetched, write_safetensors

ADDRESS = "127.0.0.1:8090"
CLIENTS, SIZE = 200, 1024 * MIB
NOTE = (
    f"{CLIENTS} connections on loopback are open at the same time, and each reads the same file of "
    "1 GiB, which is in the page cache. The clients keep no byte. A client that gets fewer bytes "
    "ends the measurement. Seconds are from the first connection to the last byte. CPU seconds "
    "are those of clients and server together, memory is the server's. Wanted: each other at "
    "least 0.83; at most 200 MiB."
)


@contextmanager
def serve_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """The workload; the bundle is made when the context is entered."""
    write_safetensors(folder / "payload/one.safetensors", SIZE)
    bundle = fetched(folder, "serve", "payload")
    payload = str(bundle / "data/files/payload")
    serve = [sys.executable, "-m", "stage", "serve", str(bundle), "--port", "0"]
    caddy = [peers.command("caddy"), "file-server", "--listen", ADDRESS, "--root", payload]
    candidates = [
        _candidate(folder, "stage serve", "serve/payload/resolve/main/one.safetensors", serve),
        _candidate(folder, "caddy", "one.safetensors", caddy),
    ]
    if nginx := shutil.which("nginx"):
        command = [nginx, "-p", str(folder), "-c", str(_nginx(folder, payload))]
        candidates.append(_candidate(folder, "nginx", "one.safetensors", command))
    title = f"Serving 1 GiB to {CLIENTS} clients at once"
    yield [Workload(title, NOTE, CLIENTS * SIZE, candidates)]


def _candidate(folder: Path, name: str, path: str, server: list[str]) -> Candidate:
    answer = folder / f"{name.replace(' ', '-')}.json"
    load = [sys.executable, "-m", "scripts.lib.bench.workloads.serving_load"]
    command = (*load, str(answer), str(CLIENTS), str(SIZE), path, "--", *server)
    return Candidate(name, command, {"PYTHONPATH": str(ROOT)}, answer)


def _nginx(folder: Path, root: str) -> Path:
    """A configuration for one worker per core, with sendfile; port 8090."""
    path = folder / "nginx.conf"
    temporary = "\n".join(
        f"  {name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path.write_text(
        f"daemon off;\nuser {os.environ.get('USER', 'root')};\npid {folder}/nginx.pid;\n"
        f"error_log stderr;\nworker_processes auto;\nevents {{ worker_connections 1024; }}\n"
        f"http {{\n  access_log off;\n  sendfile on;\n  tcp_nopush on;\n{temporary}\n"
        f"  server {{ listen {ADDRESS}; root {root}; }}\n}}\n"
    )
    return path
