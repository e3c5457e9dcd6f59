"""The layout of a bundle on disk: a BagIt 1.0 bag (RFC 8493) with a lock in it; finds a named asset.

This room owns every file name of a bundle and the texts of the files round the payload. Writing: payload first,
then the tag files, `tagmanifest-sha256.txt` last, so its presence means the bundle is finished. Reading:
`Bundle.open` for whoever uses what is inside; `verify` for whoever doubts it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stage.digest import BLOCKS_ABOVE, sha256_of_bytes
from stage.disk import read_file, sync_folder, write_atomically
from stage.errors import DamageError, UsageError

if TYPE_CHECKING:
    from stage.asset import LockedAsset
    from stage.lockfile import Lockfile

BAGIT = "bagit.txt"
BAG_INFO = "bag-info.txt"
MANIFEST = "manifest-sha256.txt"
TAG_MANIFEST = "tagmanifest-sha256.txt"
SIGNATURE = "tagmanifest-sha256.txt.sig"
REQUEST = "stage.yaml"
LOCK = "stage.lock"
BOM = "bom.cdx.json"  # bundles made before it was thought of have none
VERIFIER = "stage-verify.py"  # verifies the bundle it lies in, where there is nothing but an old Python
BLOCKS = "blocks"
PAYLOAD = "data"
JOURNAL = "fetch.partial"  # while `stage fetch` works: the payload paths it may have written
PATCH_PLAN = "patch.json"  # what makes a folder a patch

BAGIT_TEXT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
SEAL = (TAG_MANIFEST, SIGNATURE)  # the last to be written, the first to be taken off
TAG_FILES = (BAG_INFO, BAGIT, MANIFEST, LOCK, REQUEST, BOM, VERIFIER)


@dataclass(frozen=True)
class Bundle:
    """A finished bundle: where it lies and what its lock says."""

    root: Path
    lock: Lockfile
    id: str

    @staticmethod
    def open(root: Path | str) -> Bundle:
        """Opens a bundle for use, checking the lock against the tag manifest but not the payload.

        Raises:
            UsageError: not a bundle, unfinished, or of a newer format.
            DamageError: the lock is not the one the bundle was finished with.
        """
        from stage.lockreader import read_lock  # slow to import, and `stage verify` has to begin at once

        root = Path(root)
        require_bundle(root)
        if not (root / TAG_MANIFEST).is_file():
            raise UsageError(
                f"{root}: this bundle is unfinished: it has no {TAG_MANIFEST}.",
                "Run `stage fetch` again where it was made, or copy again: rsync had not ended.",
            )
        data = read_tag(root, LOCK)
        recorded = parse_manifest(read_tag(root, TAG_MANIFEST)).get(LOCK)
        if recorded != sha256_of_bytes(data):
            raise DamageError(
                f"{root / LOCK}: damaged: sha256 {sha256_of_bytes(data)}, {TAG_MANIFEST} says {recorded}.",
                f"Run `stage verify {root}` to see all that is damaged.",
            )
        return Bundle(root, read_lock(data, str(root / LOCK)), sha256_of_bytes(data))

    def asset(self, name: str) -> LockedAsset:
        """The asset of that name.

        Raises:
            UsageError: there is none; names the nearest and all there are.
        """
        if name in self.lock.assets:
            return self.lock.assets[name]
        import difflib

        nearest = difflib.get_close_matches(name, self.lock.assets, n=1)
        hint = f"Did you mean `{nearest[0]}`? " if nearest else ""
        raise UsageError(
            f"{self.root}: no asset named `{name}` in this bundle.", f"{hint}It has: {', '.join(self.lock.assets)}."
        )

    def asset_path(self, name: str) -> Path:
        """The folder of that asset: plain files, loadable with `from_pretrained(path)` if it is a model."""
        return self.root / self.asset(name).folder


def holds_bundle(folder: Path) -> bool:
    """Whether a folder is a bundle to all looks, finished or not."""
    return (folder / LOCK).is_file() and (folder / BAGIT).is_file()


def require_bundle(root: Path) -> None:
    """Says so if `root` does not even look like a bundle.

    Raises:
        UsageError: no such folder, or one without any of a bundle's files.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such folder.", "Check the path.")
    if not root.is_dir():
        raise UsageError(f"{root}: not a bundle: it is a file.", "Give the bundle's folder.")
    if (root / PATCH_PLAN).is_file() and not (root / LOCK).exists():
        raise UsageError(f"{root}: a patch, not a bundle.", f"Put it in place: stage apply BUNDLE {root}")
    if not any((root / name).exists() for name in (BAGIT, LOCK, TAG_MANIFEST, JOURNAL)):
        inside = sorted(p.parent for p in root.glob(f"*/{LOCK}"))
        hint = f"Did you mean {inside[0]}?" if inside else "Give the folder that `stage fetch -o` wrote."
        raise UsageError(f"{root}: not a bundle: it has neither {BAGIT} nor {LOCK}.", hint)


def read_tag(root: Path, name: str) -> bytes:
    """A file beside the payload.

    Raises:
        DamageError: it is missing or unreadable.
    """
    try:
        return read_file(root / name, follow=False)
    except OSError as error:
        problem = "missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
        raise DamageError(
            f"{root / name}: {problem}.", f"Run `stage verify {root}` to see all that is damaged."
        ) from None


def manifest_text(digests: Mapping[str, str]) -> bytes:
    """A BagIt manifest (RFC 8493, 2.1.3) that `sha256sum -c` reads too: `<sha256>  <path>` lines, sorted by path."""
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode()


def parse_manifest(data: bytes) -> dict[str, str]:
    """Path -> sha256 of the well-formed lines of a manifest. What is malformed is left to `verify` to report."""
    result: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        digest, separator, path = line.partition("  ")
        if separator and len(digest) == 64:
            result[path] = digest
    return result


def payload_manifest(lock: Lockfile) -> bytes:
    """The text of `manifest-sha256.txt` for a complete lock."""
    return "".join(f"{file.sha256 or ''}  {file.path}\n" for file in lock.files).encode()


def payload_oxum(lock: Lockfile) -> str:
    """BagIt's O(1) check: `<payload bytes>.<payload files>` (RFC 8493, 2.2.2)."""
    return f"{lock.size}.{len(lock.files)}"


def announced_size(root: Path) -> int:
    """Payload bytes as `bag-info.txt` has them, for a display of progress; 0 where that cannot be read."""
    try:
        text = read_file(root / BAG_INFO, most=2**20).decode("utf-8", "replace")
    except OSError:
        return 0
    found = re.search(r"^Payload-Oxum: (\d{1,18})\.", text, re.MULTILINE)
    return int(found[1]) if found else 0


def blocks_path(sha256: str) -> str:
    """Where the block digests of a large file lie."""
    return f"{BLOCKS}/{sha256}"


def tag_paths(lock: Lockfile) -> set[str]:
    """Every file beside the payload that the tag manifest covers."""
    large = {blocks_path(f.sha256) for f in lock.files if f.sha256 and f.size > BLOCKS_ABOVE}
    return {*TAG_FILES, *large}


def bag_info_text(lock: Lockfile, facts: Iterable[tuple[str, str]]) -> bytes:
    """`bag-info.txt`: the one place for what differs from fetch to fetch.

    Args:
        facts: label and value of what is true of this fetch (date, host, endpoint, tool).
    """
    lines = [*facts, ("External-Identifier", f"sha256:{lock.id}"), ("Payload-Oxum", payload_oxum(lock))]
    return "".join(f"{label}: {' '.join(value.split())}\n" for label, value in sorted(lines)).encode()


def write_blocks(root: Path, sha256: str, blocks: Iterable[str]) -> None:
    """Writes the block digests of a large file, one hex sha256 a line."""
    path = root / blocks_path(sha256)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(f"{block}\n" for block in blocks).encode())


def verifier_text() -> bytes:
    """The text of `stage-verify.py`."""
    from importlib import resources

    return resources.files("stage").joinpath(f"templates/{VERIFIER}").read_bytes()


def finish(root: Path, lock: Lockfile, request: bytes, facts: Iterable[tuple[str, str]]) -> Bundle:
    """Writes everything beside the payload; the tag manifest last. The payload and `blocks/` are in place already: of
    them only the names may not be on the disk yet.

    Args:
        request: the manifest's text, which travels as `stage.yaml`.
        facts: for `bag_info_text`.
    """
    if not lock.is_complete:
        raise AssertionError("a bundle is finished only with a complete lock")
    from stage.bom import bom_text

    (root / PAYLOAD).mkdir(exist_ok=True)
    for folder, _, _ in os.walk(root / PAYLOAD):
        sync_folder(Path(folder))
    texts = {
        BAGIT: BAGIT_TEXT,
        BAG_INFO: bag_info_text(lock, facts),
        MANIFEST: payload_manifest(lock),
        LOCK: lock.to_json(),
        REQUEST: request,
        BOM: bom_text(lock),
        VERIFIER: verifier_text(),
    }
    for name, text in texts.items():
        write_atomically(root / name, text)
    digests = {name: sha256_of_bytes(text) for name, text in texts.items()}
    for name in tag_paths(lock) - set(texts):
        digests[name] = sha256_of_bytes((root / name).read_bytes())
    write_atomically(root / TAG_MANIFEST, manifest_text(digests))
    (root / JOURNAL).unlink(missing_ok=True)
    sync_folder(root)
    return Bundle(root, lock, lock.id)
