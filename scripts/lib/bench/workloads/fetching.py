"""Measures how long a fetch from a Hub takes: of one large file, and of many small ones.

The Hub is on loopback, in this process, which waits meanwhile. It lets the kernel send (sendfile).
It takes time of the same cores from each candidate.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.workload import (
    MIB,
    ROOT,
    Candidate,
    Workload,
    tool,
    write_safetensors,
    write_small_files,
)
from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.files import hash_file

LARGE, MANY = 2048 * MIB, 500
SMALL = 8192
NOTE = (
    "`stage fetch` resolves, downloads, hashes, compares with the Hub's digests, writes tag "
    "files, and syncs everything to the disk; without `--no-offline-check` it also "
    "loads the model, which no other tool here does. `hf cache verify` compares with the Hub's "
    "digests too; `aria2c` (8 connections) and `curl` compare nothing, `aria2c --checksum` "
    "compares with a given sha256. `aria2c` waits for the disk too (fsync); `hf` and `curl` do "
    "not. Wanted: `hf download` + `hf cache verify` at least 2, `aria2c` at least 1; at most 200 "
    "MiB."
)


@contextmanager
def fetch_workloads(folder: Path) -> Iterator[list[Workload]]:
    """Both workloads, with a Hub that runs as long as the context."""
    large, many = folder / "large", folder / "many"
    write_safetensors(large / "model.safetensors", LARGE)
    sha256 = hash_file(large / "model.safetensors").sha256
    vocabulary = "[PAD] [UNK] [CLS] [SEP] [MASK] will it load ?"
    (large / "config.json").write_text('{"model_type": "bert"}\n')
    (large / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}\n')
    (large / "vocab.txt").write_text(vocabulary.replace(" ", "\n") + "\n")
    paths = write_small_files(many, MANY, SMALL)
    with LoopbackHub(folder / "hub") as hub:
        for name in (large, many):
            hub.repositories.commit("models", f"bench/{name.name}", name)
            shutil.rmtree(name)  # the Hub has a copy
        yield [_large(folder, hub.endpoint, sha256), _many(folder, hub.endpoint, paths)]


def _large(folder: Path, endpoint: str, sha256: str) -> Workload:
    out, url = folder / "out", f"{endpoint}/bench/large/resolve/main/model.safetensors"
    aria2 = ["aria2c", "-q", "-x8", "-s8", "-k1M", "--file-allocation=none"]
    aria2 += ["-d", str(out), "-o", "file", url]
    return Workload(
        title="Fetching one file of 2 GiB",
        note=NOTE,
        size=LARGE,
        candidates=[
            *_of_the_hub(out, endpoint, "bench/large"),
            Candidate("aria2c", aria2),
            Candidate("aria2c --checksum", [*aria2, f"--checksum=sha-256={sha256}"]),
            Candidate("curl", ["curl", "-sSfL", "-o", str(out / "file"), url]),
        ],
        writes=out,
        seeds={"large.yaml": _manifest("    model: bench/large\n")},
    )


def _many(folder: Path, endpoint: str, paths: list[str]) -> Workload:
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
            *_of_the_hub(out, endpoint, "bench/many"),
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


def _of_the_hub(out: Path, endpoint: str, repository: str) -> list[Candidate]:
    """The tools that can download from a Hub."""
    common = {"HF_ENDPOINT": endpoint, "HF_HOME": str(out / "hf-home"), "HOME": str(out)}
    peer = {
        **common,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    ours = {"PYTHONPATH": str(ROOT), **common}
    manifest = str(out / f"{repository.rpartition('/')[2]}.yaml")
    stage = (sys.executable, "-m", "stage", "fetch", "-q", manifest, "-o", str(out / "bundle"))
    local = (repository, "--local-dir", str(out / "hf"))
    hf = (tool("hf"), "download", *local)
    verified = f"{shlex.join(hf)} && {shlex.join((tool('hf'), 'cache', 'verify', *local))}"
    return [
        Candidate("stage fetch --no-offline-check", (*stage, "--no-offline-check"), ours),
        Candidate("stage fetch", stage, ours),
        Candidate("hf download", hf, peer),
        Candidate("hf download + hf cache verify", ("sh", "-c", verified), peer),
    ]
