"""What a verification found, as data: findings, reports, and both to and from JSON.

`verify` makes them, the command line prints them, `--merge` adds shards of them up, `stage patch` reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stage.digest import is_hex
from stage.disk import MAX_NUMBER, read_file
from stage.errors import UsageError, as_shown
from stage.names import printable
from stage.stamp import Stamp
from stage.strictjson import loads

Ranges = tuple[tuple[int, int], ...]

PROBLEMS = ("missing", "extra", "mismatched", "unsafe", "unreadable", "invalid", "unloadable")
LEVELS = ("fast", "full", "deep")
_RANGES_SHOWN = 3


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        path: relative to the bundle.
        problem: `missing`, `extra`, `mismatched` (size or bytes), `unsafe` (a link or special file),
            `unreadable`, `invalid` (not the text it has to be), or `unloadable` (`--deep`: as fetched, and no loader
            takes it).
        expected, found: what was looked for and what is there, in words.
        ranges: for a file with block digests, the bad bytes: sorted, disjoint (start, end) offsets, end exclusive.
            Empty means: nothing is known of where in the file.
    """

    path: str
    problem: str
    expected: str
    found: str
    ranges: Ranges = ()

    def __str__(self) -> str:
        return as_shown(f"{printable(self.path)}: {self.problem}: expected {self.expected}, found {self.found}")

    def to_json(self) -> dict[str, Any]:
        """As in a report; `ranges` only where there are any."""
        document: dict[str, Any] = {
            "path": self.path,
            "problem": self.problem,
            "expected": self.expected,
            "found": self.found,
        }
        return {**document, "ranges": [list(r) for r in self.ranges]} if self.ranges else document


@dataclass(frozen=True, order=True)
class Shard:
    """Which part of a verification: the `number`-th of `count`, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class VerificationReport:
    """What a verification looked at and found. `ok` means: nothing. Two are equal that say the same of a bundle.

    Attributes:
        files, size: of the whole bundle, as the lock counts them.
        shard: None for a whole verification.
        seal: sha256 of the tag manifest of what was verified; None if it is missing. Tells whether shards belong
            together.
        began: when the first byte was read, in seconds since 1970; of one gone on with, the interrupted one's.
        stamp: of the payload files that were read; None unless all are sound and had been still for a while.
        renamed: (path it should have, path it has) of payload files whose bytes lie in the bundle under another name;
            both have findings, too. Known where every byte was read by one verification.
    """

    root: Path
    level: str
    bundle_id: str | None
    files: int
    size: int
    findings: tuple[Finding, ...] = field(default=())
    shard: Shard | None = None
    seal: str | None = None
    began: float | None = field(default=None, compare=False)
    stamp: Stamp | None = field(default=None, compare=False)
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the bundle is as it was made, as far as this level looks."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` and `--report` write it (format 1)."""
        document: dict[str, Any] = {
            "format": 1,
            "bundle": str(self.root),
            "bundle_id": self.bundle_id,
            "level": self.level,
            "ok": self.ok,
            "files": self.files,
            "bytes": self.size,
            "findings": [finding.to_json() for finding in self.findings],
        }
        if self.renamed:
            document["renamed"] = dict(self.renamed)
        if self.shard is None:
            return document
        stamp = self.stamp._asdict() if self.stamp else None
        return {**document, "shard": str(self.shard), "seal": self.seal, "began": self.began, "stamp": stamp}


class Found:
    """Collects findings; the first word on a path is kept, so that one fault is told once."""

    def __init__(self) -> None:
        self._by_path: dict[str, Finding] = {}

    def add(self, path: str, problem: str, expected: str, found: str) -> None:
        """Notes a finding unless there is one on that path."""
        self.add_finding(Finding(path, problem, expected, found))

    def add_finding(self, finding: Finding) -> None:
        """Notes a finding unless there is one on its path."""
        self._by_path.setdefault(finding.path, finding)

    def blame_record(self, path: str, record: str) -> None:
        """Moves the finding on `path` to the file that recorded its digest: `path` has another witness."""
        if (finding := self._by_path.get(path)) is not None and finding.problem == "mismatched":
            del self._by_path[path]
            self.add(record, "mismatched", f"{finding.found} for {path}", finding.expected)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def findings(self) -> list[Finding]:
        """All of them, in the order they were found."""
        return list(self._by_path.values())


def in_ranges(path: str, sha256: str, parts: Iterable[tuple[int, int, str]]) -> Finding:
    """The one finding on a file of which some parts are bad.

    Args:
        parts: (start, end, why) of each bad part; `why` is an operating system's word where it could not be read,
            else empty.
    """
    ordered = sorted(parts)
    ranges = joined((start, end) for start, end, _ in ordered)
    spans = ", ".join(f"{start}-{end}" for start, end in ranges[:_RANGES_SHOWN])
    if len(ranges) > _RANGES_SHOWN:
        spans += f" and {len(ranges) - _RANGES_SHOWN} more ranges"
    reasons = [why for _, _, why in ordered if why]
    if reasons:
        return Finding(path, "unreadable", f"sha256 {sha256}", f"{reasons[0]} at bytes {spans}", ranges)
    return Finding(path, "mismatched", f"sha256 {sha256}", f"other bytes at {spans}", ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same bytes in the fewest ranges."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return tuple(result)


def read_report(path: Path) -> VerificationReport:
    """Reads what `stage verify --report` wrote.

    Raises:
        UsageError: there is no such file, or it is no report of this format.
    """
    try:
        document = loads(read_file(path))
        if document["format"] != 1:
            raise UsageError(
                f"{path}: a report of format {document['format']!r}; this version reads format 1.",
                "Use a newer airlift: pip install --upgrade airlift",
            )
        return _from_json(document)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Give a file that `stage verify --report` wrote.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{path}: not a verification report.", "Give a file that `stage verify --report` wrote."
        ) from None


def _from_json(document: Any) -> VerificationReport:
    findings = tuple(_finding(value) for value in _typed(document["findings"], list))
    bundle_id, seal = document["bundle_id"], document.get("seal")
    if not all(value is None or is_hex(value, 64) for value in (bundle_id, seal)) or document["level"] not in LEVELS:
        raise ValueError
    report = VerificationReport(
        root=Path(_typed(document["bundle"], str)),
        level=document["level"],
        bundle_id=bundle_id,
        files=_typed(document["files"], int),
        size=_typed(document["bytes"], int),
        findings=findings,
        seal=seal,
        renamed=tuple((old, _typed(new, str)) for old, new in _typed(document.get("renamed", {}), dict).items()),
    )
    if "shard" not in document:
        return report
    number, count = (int(part) for part in _typed(document["shard"], str).split("/"))
    if not 1 <= number <= count:
        raise ValueError
    began, stamp = document.get("began"), document.get("stamp")
    return replace(
        report,
        shard=Shard(number, count),
        began=None if began is None else float(began),
        stamp=None if stamp is None else Stamp(**{key: _sum(value) for key, value in stamp.items()}),
    )


def _finding(value: Any) -> Finding:
    if value["problem"] not in PROBLEMS:
        raise ValueError
    ranges = tuple((_typed(start, int), _typed(end, int)) for start, end in value.get("ranges", []))
    if any(not 0 <= start < end for start, end in ranges):
        raise ValueError
    texts = [_typed(value[key], str) for key in ("path", "problem", "expected", "found")]
    return Finding(texts[0], texts[1], texts[2], texts[3], joined(ranges))


def _sum(value: Any) -> int:
    """A number of a stamp: sums of times and digests may be below zero and larger than any size."""
    if type(value) is not int or abs(value) >= 2**256:
        raise ValueError
    return value


def _typed(value: Any, type_: type) -> Any:
    if not isinstance(value, type_) or isinstance(value, bool):
        raise TypeError
    if isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
        raise ValueError
    return value
