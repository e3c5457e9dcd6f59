"""Measures how long a fetch from a Hub takes: of one large file, and of many small ones.

The Hub is `scripts.lib.hub.loopback_hub` in its own process. It lets the kernel send (sendfile). It
takes time of the same cores from each candidate.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target, median_of, median_ratio
from scripts.lib.bench.measure import BenchError
from scripts.lib.bench.options import ROOT
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import (
    MIB,
    Candidate,
    Step,
    Workload,
    write_safetensors,
    write_small_files,
)
from stage.digests import hash_file

LARGE, MANY = 2048 * MIB, 500
SMALL = 8192
STAGE, STAGE_LOADED = "stage fetch --no-offline-check", "stage fetch"
HF, HF_VERIFIED = "hf download", "hf download + hf cache verify"
ARIA2, ARIA2_VERIFIED = "aria2c", "aria2c --checksum"
MIRROR, CURL = "model-mirror mirror", "curl"
NOTE = (
    "`stage fetch` resolves, downloads, hashes, compares with the Hub's digests, writes tag "
    "files, and syncs everything to the disk; without `--no-offline-check` it also "
    "loads the model, which no other tool here does. `hf cache verify` and `model-mirror mirror` "
    "compare with the Hub's digests too; "
)
LARGE_NOTE = NOTE + (
    "`aria2c` (8 connections) and `curl` (one) compare nothing, `aria2c --checksum` compares "
    "with a given sha256. `model-mirror` and `aria2c` wait for the disk too (fsync); `hf` and "
    "`curl` do not."
)
MANY_NOTE = NOTE + "`aria2c -j8` and `curl --parallel-max 8` compare nothing."


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
    manifest = "format: 1\nname: bench\nassets:\n  payload:\n    model: bench/large\n"
    system = {
        "aria2c": [
            Candidate.single(ARIA2, *aria2),
            Candidate.single(ARIA2_VERIFIED, *aria2, f"--checksum=sha-256={sha256}"),
        ],
        "curl": [Candidate.single(CURL, "curl", "-sSfL", "-o", str(out / "file"), url)],
    }
    return Workload(
        name="fetch-large",
        title="Fetching one file of 2 GiB",
        note=LARGE_NOTE,
        size=LARGE,
        files=1,
        base=STAGE,
        candidates=[*_of_the_hub(out, peers, endpoint, "bench/large"), *_present(peers, system)],
        targets=_targets,
        writes=out,
        seeds={"large.yaml": manifest},
        skipped=peers.missing("aria2c", "curl"),
    )


def _many(folder: Path, peers: Peers, endpoint: str, paths: Sequence[str]) -> Workload:
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
    curl = ("curl", "-sSfL", "--parallel", "--parallel-max", "8", "-K", str(out / "curl.txt"))
    system = {"aria2c": [Candidate.single(ARIA2, *aria2)], "curl": [Candidate.single(CURL, *curl)]}
    entry = '    model: bench/many\n    include: ["*.txt"]\n'
    manifest = f"format: 1\nname: bench\nassets:\n  payload:\n{entry}"
    return Workload(
        name="fetch-many",
        title=f"Fetching {MANY} files of {SMALL // 1024} KiB",
        note=MANY_NOTE,
        size=MANY * SMALL,
        files=MANY,
        base=STAGE,
        candidates=[*_of_the_hub(out, peers, endpoint, "bench/many"), *_present(peers, system)],
        targets=_targets,
        writes=out,
        seeds={"many.yaml": manifest, **lists},
        skipped=peers.missing("aria2c", "curl"),
    )


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
    manifest = str(out / f"{repository.rpartition('/')[2]}.yaml")
    stage = (sys.executable, "-m", "stage", "fetch", "-q", manifest, "-o", str(out / "bundle"))
    local = ("--local-dir", str(out / "hf"))
    hf = Step((peers.command("hf"), "download", repository, *local), HF)
    hf_verify = Step((peers.command("hf"), "cache", "verify", repository, *local), HF_VERIFIED)
    # Its watchdog against stalls polls every 30 s, so that the end is seen late: switched off.
    mirror = (peers.command("model-mirror"), "mirror", "--stall-timeout", "0", repository)
    return [
        Candidate.single(STAGE, *stage, "--no-offline-check", PYTHONPATH=str(ROOT), **common),
        Candidate.single(STAGE_LOADED, *stage, PYTHONPATH=str(ROOT), **common),
        Candidate((hf, hf_verify), peer),
        Candidate.single(MIRROR, *mirror, **peer),
    ]


def _present(peers: Peers, system: Mapping[str, Sequence[Candidate]]) -> list[Candidate]:
    return [
        one for tool, candidates in system.items() if not peers.missing(tool) for one in candidates
    ]


def _memory(rounds: Rounds) -> list[Target]:
    targets = []
    for name in (STAGE, STAGE_LOADED):
        peak = median_of(rounds, name, lambda sample: sample.peak) / MIB
        targets.append(Target(f"peak memory of `{name}`, MiB", peak, 200, at_most=True))
    return targets


def _targets(rounds: Rounds) -> list[Target]:
    hf = median_ratio(rounds, HF_VERIFIED, STAGE)
    targets = [Target("times as fast as `hf download` + `hf cache verify`", hf, 2)]
    if ARIA2 in rounds[0]:
        aria2 = median_ratio(rounds, ARIA2, STAGE)
        targets.append(Target("times as fast as `aria2c`", aria2, 1))
    return [*targets, *_memory(rounds)]
