"""Checks the files beside the payload: which of them can be believed, and what they say there should be.

The tag manifest holds the digest of every file beside the payload, the lock that of every payload file, and both
manifests must be, byte for byte, the text their lock implies. Where a digest and a file disagree, a third witness
may tell which of the two is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stage import bundle as layout
from stage.digest import BLOCK_SIZE, BLOCKS_ABOVE, is_hex, sha256_of_bytes
from stage.disk import MAX_TEXT, read_file
from stage.errors import PolicyError, UsageError
from stage.findings import Found
from stage.lockskim import Skimmed, skim

if TYPE_CHECKING:
    from stage.lockfile import Lockfile

Payload = dict[str, tuple[int | None, str | None]]  # path -> size and sha256, as far as they are known

SMALL_TEXT = 2**20  # bytes
_SMALL = (layout.BAGIT, layout.BAG_INFO, layout.SIGNATURE)


def check_tags(root: Path, sizes: Mapping[str, int], found: Found) -> tuple[dict[str, bytes], dict[str, str] | None]:
    """Reads every file beside the payload and compares it with the tag manifest.

    Args:
        sizes: path -> bytes of the regular files that are not payload.

    Returns:
        Those that are sound, and what the tag manifest records; None if there is none.
    """
    texts: dict[str, bytes] = {}
    for path, size in sizes.items():
        if _is_tag_path(path) or path in layout.SEAL:
            most = SMALL_TEXT if path in _SMALL else MAX_TEXT
            if size > most:
                found.add(path, "invalid", f"at most {most} bytes", f"a larger file, of {size}")
                continue
            try:
                texts[path] = (root / path).read_bytes()
            except OSError as error:
                found.add(path, "unreadable", "a readable file", error.strerror or "an error")
    if layout.TAG_MANIFEST not in texts:
        if layout.TAG_MANIFEST not in found:
            found.add(
                layout.TAG_MANIFEST, "missing", "the file that ends a bundle", "nothing: the bundle is unfinished"
            )
        return {path: text for path, text in texts.items() if path in layout.TAG_FILES}, None
    manifest = texts.pop(layout.TAG_MANIFEST)
    texts.pop(layout.SIGNATURE, None)
    recorded = layout.parse_manifest(manifest)
    sound: dict[str, bytes] = {}
    for path, digest in recorded.items():
        if path not in texts:
            if path in layout.TAG_FILES:  # a block file that is missing is told by `verify`, by its right name
                found.add(path, "missing", f"sha256 {digest}", "nothing")
            continue
        actual = sha256_of_bytes(texts[path])
        if actual == digest:
            sound[path] = texts[path]
        elif _differ_little(actual, digest):
            sound[path] = texts[path]
            found.add(layout.TAG_MANIFEST, "mismatched", f"sha256 {actual} for {path}", digest)
        else:
            found.add(path, "mismatched", f"sha256 {digest} (recorded in {layout.TAG_MANIFEST})", f"sha256 {actual}")
            if _has_other_witness(path, texts):
                sound[path] = texts[path]
                found.blame_record(path, layout.TAG_MANIFEST)
    _check_tag_manifest_text(manifest, recorded, texts, found)
    unrecorded = {path: texts[path] for path in layout.TAG_FILES if path in texts and path not in recorded}
    return sound | unrecorded, recorded


def _has_other_witness(path: str, texts: Mapping[str, bytes]) -> bool:
    """Whether something beside the tag manifest says that a tag file is as it was."""
    if path == layout.BAGIT:
        return texts[path] == layout.BAGIT_TEXT
    if path == layout.LOCK:
        line = f"External-Identifier: sha256:{sha256_of_bytes(texts[path])}"
        return line.encode() in texts.get(layout.BAG_INFO, b"").split(b"\n")
    return False


def _check_tag_manifest_text(
    manifest: bytes, recorded: Mapping[str, str], texts: Mapping[str, bytes], found: Found
) -> None:
    """The tag manifest vouches for itself by being exactly the text its own lines imply, and by covering all."""
    uncovered = [path for path in layout.TAG_FILES if path in texts and path not in recorded]
    unknown = [path for path in recorded if not _is_tag_path(path)]
    if manifest != layout.manifest_text(recorded) or uncovered or unknown:
        detail = f"no sound line for {uncovered[0]}" if uncovered else "something else"
        found.add(layout.TAG_MANIFEST, "invalid", "one `<sha256>  <path>` line for each tag file, sorted", detail)


def _is_tag_path(path: str) -> bool:
    return path in layout.TAG_FILES or path.startswith(f"{layout.BLOCKS}/")


def _differ_little(one: str, other: str) -> bool:
    """Two sha256 that agree in nearly every digit are of the same bytes: then the record is what is damaged."""
    return sum(a != b for a, b in zip(one, other.lower(), strict=True)) <= 4


def claimed_payload(tags: Mapping[str, bytes]) -> tuple[Skimmed | None, Payload]:
    """What the lock says of the payload, before anybody checked whether it may be believed; and what was read of it."""
    text = tags.get(layout.LOCK)
    if text is None:
        return None, {}
    if (known := skim(text)) is not None:
        return known, {
            path: claim
            for files in known.lists
            for path, claim in zip(files.paths, zip(files.sizes, files.sha256, strict=True), strict=True)
        }
    from stage.lockreader import parse_lock

    try:
        entries = [
            (entry["path"], entry["size"], entry["sha256"])
            for asset in parse_lock(text, layout.LOCK)["assets"].values()
            for entry in asset["files"]
        ]
    except (KeyError, TypeError, AttributeError, UsageError):
        return None, {}
    return None, {
        path: (size, digest)
        for path, size, digest in entries
        if type(path) is str and type(size) is int and size >= 0 and type(digest) is str
    }


def read_sound_lock(root: Path, tags: Mapping[str, bytes], known: Skimmed | None, found: Found) -> Lockfile | None:
    """The lock, if it is sound. A sound lock of a newer format, or one this version cannot read, is an exception."""
    from stage.lockreader import read_lock  # by now others read: there is time to import it

    where = str(root / layout.LOCK)
    if layout.LOCK not in tags:
        if layout.LOCK not in found:
            found.add(layout.LOCK, "missing", "the lock", "nothing")
        return None
    try:
        lock = read_lock(tags[layout.LOCK], where, known)
    except (UsageError, PolicyError):
        if layout.TAG_MANIFEST in found:  # then nothing vouches for the lock, and its damage is a finding
            found.add(layout.LOCK, "invalid", "a lock", "something that cannot be read as one")
            return None
        raise
    return lock


def check_lock_text(lock: Lockfile, tags: Mapping[str, bytes], found: Found) -> None:
    """A lock can be written in one way only, or two bundle ids could mean the same bytes."""
    if not lock.is_complete or lock.to_json() != tags[layout.LOCK]:
        found.add(layout.LOCK, "invalid", "a complete lock in its one true text", "an edited or unfinished one")


def expected_payload(lock: Lockfile | None, tags: Mapping[str, bytes]) -> Payload:
    """Path -> (size, sha256) of every payload file: from the lock, else as much as the payload manifest knows."""
    if lock is not None:
        return {file.path: (file.size, file.sha256) for file in lock.files}
    manifest = layout.parse_manifest(tags.get(layout.MANIFEST, b""))
    return {path: (None, digest) for path, digest in manifest.items()}


def check_implied_texts(
    root: Path, lock: Lockfile, manifest: bytes | None, tags: Mapping[str, bytes], found: Found
) -> None:
    """`bagit.txt`, both manifests and the Payload-Oxum must say what the lock implies, whatever the digests say.

    Args:
        manifest: the payload's, as the lock implies it; None if it is not complete.
    """
    implied = {layout.BAGIT: layout.BAGIT_TEXT}
    if manifest is not None:
        implied[layout.MANIFEST] = manifest
        # One that could not be read is told already, and there is nobody to blame for it.
        with suppress(OSError):
            if layout.MANIFEST in found and read_file(root / layout.MANIFEST) == implied[layout.MANIFEST]:
                found.blame_record(layout.MANIFEST, layout.TAG_MANIFEST)
    for path, text in implied.items():
        if path in tags and tags[path] != text:
            found.add(path, "invalid", f"the text that {layout.LOCK} implies", "another")
    if layout.BAG_INFO in tags:
        lines = tags[layout.BAG_INFO].decode("utf-8", "replace").splitlines()
        for line in (f"Payload-Oxum: {layout.payload_oxum(lock)}", f"External-Identifier: sha256:{lock.id}"):
            label = line.partition(":")[0].lower()
            if [other for other in lines if other.lower().startswith(label)] != [line]:
                found.add(layout.BAG_INFO, "invalid", f"one line `{line}`", "none such, or others")
    for file in lock.files:
        if file.size <= BLOCKS_ABOVE:
            continue
        path = layout.blocks_path(file.sha256 or "")
        if path in tags and not block_digests(tags, file.sha256 or "", file.size):
            found.add(path, "invalid", "a sha256 a line, for each 16 MiB", "something else")
    for path in sorted(layout.tag_paths(lock) - set(tags)):
        if path not in found and (root / path).is_file():
            found.add(layout.TAG_MANIFEST, "invalid", "one line for each tag file", f"no sound line for {path}")


def block_digests(tags: Mapping[str, bytes], sha256: str, size: int) -> tuple[str, ...]:
    """The digests of a large file's blocks, in order; none if it has none that can be believed.

    Args:
        tags: the sound files beside the payload.
        sha256, size: of the whole file.
    """
    if size <= BLOCKS_ABOVE or (text := tags.get(layout.blocks_path(sha256))) is None:
        return ()
    digests = text.decode("ascii", "replace").splitlines()
    sound = len(digests) == -(-size // BLOCK_SIZE) and all(is_hex(digest, 64) for digest in digests)
    return tuple(digests) if sound else ()
