"""Compares a bundle with its lock: every byte accounted for. Findings are data, and all of them are found.

What vouches for what: `tagmanifest-sha256.txt` holds the digest of every file beside the payload, `stage.lock`
the digest of every payload file, and both manifests must be, byte for byte, the text their lock implies. A damaged
file is a `Finding`; being unable to look (no such folder, not a bundle) is an exception. Never touches the network.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage import bundle as layout
from stage.bundle import require_bundle
from stage.digest import hash_file, sha256_of_bytes
from stage.errors import PolicyError, UsageError, as_shown
from stage.lockfile import Lockfile
from stage.lockreader import read_lock
from stage.names import printable

LEVELS = ("fast", "full")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        path: relative to the bundle.
        problem: `missing`, `extra`, `mismatched` (size or bytes), `unsafe` (a link or special file),
            `unreadable`, or `invalid` (not the text it has to be).
        expected, found: what was looked for and what is there, in words.
    """

    path: str
    problem: str
    expected: str
    found: str

    def __str__(self) -> str:
        return as_shown(f"{printable(self.path)}: {self.problem}: expected {self.expected}, found {self.found}")


@dataclass(frozen=True)
class VerificationReport:
    """What a verification looked at and found. `ok` means: nothing."""

    root: Path
    level: str
    bundle_id: str | None
    files: int
    size: int
    findings: tuple[Finding, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether the bundle is as it was made, as far as this level looks."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` and `--report` write it (format 1)."""
        return {
            "format": 1,
            "bundle": str(self.root),
            "bundle_id": self.bundle_id,
            "level": self.level,
            "ok": self.ok,
            "files": self.files,
            "bytes": self.size,
            "findings": [
                {"path": f.path, "problem": f.problem, "expected": f.expected, "found": f.found} for f in self.findings
            ],
        }


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerificationReport:
    """Verifies a bundle.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: threads that read (default: one a core; hashing releases the GIL).
        progress: called with the number of payload bytes just read.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
    """
    require_bundle(root)
    found = _Found()
    entries = _scan(root, found)
    tags, recorded = _check_tags(root, entries, found)
    lock = _read_lock(root, tags, found)
    expected = _expected_payload(root, lock, tags)
    if lock is not None:
        _check_implied_texts(root, lock, tags, found)
    _check_names(entries, expected, lock, recorded, found)
    sound = _check_sizes(entries, expected, found)
    if level == "full":
        _check_bytes(root, sound, jobs or os.cpu_count() or 1, progress, found)
    return VerificationReport(
        root=root,
        level=level,
        bundle_id=lock.id if lock is not None else None,
        files=len(expected),
        size=sum(size or 0 for size, _ in expected.values()),
        findings=tuple(sorted(found.findings)),
    )


class _Found:
    """Collects findings; the first word on a path is kept, so that one fault is told once."""

    def __init__(self) -> None:
        self._by_path: dict[str, Finding] = {}

    def add(self, path: str, problem: str, expected: str, found: str) -> None:
        self._by_path.setdefault(path, Finding(path, problem, expected, found))

    def blame_record(self, path: str, record: str) -> None:
        """Moves the finding on `path` to the file that recorded its digest: `path` has another witness."""
        if (finding := self._by_path.get(path)) is not None and finding.problem == "mismatched":
            del self._by_path[path]
            self.add(record, "mismatched", f"{finding.found} for {path}", finding.expected)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def findings(self) -> list[Finding]:
        return list(self._by_path.values())


def _scan(root: Path, found: _Found) -> dict[str, int]:
    """Every regular file below `root`: relative path -> size. Links and special files are findings."""
    entries: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            inside = sorted(os.scandir(root / folder), key=lambda e: e.name)
        except OSError as error:
            found.add(folder, "unreadable", "a folder that can be listed", error.strerror or "an error")
            continue
        for entry in inside:
            path = f"{folder}/{entry.name}" if folder else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            elif stat.S_ISREG(status.st_mode):
                entries[path] = status.st_size
            else:
                found.add(path, "unsafe", "a regular file", _kind(status.st_mode, root / path))
    return entries


def _kind(mode: int, path: Path) -> str:
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {printable(str(path.readlink()))}"
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "something else")


def _check_tags(
    root: Path, entries: Mapping[str, int], found: _Found
) -> tuple[dict[str, bytes], dict[str, str] | None]:
    """Reads every file beside the payload and compares it with the tag manifest.

    Returns:
        Those that are sound, and what the tag manifest records; None if there is none.
    """
    texts: dict[str, bytes] = {}
    for path in entries:
        if _is_tag_path(path) or path in (layout.TAG_MANIFEST, layout.SIGNATURE):
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
            if path in layout.TAG_FILES:  # a block file that is missing is told by `_check_names`, by its right name
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
    manifest: bytes, recorded: Mapping[str, str], texts: Mapping[str, bytes], found: _Found
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


def _read_lock(root: Path, tags: Mapping[str, bytes], found: _Found) -> Lockfile | None:
    """The lock, if it is sound. A sound lock of a newer format, or one this version cannot read, is an exception."""
    where = str(root / layout.LOCK)
    if layout.LOCK not in tags:
        if layout.LOCK not in found:
            found.add(layout.LOCK, "missing", "the lock", "nothing")
        return None
    try:
        lock = read_lock(tags[layout.LOCK], where)
    except (UsageError, PolicyError):
        if layout.TAG_MANIFEST in found:  # then nothing vouches for the lock, and its damage is a finding
            found.add(layout.LOCK, "invalid", "a lock", "something that cannot be read as one")
            return None
        raise
    if not lock.is_complete or lock.to_json() != tags[layout.LOCK]:
        found.add(layout.LOCK, "invalid", "a complete lock in its one true text", "an edited or unfinished one")
    return lock


def _expected_payload(
    root: Path, lock: Lockfile | None, tags: Mapping[str, bytes]
) -> dict[str, tuple[int | None, str | None]]:
    """Path -> (size, sha256) of every payload file: from the lock, else as much as the payload manifest knows."""
    if lock is not None:
        return {file.path: (file.size, file.sha256) for file in lock.files}
    manifest = layout.parse_manifest(tags.get(layout.MANIFEST, b""))
    return {path: (None, digest) for path, digest in manifest.items()}


def _check_implied_texts(root: Path, lock: Lockfile, tags: Mapping[str, bytes], found: _Found) -> None:
    """`bagit.txt`, both manifests and the Payload-Oxum must say what the lock implies, whatever the digests say."""
    implied = {layout.BAGIT: layout.BAGIT_TEXT}
    if lock.is_complete:
        implied[layout.MANIFEST] = layout.payload_manifest(lock)
        if (root / layout.MANIFEST).is_file() and (root / layout.MANIFEST).read_bytes() == implied[layout.MANIFEST]:
            found.blame_record(layout.MANIFEST, layout.TAG_MANIFEST)
    for path, text in implied.items():
        if path in tags and tags[path] != text:
            found.add(path, "invalid", f"the text that {layout.LOCK} implies", "another")
    if layout.BAG_INFO in tags:
        lines = tags[layout.BAG_INFO].decode("utf-8", "replace").splitlines()
        for line in (f"Payload-Oxum: {layout.payload_oxum(lock)}", f"External-Identifier: sha256:{lock.id}"):
            if line not in lines:
                found.add(layout.BAG_INFO, "invalid", f"the line `{line}`", "none such")
    for path in layout.tag_paths(lock) - set(tags):
        if path not in found and (root / path).is_file():
            found.add(layout.TAG_MANIFEST, "invalid", "one line for each tag file", f"no sound line for {path}")


def _check_names(
    entries: Mapping[str, int],
    expected: Mapping[str, object],
    lock: Lockfile | None,
    recorded: Mapping[str, str] | None,
    found: _Found,
) -> None:
    """What is there and should not be, what should be there and is not."""
    blocks = {path for path in (entries if recorded is None else recorded) if path.startswith(f"{layout.BLOCKS}/")}
    tags = {*layout.TAG_FILES, layout.TAG_MANIFEST, layout.SIGNATURE}
    tags |= layout.tag_paths(lock) if lock is not None else blocks
    knows_payload = lock is not None or bool(expected)
    for path in entries:
        in_payload = path.startswith(f"{layout.PAYLOAD}/")
        if path not in (expected if in_payload else tags) and (knows_payload or not in_payload):
            found.add(path, "extra", "nothing of that name", "a file")
    required = {*expected, *(tags - {layout.SIGNATURE, layout.BOM})}
    for path in required:
        if path not in entries:
            found.add(path, "missing", "a file", "nothing")


def _check_sizes(
    entries: Mapping[str, int], expected: Mapping[str, tuple[int | None, str | None]], found: _Found
) -> list[tuple[str, int, str]]:
    """Compares sizes; returns (path, size, sha256) of those files that are worth reading."""
    sound = []
    for path, (size, digest) in expected.items():
        if path not in entries:
            continue
        if size is not None and entries[path] != size:
            found.add(path, "mismatched", f"{size} bytes", f"{entries[path]} bytes")
        elif digest is not None:
            sound.append((path, entries[path], digest))
    return sound


def _check_bytes(
    root: Path,
    files: list[tuple[str, int, str]],
    jobs: int,
    progress: Callable[[int], None] | None,
    found: _Found,
) -> None:
    """Reads every file, the largest first so that no thread ends up alone with a big one."""

    def check(file: tuple[str, int, str]) -> Finding | None:
        path, size, digest = file
        try:
            actual = hash_file(root / path, progress=progress)
        except OSError as error:
            return Finding(path, "unreadable", f"sha256 {digest}", error.strerror or "an error")
        if actual.size != size:
            return Finding(path, "mismatched", f"{size} bytes", f"{actual.size} bytes when read")
        if actual.sha256 != digest:
            return Finding(path, "mismatched", f"sha256 {digest}", f"sha256 {actual.sha256}")
        return None

    files = sorted(files, key=lambda file: (-file[1], file[0]))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for finding in pool.map(check, files):
            if finding is not None:
                found.add(finding.path, finding.problem, finding.expected, finding.found)
