"""Measures `stage serve` beside nginx and Caddy: 200 clients that each read 1 GiB at once."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target, median_ratio
from scripts.lib.bench.measure import run
from scripts.lib.bench.options import ROOT
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import (
    MIB,
    Candidate,
    Step,
    Workload,
    plain_environment,
    write_safetensors,
)

STAGE, NGINX, CADDY = "stage serve", "nginx", "caddy"
ADDRESS = "127.0.0.1:8090"
CLIENTS, SIZE = 200, 1024 * MIB
NOTE = (
    f"{CLIENTS} connections on loopback are open at the same time, and each reads the same file of "
    "1 GiB, which is in the page cache. The clients keep no byte. A client that gets fewer bytes "
    "ends the measurement. Seconds are from the first connection to the last byte. CPU seconds "
    "and memory of the table are those of clients and server together. "
)


@contextmanager
def serve_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """The workload; the bundle is made when the context is entered."""
    write_safetensors(folder / "payload/one.safetensors", SIZE)
    manifest, bundle = folder / "serve.yaml", folder / "bundle"
    manifest.write_text("format: 1\nname: bench\nassets:\n  payload:\n    path: payload\n")
    stage = [sys.executable, "-m", "stage"]
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    fetch = [*stage, "fetch", "-q", "--no-offline-check", str(manifest), "-o", str(bundle)]
    run(fetch, environment, folder)
    answers = {name: folder / f"{name.replace(' ', '-')}.json" for name in (STAGE, NGINX, CADDY)}
    serve = [*stage, "serve", str(bundle), "--port", "0"]
    path = "bundle/payload/resolve/main/one.safetensors"
    candidates = [_candidate(STAGE, answers[STAGE], path, serve)]
    nginx, skipped, payload = shutil.which("nginx"), [], bundle / "data/files/payload"
    caddy = [peers.command("caddy"), "file-server", "--listen", ADDRESS, "--root", str(payload)]
    others = {CADDY: caddy}
    if nginx:
        others[NGINX] = [nginx, "-p", str(folder), "-c", str(_nginx(folder, payload))]
    else:
        skipped.append("nginx: not installed here")
    candidates += [
        _candidate(name, answers[name], "one.safetensors", command)
        for name, command in others.items()
    ]

    def targets(rounds: Rounds) -> list[Target]:
        peak = _peak(answers[STAGE])  # of the last round
        found = [Target("peak memory of `stage serve`, MiB", peak, 200, at_most=True)]
        for name in others:
            ratio = median_ratio(rounds, STAGE, name)
            found.append(Target(f"time / {name}", ratio, 1.2, at_most=True))
        return found

    yield [
        Workload(
            name="serve-many",
            title=f"Serving 1 GiB to {CLIENTS} clients at once",
            note=NOTE,
            size=CLIENTS * SIZE,
            files=CLIENTS,
            base=STAGE,
            candidates=candidates,
            targets=targets,
            skipped=skipped,
        )
    ]


def _candidate(name: str, answer: Path, path: str, server: list[str]) -> Candidate:
    load = [sys.executable, "-m", "scripts.lib.bench.workloads.serving_load"]
    command = (*load, str(answer), str(CLIENTS), str(SIZE), path, "--", *server)
    return Candidate((Step(command, name, answer),), {"PYTHONPATH": str(ROOT)})


def _peak(answer: Path) -> float:
    return float(json.loads(answer.read_text())["peak_mib"])


def _nginx(folder: Path, root: Path) -> Path:
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
