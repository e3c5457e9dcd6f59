"""Measures the verification of files in the page cache: four large files, many small ones.

`sha256sum -c` and bagit.py read the same bytes: a bundle is a BagIt bag.
"""

from __future__ import annotations

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
    fetched,
    tool,
    write_safetensors,
    write_small_files,
)

NOTE = (
    "Each tool reads the same files, which are in the page cache since they were made. `stage "
    "verify` also checks each file name, each file beside the payload, and the lock. "
)
LARGE_NOTE = NOTE + (
    "Each tool hashes a file on one core. The yardstick is Python's `hashlib.file_digest` of the "
    "same files, one after the other, on one core; the last row hashes as many bytes from 1 MiB of "
    "memory: the difference is the cost of reading. Wanted: the yardstick at least 0.9 of the "
    "number of cores, `sha256sum -c` at least 1; at most 200 MiB."
)
SMALL_NOTE = NOTE + (
    "The last row is no verification: a C program hashes the same files, on two cores, and "
    "compares nothing; to open, read and hash so many files takes that long at least. Wanted: "
    "bagit.py at least 4, `sha256sum -c` at least 1; at most 200 MiB."
)
_HASH_FILES = (
    "import hashlib, sys\nfor path in sys.argv[1:]:\n"
    "    with open(path, 'rb') as f: hashlib.file_digest(f, 'sha256')"
)
_HASH = (
    "import hashlib, sys\nh, b = hashlib.sha256(), bytes(2**20)\n"
    "for _ in range(int(sys.argv[1])): h.update(b)"
)


@contextmanager
def verify_workloads(folder: Path) -> Iterator[list[Workload]]:
    """Both workloads; each bundle is made when the context is entered."""
    payloads = folder / "payloads"
    for number in range(4):
        write_safetensors(payloads / f"four/part-{number}.safetensors", 1024 * MIB)
    write_small_files(payloads / "small", 20_000, 8192)
    four = _candidates(folder, "four")
    paths = sorted(str(path) for path in (folder / "bundles/four/data").rglob("*.safetensors"))
    one_by_one = [
        Candidate("hashlib.file_digest, one core", (sys.executable, "-c", _HASH_FILES, *paths)),
        Candidate("hashlib, one core, from memory", (sys.executable, "-c", _HASH, "4096")),
    ]
    # Made last and measured first: reading the large files drives the small ones out of the cache.
    small = _candidates(folder, "small")
    each = "find bundles/small/data -type f -print0 | xargs -0 -P 2 -n 2000 openssl dgst -sha256 -r"
    floor = Candidate("openssl dgst, two processes", ("sh", "-c", each))
    yield [
        Workload("Verifying 20,000 files of 8 KiB", SMALL_NOTE, 20_000 * 8192, [*small, floor]),
        Workload("Verifying 4 GiB in four files", LARGE_NOTE, 4096 * MIB, [*four, *one_by_one]),
    ]


def _candidates(folder: Path, name: str) -> list[Candidate]:
    """The bundle of a payload, and who verifies it."""
    bundle = fetched(folder, name, f"payloads/{name}")
    shutil.rmtree(folder / "payloads" / name)
    bagit = (tool("bagit.py"), "--validate", "--quiet", "--processes", "2", str(bundle))
    sums = ("env", "-C", str(bundle), "sha256sum", "-c", "--quiet", "manifest-sha256.txt")
    return [
        Candidate(
            "stage verify",
            (sys.executable, "-m", "stage", "verify", "-q", str(bundle)),
            {"PYTHONPATH": str(ROOT)},
        ),
        Candidate(
            "stage-verify.py", (sys.executable, f"{bundle}/stage-verify.py", "-q", str(bundle))
        ),
        Candidate("sha256sum -c", sums),
        Candidate("bagit.py --processes 2", bagit),
    ]
