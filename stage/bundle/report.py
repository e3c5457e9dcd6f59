"""The result of a verification, as data: findings and reports, to and from JSON.

`verify` makes them, the command line prints them, and `stage patch` reads them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stage.bundle.bundle import LOCK
from stage.bundle.stamp import Stamp
from stage.errors import (
    DamageError,
    IncompleteError,
    StageError,
    UsageError,
    as_shown,
    suggest_path,
)
from stage.files import read_file
from stage.lock.fields import Fields, read_document
from stage.paths import printable

PROBLEMS = ("missing", "extra", "mismatched", "unsafe", "unreadable", "invalid", "unloadable")
LEVELS = ("fast", "full", "deep")
BY_ID = "bundle id"
"""What a payload that was read is compared with."""

ASKED_FOR = "bundle id "  # of the finding that a bundle is another one
_REMEDY = "Give a file that `stage verify --report` wrote."


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        path: relative to the bundle.
        problem: `missing`, `extra`, `mismatched` (size or bytes), `unsafe` (a link or special
            file), `unreadable`, `invalid` (not the text it has to be), or `unloadable` (`--deep`:
            as fetched, but no loader takes it).
        expected, found: text for a person.
    """

    path: str
    problem: str
    expected: str
    found: str

    def __str__(self) -> str:
        return as_shown(
            f"{printable(self.path)}: {self.problem}: expected {self.expected}, found {self.found}"
        )

    def to_json(self) -> dict[str, Any]:
        """As in a report."""
        return asdict(self)


def is_closed(finding: Finding) -> bool:
    """Whether only a right to read is missing: nothing is known to be wrong with the bytes."""
    return finding.problem == "unreadable" and finding.found == os.strerror(errno.EACCES)


@dataclass(frozen=True)
class VerificationReport:
    """The scope and the findings of a verification. `ok`: there are none.

    Attributes:
        files, size: of the whole bundle, as the lock counts them.
        seal: sha256 of the tag manifest; None if it is missing. Not in the JSON.
        began: when the first byte was read, in seconds since 1970; also of a resumed verification.
            Not in the JSON.
        stamp: of the payload files that were read; None unless all are sound and none was changed
            just before. Not in the JSON.
        proof: what the payload was compared with, `BY_ID`; None: with nothing.
        unproven: files beside the payload that the bundle id does not cover: only the tag manifest
            vouches for them, and a signature for that.
        has_unknown_verifier: this version does not know its `stage-verify.py`. Not in the JSON.
    """

    root: Path
    level: str
    bundle_id: str | None
    files: int
    size: int
    findings: tuple[Finding, ...] = field(default=())
    seal: str | None = None
    began: float | None = field(default=None, compare=False)
    stamp: Stamp | None = field(default=None, compare=False)
    proof: str | None = None
    unproven: tuple[str, ...] = ()
    has_unknown_verifier: bool = field(default=False, compare=False)

    @property
    def is_another(self) -> bool:
        """Whether it is another bundle than the one that was asked for by its id."""
        return any(
            finding.path == LOCK and finding.expected.startswith(ASKED_FOR)
            for finding in self.findings
        )

    @property
    def ok(self) -> bool:
        """Whether the bundle is as it was made, as far as this level looks."""
        return not self.findings

    @property
    def failure(self) -> type[StageError]:
        """The error of a report with findings: where only rights to read are missing, no damage."""
        return IncompleteError if all(map(is_closed, self.findings)) else DamageError

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
            "findings": [finding.to_json() for finding in self.findings],
            "proof": {"payload": self.proof, "unproven": list(self.unproven)},
        }


class FindingCollector:
    """Collects findings; only the first on a path is kept, so that one fault is reported once."""

    def __init__(self) -> None:
        self._by_path: dict[str, Finding] = {}

    def add(self, path: str, problem: str, expected: str, found: str) -> None:
        """Notes a finding unless there is one on that path."""
        self.add_finding(Finding(path, problem, expected, found))

    def add_finding(self, finding: Finding) -> None:
        """Notes a finding unless there is one on its path."""
        self._by_path.setdefault(finding.path, finding)

    def add_all(self, findings: Iterable[Finding]) -> None:
        """Notes several findings."""
        for finding in findings:
            self.add_finding(finding)

    def folder_above(self, path: str) -> Finding | None:
        """The finding on a folder around that path which cannot be listed."""
        found = (self._by_path.get(path[: slash.start()]) for slash in re.finditer("/", path))
        return next((above for above in found if above and above.problem == "unreadable"), None)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def findings(self) -> list[Finding]:
        """All of them, in the order they were found."""
        return list(self._by_path.values())


def read_report(path: Path) -> VerificationReport:
    """Reads what `stage verify --report` wrote.

    Raises:
        UsageError: there is no such file, or it is no report of this format.
    """
    try:
        data = read_file(path)
    except OSError as error:
        remedy = suggest_path(path, _REMEDY) if isinstance(error, FileNotFoundError) else _REMEDY
        raise UsageError(f"{path}: {error.strerror}.", remedy) from None
    document = read_document(data, str(path), "a verification report", (1,), _REMEDY)
    fields = Fields(document.data, f"{path}: not a verification report", _REMEDY)
    fields.take("findings", list)
    report = VerificationReport(
        root=Path(fields.take("bundle", str)),
        level=fields.choice("level", LEVELS) or fields.missing("level"),
        bundle_id=fields.maybe_hex("bundle_id"),
        files=fields.take("files", int),
        size=fields.take("bytes", int),
        findings=tuple(map(_finding, fields.each("findings"))),
    )
    if (proof := fields.maybe_inside("proof")) is not None:  # absent in reports of old versions
        payload = proof.choice("payload", (BY_ID,))
        report = replace(report, proof=payload, unproven=proof.texts("unproven"))
    return report


def _finding(fields: Fields) -> Finding:
    return Finding(
        path=fields.take("path", str),
        problem=fields.choice("problem", PROBLEMS) or fields.missing("problem"),
        expected=fields.take("expected", str),
        found=fields.take("found", str),
    )
