"""Measures how long a fetch from a Hub takes: of one large file, and of many small ones.

The Hub is `scripts.lib.hub.loopback_hub` in its own process. It lets the kernel send (sendfile). It
takes time of the same cores from each candidate.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import (
    MIB,
    ROOT,
    BenchError,
    Candidate,
    Workload,
    write_safetensors,
    write_small_files,
)
from stage.digests import hash_file

LARGE, MANY = 2048 * MIB, 500
SMALL = 8192
NOTE = (
    "`stage fetch` resolves, downloads, hashes, compares with the Hub's digests, writes tag "
    "files, and syncs everything to the disk; without `--no-offline-check` it also "
    "loads the model, which no other tool here does. `hf cache verify` and `model-mirror mirror` "
    "compare with the Hub's digests too; `aria2c` (8 connections) and `curl` compare nothing, "
    "`aria2c --checksum` compares with a given sha256. `model-mirror` and `aria2c` wait for the "
    "disk too (fsync); `hf` and `curl` do not. Wanted: `hf download` + `hf cache verify` at least "
    "2, `aria2c` at least 1; at most 200 MiB."
)


@contextmanager
def fetch_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """Both workloads, with a Hub that runs as long as the context."""
    served = folder / "served"
    large = served / "models/bench/large"
    write_safetensors(large / "model.safetensors", LARGE)
    sha256 = hash_file(large / "model.safetensors").sha256
    vocabulary = "[PAD] [UNK] [CLS] [SEP] [MASK] will it load ?"
    (large / "config.json").write_text('{"model_type": "bert"}\n')
    (large / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}\n')
    (large / "vocab.txt").write_text(vocabulary.replace(" ", "\n") + "\n")
    small = write_small_files(served / "models/bench/many", MANY, SMALL)
    with _hub(served, folder) as endpoint:
        yield [_large(folder, peers, endpoint, sha256), _many(folder, peers, endpoint, small)]


@contextmanager
def _hub(served: Path, folder: Path) -> Iterator[str]:
    """Yields the endpoint of a Hub; deletes the large file, of which the Hub has a copy."""
    copies = folder / "hub"
    copies.mkdir()
    environment = {**os.environ, "TMPDIR": str(copies), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scripts.lib.hub.loopback_hub", str(served)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchError("the Hub on loopback did not start")
        (served / "models/bench/large/model.safetensors").unlink()
        yield json.loads(line)["endpoint"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _large(folder: Path, peers: Peers, endpoint: str, sha256: str) -> Workload:
    out, url = folder / "out", f"{endpoint}/bench/large/resolve/main/model.safetensors"
    aria2 = ["aria2c", "-q", "-x8", "-s8", "-k1M", "--file-allocation=none"]
    aria2 += ["-d", str(out), "-o", "file", url]
    return Workload(
        title="Fetching one file of 2 GiB",
        note=NOTE,
        size=LARGE,
        candidates=[
            *_of_the_hub(out, peers, endpoint, "bench/large"),
            Candidate("aria2c", aria2),
            Candidate("aria2c --checksum", [*aria2, f"--checksum=sha-256={sha256}"]),
            Candidate("curl", ["curl", "-sSfL", "-o", str(out / "file"), url]),
        ],
        writes=out,
        seeds={"large.yaml": _manifest("    model: bench/large\n")},
    )


def _many(folder: Path, peers: Peers, endpoint: str, paths: list[str]) -> Workload:
    out = folder / "out"
    urls = [f"{endpoint}/bench/many/resolve/main/{path}" for path in paths]
    names = [path.replace("/", "-") for path in paths]
    pairs = list(zip(urls, names, strict=True))
    lists = {
        "aria2.txt": "".join(f"{url}\n  out={name}\n" for url, name in pairs),
        "curl.txt": "".join(f'url = "{url}"\noutput = "{out / name}"\n' for url, name in pairs),
    }
    aria2 = ["aria2c", "-q", "-j8", "--file-allocation=none", "-d", str(out)]
    aria2 += ["-i", str(out / "aria2.txt")]
    curl = ["curl", "-sSfL", "--parallel", "--parallel-max", "8", "-K", str(out / "curl.txt")]
    return Workload(
        title=f"Fetching {MANY} files of {SMALL // 1024} KiB",
        note=NOTE,
        size=MANY * SMALL,
        candidates=[
            *_of_the_hub(out, peers, endpoint, "bench/many"),
            Candidate("aria2c", aria2),
            Candidate("curl", curl),
        ],
        writes=out,
        seeds={
            "many.yaml": _manifest('    model: bench/many\n    include: ["*.txt"]\n'),
            **lists,
        },
    )


def _manifest(entry: str) -> str:
    return f"format: 1\nname: bench\nassets:\n  payload:\n{entry}"


def _of_the_hub(out: Path, peers: Peers, endpoint: str, repository: str) -> list[Candidate]:
    """The tools that can download from a Hub."""
    common = {"HF_ENDPOINT": endpoint, "HF_HOME": str(out / "hf-home"), "HOME": str(out)}
    peer = {
        **common,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "MODEL_MIRROR_DIRECTORY": str(out / "mirror"),
    }
    ours = {"PYTHONPATH": str(ROOT), **common}
    manifest = str(out / f"{repository.rpartition('/')[2]}.yaml")
    stage = (sys.executable, "-m", "stage", "fetch", "-q", manifest, "-o", str(out / "bundle"))
    local = (repository, "--local-dir", str(out / "hf"))
    hf = (peers.command("hf"), "download", *local)
    verified = (
        shlex.join(hf) + " && " + shlex.join((peers.command("hf"), "cache", "verify", *local))
    )
    # Its watchdog against stalls polls every 30 s, so that the end is seen late: switched off.
    mirror = (peers.command("model-mirror"), "mirror", "--stall-timeout", "0", repository)
    return [
        Candidate("stage fetch --no-offline-check", (*stage, "--no-offline-check"), ours),
        Candidate("stage fetch", stage, ours),
        Candidate("hf download", hf, peer),
        Candidate("hf download + hf cache verify", ("sh", "-c", verified), peer),
        Candidate("model-mirror mirror", mirror, peer),
    ]
