"""Checks the files beside the payload: which are sound, and which payload they imply.

The tag manifest has the digest of every file beside the payload, the lock that of every payload
file, and both manifests must be, byte for byte, the text that the lock implies. A file that differs
from the tag manifest is a finding, and is not believed. Where that is the lock, the manifest says
what the payload is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stage.bundle import bundle as layout
from stage.bundle.report import FindingCollector
from stage.digests import sha256_of_bytes
from stage.errors import PolicyError, UsageError, require_damage
from stage.files import MAX_TEXT

if TYPE_CHECKING:
    from stage.lock.write import Lockfile

Payload = dict[
    str, tuple[int | None, str | None]
]  # path -> size and sha256, as far as they are known

SMALL_TEXT = 2**20  # bytes
_SMALL = (layout.BAGIT, layout.BAG_INFO, layout.SIGNATURE)


def check_tags(root: Path, sizes: Mapping[str, int], found: FindingCollector) -> dict[str, bytes]:
    """Reads every file beside the payload and compares it with the tag manifest.

    Args:
        sizes: path -> bytes of the regular files that are not payload.

    Returns:
        The sound ones.
    """
    texts = _read_tags(root, sizes, found)
    if layout.TAG_MANIFEST not in texts:
        if layout.TAG_MANIFEST not in found:
            found.add(
                layout.TAG_MANIFEST,
                "missing",
                "the file that ends a bundle",
                "nothing: the bundle is unfinished",
            )
        return {path: text for path, text in texts.items() if path in layout.TAG_FILES}
    manifest = texts.pop(layout.TAG_MANIFEST)
    texts.pop(layout.SIGNATURE, None)
    recorded = layout.parse_manifest(manifest)
    sound: dict[str, bytes] = {}
    for path, digest in recorded.items():
        if path not in texts:
            if path in layout.TAG_FILES:
                found.add(path, "missing", f"sha256 {digest}", "nothing")
            continue
        actual = sha256_of_bytes(texts[path])
        if actual == digest:
            sound[path] = texts[path]
        else:
            found.add(
                path,
                "mismatched",
                f"sha256 {digest} (recorded in {layout.TAG_MANIFEST})",
                f"sha256 {actual}",
            )
    _check_tag_manifest_text(manifest, recorded, texts, found)
    unrecorded = {
        path: texts[path] for path in layout.TAG_FILES if path in texts and path not in recorded
    }
    return sound | unrecorded


def _read_tags(root: Path, sizes: Mapping[str, int], found: FindingCollector) -> dict[str, bytes]:
    """The tag files that can be read. `sizes` and `found` are as for `check_tags`."""
    texts: dict[str, bytes] = {}
    for path, size in sizes.items():
        if path not in (*layout.TAG_FILES, *layout.SEAL):
            continue
        most = SMALL_TEXT if path in _SMALL else MAX_TEXT
        if size > most:
            found.add(path, "invalid", f"at most {most} bytes", f"a larger file, of {size}")
            continue
        try:
            texts[path] = (root / path).read_bytes()
        except OSError as error:
            require_damage(error)
            found.add(path, "unreadable", "a readable file", error.strerror or "an error")
    return texts


def _check_tag_manifest_text(
    manifest: bytes,
    recorded: Mapping[str, str],
    texts: Mapping[str, bytes],
    found: FindingCollector,
) -> None:
    """The tag manifest must be exactly the text that its lines imply, and cover all tag files."""
    uncovered = [path for path in layout.TAG_FILES if path in texts and path not in recorded]
    unknown = [path for path in recorded if path not in layout.TAG_FILES]
    if manifest != layout.manifest_text(recorded) or uncovered or unknown:
        detail = f"no sound line for {uncovered[0]}" if uncovered else "something else"
        found.add(
            layout.TAG_MANIFEST,
            "invalid",
            "one `<sha256>  <path>` line for each tag file, sorted",
            detail,
        )


def read_sound_lock(
    root: Path, tags: Mapping[str, bytes], found: FindingCollector
) -> Lockfile | None:
    """The lock; None where there is none that can be believed.

    Raises:
        UsageError: a sound lock of a newer format, or one that cannot be read.
        PolicyError: a sound lock with a path that may not be in a bundle.
    """
    from stage.lock.read import read_lock

    where = str(root / layout.LOCK)
    if layout.LOCK not in tags:
        if layout.LOCK not in found:
            found.add(layout.LOCK, "missing", "the lock", "nothing")
        return None
    try:
        lock = read_lock(tags[layout.LOCK], where)
    except (UsageError, PolicyError):
        if (
            layout.TAG_MANIFEST in found
        ):  # then nothing vouches for the lock, and its damage is a finding
            found.add(layout.LOCK, "invalid", "a lock", "something that cannot be read as one")
            return None
        raise
    return lock


def check_lock(lock: Lockfile, tags: Mapping[str, bytes], found: FindingCollector) -> None:
    """Checks the lock's text, and the other tag files against it.

    A lock can be written in one way only, or two bundle ids could be of the same bytes.
    """
    if not lock.is_complete or lock.id != sha256_of_bytes(tags[layout.LOCK]):
        found.add(
            layout.LOCK,
            "invalid",
            "a complete lock in its one true text",
            "an edited or unfinished one",
        )
    _check_implied_texts(lock, tags, found)


def expected_payload(lock: Lockfile | None, tags: Mapping[str, bytes]) -> Payload:
    """Path -> (size, sha256) of every payload file, from the lock; else from the manifest."""
    if lock is not None:
        return {file.path: (file.size, file.sha256) for file in lock.files}
    manifest = layout.parse_manifest(tags.get(layout.MANIFEST, b""))
    return {path: (None, digest) for path, digest in manifest.items()}


def _check_implied_texts(
    lock: Lockfile, tags: Mapping[str, bytes], found: FindingCollector
) -> None:
    """`bagit.txt`, the manifest and `bag-info.txt` must be what the lock implies."""
    implied = {layout.BAGIT: layout.BAGIT_TEXT}
    if lock.is_complete:
        implied[layout.MANIFEST] = layout.payload_manifest(lock)
    for path, text in implied.items():
        if path in tags and tags[path] != text:
            found.add(path, "invalid", f"the text that {layout.LOCK} implies", "another")
    if layout.BAG_INFO in tags:
        lines = tags[layout.BAG_INFO].decode("utf-8", "replace").splitlines()
        for line in (
            f"Payload-Oxum: {layout.payload_oxum(lock)}",
            f"External-Identifier: sha256:{lock.id}",
        ):
            label = line.partition(":")[0].lower()
            if [other for other in lines if other.lower().startswith(label)] != [line]:
                found.add(layout.BAG_INFO, "invalid", f"one line `{line}`", "none such, or others")


def unproven(tags: Mapping[str, bytes]) -> tuple[str, ...]:
    """The sound files beside the payload that the bundle id does not cover."""
    covered = {layout.BAGIT, layout.MANIFEST, layout.LOCK}
    return tuple(sorted(path for path in layout.TAG_FILES if path in tags and path not in covered))
