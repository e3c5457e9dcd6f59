"""Reads reports of verifications, and prints their findings."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stage.bundle.verifier import LEVELS, PROBLEMS, Finding, VerificationReport, printable
from stage.errors import UsageError, about, suggest_path
from stage.files import read_file
from stage.lock.document import DocumentReader, read_document, sha256_digits
from stage.lock.reader import setting
from stage.text import is_utf16, save_as_utf8

_REMEDY = "Give a file that `stage verify --report` wrote."
_WRITE = "stage verify BUNDLE --report FILE"


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
    if is_utf16(data):
        raise UsageError(f"{path}: not UTF-8 text (UTF-16).", save_as_utf8(path, data))
    data = data.removeprefix(BOM_UTF8)
    if not data.strip() or (data.startswith(b"{") and not data.rstrip().endswith(b"}")):
        problem = f"{path}: not a verification report: its end is missing; the file was cut."
        raise UsageError(problem, f"Copy it again, or write it again: {_WRITE}.")
    with about(str(path)):
        document = read_document(data, str(path), "a verification report", (1,), _REMEDY)
        with about("not a verification report"):
            return from_json(document)


@dataclass(frozen=True, kw_only=True)
class _FindingKeys:
    """The keys of a finding in a report."""

    path: str
    problem: str = setting(takes=Literal[tuple(PROBLEMS)])
    expected: str
    found: str
    code: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Proof:
    payload: str | None = None
    unproven: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The keys of a report; `VerificationReport`, which writes it, stands alone in bundles."""

    bundle: str
    level: str = setting(takes=Literal[tuple(LEVELS)])
    bundle_id: str | None = setting(None, convert=sha256_digits)
    files: int
    bytes: int
    findings: tuple[_FindingKeys, ...]
    proof: _Proof = setting(_Proof)


def from_json(document: dict[str, Any]) -> VerificationReport:
    """The report that `VerificationReport.to_json` wrote.

    Raises:
        UsageError: it is not one; without a place.
    """
    found = DocumentReader(_REMEDY).read(_Report, document)
    return VerificationReport(
        root=Path(found.bundle),
        level=found.level,
        bundle_id=found.bundle_id,
        files=found.files,
        size=found.bytes,
        findings=tuple(
            Finding(f.path, f.code or f.problem, f.expected, f.found) for f in found.findings
        ),
        proof=found.proof.payload,
        unproven=found.proof.unproven,
        seal=None,
        stamp=None,
    )


def format_findings(report: VerificationReport) -> Iterator[str]:
    """One line for each thing that is not as it should be; for a folder of extra files, one line.

    The report itself keeps each finding.
    """
    folders = _whole_folders(report.root, {f.path for f in report.findings if f.problem == "extra"})
    counts, done = Counter(folders.values()), set[str]()
    for finding in report.findings:
        folder = folders.get(finding.path, "")
        if counts[folder] < 2:
            yield str(finding)
        elif folder not in done:
            done.add(folder)
            count = f"{counts[folder]:,} files"
            name = printable(f"{folder}/")
            yield f"{name}: extra: a folder of {count} that are not of the bundle"


def _whole_folders(root: Path, extra: set[str]) -> dict[str, str]:
    """Extra file -> the topmost folder around it that has only extra files, where there is one.

    Reads the folders on the disk, each until the first file that is of the bundle.
    """
    known = dict[str, bool]()

    def is_whole(folder: str) -> bool:
        if folder not in known:
            try:
                with os.scandir(root / folder) as listing:
                    entries = [
                        (f"{folder}/{entry.name}", entry.is_dir(follow_symlinks=False))
                        for entry in listing
                    ]
            except OSError:  # gone, or no right to read: its files are listed one by one
                entries = [(folder, False)]
            files_first = sorted(entries, key=lambda entry: entry[1])
            known[folder] = all(
                is_whole(path) if is_folder else path in extra for path, is_folder in files_first
            )
        return known[folder]

    found = {}
    for path in extra:
        parts = path.split("/")[:-1]
        folders = ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
        if (folder := next(filter(is_whole, folders), None)) is not None:
            found[path] = folder
    return found
