"""Measures the verification of files in the page cache: four large files, many small ones.

All tools read the same bytes, the payload of a bundle. `sha256sum -c` and bagit.py verify the
bundle, which is a BagIt bag; model_signing a signature of its payload; model-mirror a mirror of
hard links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target, median_of, median_ratio
from scripts.lib.bench.measure import run
from scripts.lib.bench.options import ROOT
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import (
    MIB,
    Candidate,
    Workload,
    plain_environment,
    write_safetensors,
    write_small_files,
)

STAGE, STANDALONE = "stage verify", "stage-verify.py"
YARDSTICK, UNREAD = "hashlib.file_digest, one core", "hashlib, one core, from memory"
FLOOR = "openssl dgst, two processes"
BAGIT, SUMS = "bagit.py --processes 2", "sha256sum -c"
SIGNING, MIRROR = "model_signing verify", "model-mirror verify"
NOTE = (
    "Each tool reads the same files, which are in the page cache since they were made. `stage "
    "verify` also checks each file name, each file beside the payload, and the lock. "
)
LARGE_NOTE = NOTE + (
    "Each tool hashes a file on one core. The yardstick is Python's `hashlib.file_digest` of the "
    "same files, one after the other, on one core; the last row hashes as many bytes from 1 MiB of "
    "memory: the difference is the cost of reading."
)
SMALL_NOTE = NOTE + (
    "The last row is no verification: a C program hashes the same files, on two cores, and "
    "compares nothing; to open, read and hash so many files takes that long at least."
)
_HASH_FILES = (
    "import hashlib, sys\nfor path in sys.argv[1:]:\n"
    "    with open(path, 'rb') as f: hashlib.file_digest(f, 'sha256')"
)
_HASH = (
    "import hashlib, sys\nh, b = hashlib.sha256(), bytes(2**20)\n"
    "for _ in range(int(sys.argv[1])): h.update(b)"
)
# The state that `model-mirror mirror` would leave, written by its functions: twenty thousand files
# through a Hub take longer than all measurements (and so does its `write_checksums`, which writes a
# manifest per file).
_MIRROR_STATE = """\
import sys
from pathlib import Path
from model_mirror.checksums import checksum_row, iter_payload_files, write_manifest
from model_mirror.state import VerificationState, write_verification_state
root, name = Path(sys.argv[1]), sys.argv[2]
rows = [checksum_row(root, path) for path in iter_payload_files(root)]
write_manifest(root, {row["path"]: row for row in rows})
state = VerificationState(status="verified", repo_id=name, repo_type="model",
                          requested_revision="main", resolved_commit="0" * 40)
write_verification_state(root, state)
"""


@contextmanager
def verify_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """All workloads; each bundle is made when the context is entered."""
    payloads = folder / "payloads"
    for number in range(4):
        write_safetensors(payloads / f"four/part-{number}.safetensors", 1024 * MIB)
    write_small_files(payloads / "small", 20_000, 8192)
    large, small = 4096 * MIB, 20_000 * 8192
    four = _workload(folder, peers, "four", "Verifying 4 GiB in four files", LARGE_NOTE, large, 4)
    # Made last and measured first: reading the large files drives the small ones out of the cache.
    title = "Verifying 20,000 files of 8 KiB"
    yield [_workload(folder, peers, "small", title, SMALL_NOTE, small, 20_000), four]


def _workload(
    folder: Path, peers: Peers, name: str, title: str, note: str, size: int, files: int
) -> Workload:
    bundle = _make_bundle(folder, name)
    key = _sign(folder, peers, name, bundle)
    mirrors = _make_mirror(folder, peers, name, bundle)
    candidates = [
        Candidate.single(
            STAGE, sys.executable, "-m", "stage", "verify", "-q", str(bundle), PYTHONPATH=str(ROOT)
        ),
        Candidate.single(
            STANDALONE, sys.executable, str(bundle / "stage-verify.py"), "-q", str(bundle)
        ),
        Candidate.single(
            SUMS, "env", "-C", str(bundle), "sha256sum", "-c", "--quiet", "manifest-sha256.txt"
        ),
        Candidate.single(
            BAGIT,
            peers.command("bagit.py"),
            "--validate",
            "--quiet",
            "--processes",
            "2",
            str(bundle),
        ),
        Candidate.single(
            SIGNING, *_signing(peers, "verify", name, folder, bundle), "--public_key", f"{key}.pub"
        ),
        Candidate.single(
            MIRROR,
            peers.command("model-mirror"),
            "verify",
            "--offline",
            f"bench/{name}",
            MODEL_MIRROR_DIRECTORY=str(mirrors),
            HOME=str(mirrors),
        ),
    ]
    if name != "small":
        paths = sorted(str(path) for path in (bundle / "data").rglob("*") if path.is_file())
        candidates.append(Candidate.single(YARDSTICK, sys.executable, "-c", _HASH_FILES, *paths))
        candidates.append(Candidate.single(UNREAD, sys.executable, "-c", _HASH, str(size // MIB)))
    else:
        each = f"find {bundle}/data -type f -print0 | xargs -0 -P 2 -n 2000 openssl dgst -sha256 -r"
        candidates.append(Candidate.single(FLOOR, "sh", "-c", each))
    targets = _small_targets if name == "small" else _large_targets
    return Workload(f"verify-{name}", title, note, size, files, STAGE, candidates, targets)


def _make_bundle(folder: Path, name: str) -> Path:
    """A bundle of the payload, fetched from its folder, which is then deleted."""
    bundle, manifest = folder / "bundles" / name, folder / f"{name}.yaml"
    manifest.write_text(f"format: 1\nname: bench\nassets:\n  payload:\n    path: payloads/{name}\n")
    stage = [sys.executable, "-m", "stage", "fetch", "-q", "--no-offline-check"]
    stage += [str(manifest), "-o", str(bundle)]
    run(stage, {**plain_environment(), "PYTHONPATH": str(ROOT), "HOME": str(folder)}, folder)
    shutil.rmtree(folder / "payloads" / name)
    return bundle


def _sign(folder: Path, peers: Peers, name: str, bundle: Path) -> Path:
    key = folder / "key"
    if not key.exists():
        private = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout"]
        subprocess.run([*private, "-out", str(key)], check=True)
        public = ["openssl", "ec", "-in", str(key), "-pubout", "-out", f"{key}.pub"]
        subprocess.run(public, check=True, capture_output=True)
    signing = _signing(peers, "sign", name, folder, bundle)
    run([*signing, "--private_key", str(key)], plain_environment(), folder)
    return key


def _signing(peers: Peers, verb: str, name: str, folder: Path, bundle: Path) -> list[str]:
    signed = [verb, "key", str(bundle / "data"), "--signature", str(folder / f"{name}.sig")]
    return [peers.command("model_signing"), *signed]


def _make_mirror(folder: Path, peers: Peers, name: str, bundle: Path) -> Path:
    mirrors = folder / "mirrors"
    shutil.copytree(bundle / "data", mirrors / "models/bench" / name, copy_function=os.link)
    made = (str(mirrors / "models/bench" / name), f"bench/{name}")
    command = [peers.command("python"), "-c", _MIRROR_STATE, *made]
    run(command, plain_environment(), folder)
    return mirrors


def _large_targets(rounds: Rounds) -> list[Target]:
    share = median_ratio(rounds, YARDSTICK, STAGE) / _cores()
    return [
        Target(f"of {_cores()} cores x hashlib", share, 0.9),
        _no_slower_than_coreutils(rounds),
        _memory(rounds),
    ]


def _small_targets(rounds: Rounds) -> list[Target]:
    bagit = Target("times as fast as bagit.py", median_ratio(rounds, BAGIT, STAGE), 4)
    return [bagit, _no_slower_than_coreutils(rounds), _memory(rounds)]


def _no_slower_than_coreutils(rounds: Rounds) -> Target:
    return Target("times as fast as sha256sum -c", median_ratio(rounds, SUMS, STAGE), 1)


def _memory(rounds: Rounds) -> Target:
    peak = median_of(rounds, STAGE, lambda sample: sample.peak)
    return Target("peak memory of `stage verify`, MiB", peak / MIB, 200, at_most=True)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
