"""The inputs of `old/`: the file that is too large for git, and the two repositories of its Hub.

Do not change them: the digests in `old/` are those of these bytes.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

OLD = Path(__file__).parent / "old"
COMMIT = "791fc8c"
BUNDLE_ID = (OLD / "bundle-id").read_text().strip() if OLD.exists() else ""
LARGE = "data/files/large/large.bin"
LARGE_SIZE = (
    68 * 2**20 + 5
)  # bytes: above 64 MiB, so it has a block list; the last block is shorter
MODEL, DATASET = "acme/tiny-gpt2", "acme/speech"


def large_bytes() -> bytes:
    """The content of `large.bin`."""
    return hashlib.shake_128(b"airlift, tests/compat").digest(LARGE_SIZE)


def old_laptop(folder: Path) -> Path:
    """The folder of the old bundle's manifest, with its lock and the files beside them."""
    shutil.copytree(OLD / "laptop", folder)
    (folder / "large.bin").write_bytes(large_bytes())
    return folder


def old_bundle(folder: Path) -> Path:
    """The bundle as the old version made it, with the large file."""
    shutil.copytree(OLD / "bundle", folder)
    (folder / LARGE).parent.mkdir(parents=True, exist_ok=True)
    (folder / LARGE).write_bytes(large_bytes())
    return folder
