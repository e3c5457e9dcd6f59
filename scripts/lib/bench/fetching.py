"""What it costs to bring files from a Hub: one large one, and many small ones.

The Hub is `scripts.lib.loopback_hub` in a process of its own: Python that answers and lets the kernel send (sendfile).
What it costs is taken from the same cores for every candidate alike.
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
from scripts.lib.bench.payload import MIB, write_safetensors, write_small_files
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import Candidate, Step, Workload
from stage.digest import hash_file

ROOT = Path(__file__).resolve().parents[3]
LARGE, MANY = 2048 * MIB, 500
SMALL = 8192
STAGE, STAGE_LOADED = "stage fetch --no-offline-check", "stage fetch"
HF, HF_VERIFIED = "hf download", "hf download + hf cache verify"
ARIA2, ARIA2_VERIFIED = "aria2c", "aria2c --checksum"
MIRROR, CURL = "model-mirror mirror", "curl"
NOTE = (
    "`stage fetch` resolves, downloads, hashes, compares with the Hub's digests, writes block digests and tag files, "
    "and syncs everything to the disk; without `--no-offline-check` it also tries to load what came, which no other "
    "tool here does. `hf cache verify` and `model-mirror mirror` compare with the Hub's digests too; "
)
LARGE_NOTE = NOTE + (
    "`aria2c` (8 connections) and `curl` (one) bring bytes and compare nothing, `aria2c --checksum` compares with a "
    "sha256 it is given. `model-mirror` and `aria2c` wait for the disk too (fsync); `hf` and `curl` do not."
)
MANY_NOTE = NOTE + "`aria2c -j8` and `curl --parallel-max 8` bring bytes and compare nothing."


@contextmanager
def fetch_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """Both workloads, and the Hub they need for as long as the context lasts."""
    served = folder / "served"
    weights = served / "models/bench/large/model.safetensors"
    write_safetensors(weights, LARGE)
    sha256 = hash_file(weights).sha256
    (served / "models/bench/large/config.json").write_text('{"model_type": "bert"}\n')
    (served / "models/bench/large/tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}\n')
    (served / "models/bench/large/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwill\nit\nload\n?\n")
    small = write_small_files(served / "models/bench/many", MANY, SMALL)
    with _hub(served, folder) as endpoint:
        yield [_large(folder, peers, endpoint, sha256), _many(folder, peers, endpoint, small)]


@contextmanager
def _hub(served: Path, folder: Path) -> Iterator[str]:
    """Serves; what was served from is deleted, since the Hub has a copy. Yields the endpoint."""
    copies = folder / "hub"
    copies.mkdir()
    environment = {**os.environ, "TMPDIR": str(copies), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scripts.lib.loopback_hub", str(served)]
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
    aria2 = ("aria2c", "-q", "-x8", "-s8", "-k1M", "--file-allocation=none", "-d", str(out), "-o", "file", url)
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
        seeds={"large.yaml": "format: 1\nname: bench\nassets:\n  payload:\n    model: bench/large\n"},
        skipped=peers.missing("aria2c", "curl"),
    )


def _many(folder: Path, peers: Peers, endpoint: str, paths: Sequence[str]) -> Workload:
    out = folder / "out"
    urls = [f"{endpoint}/bench/many/resolve/main/{path}" for path in paths]
    names = [path.replace("/", "-") for path in paths]
    aria2_list = "".join(f"{url}\n  out={name}\n" for url, name in zip(urls, names, strict=True))
    curl_list = "".join(f'url = "{url}"\noutput = "{out / name}"\n' for url, name in zip(urls, names, strict=True))
    lists = {"aria2.txt": aria2_list, "curl.txt": curl_list}
    aria2 = ("aria2c", "-q", "-j8", "--file-allocation=none", "-d", str(out), "-i", str(out / "aria2.txt"))
    curl = ("curl", "-sSfL", "--parallel", "--parallel-max", "8", "-K", str(out / "curl.txt"))
    system = {"aria2c": [Candidate.single(ARIA2, *aria2)], "curl": [Candidate.single(CURL, *curl)]}
    manifest = 'format: 1\nname: bench\nassets:\n  payload:\n    model: bench/many\n    include: ["*.txt"]\n'
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
    """The tools that know what a Hub is."""
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
    # Its watchdog against stalls looks every 30 s whether the download has ended: without it, it ends when it ends.
    mirror = (peers.command("model-mirror"), "mirror", "--stall-timeout", "0", repository)
    return [
        Candidate.single(STAGE, *stage, "--no-offline-check", PYTHONPATH=str(ROOT), **common),
        Candidate.single(STAGE_LOADED, *stage, PYTHONPATH=str(ROOT), **common),
        Candidate((hf, hf_verify), peer),
        Candidate.single(MIRROR, *mirror, **peer),
    ]


def _present(peers: Peers, system: Mapping[str, Sequence[Candidate]]) -> list[Candidate]:
    return [one for tool, candidates in system.items() if not peers.missing(tool) for one in candidates]


def _memory(rounds: Rounds) -> list[Target]:
    peaks = {name: median_of(rounds, name, lambda sample: sample.peak) / MIB for name in (STAGE, STAGE_LOADED)}
    return [Target(f"peak memory of `{name}`, MiB", peak, 200, at_most=True) for name, peak in peaks.items()]


def _targets(rounds: Rounds) -> list[Target]:
    hf = Target("times as fast as `hf download` + `hf cache verify`", median_ratio(rounds, HF_VERIFIED, STAGE), 2)
    aria2 = [Target("times as fast as `aria2c`", median_ratio(rounds, ARIA2, STAGE), 1)] if ARIA2 in rounds[0] else []
    return [hf, *aria2, *_memory(rounds)]
