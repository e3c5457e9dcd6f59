"""Reads reports of verifications, and prints their findings."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage.bundle.verifier import LEVELS, PROBLEMS, Finding, VerificationReport, printable
from stage.errors import UsageError, suggest_path
from stage.files import read_file
from stage.lock.fields import Fields, read_document
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
    document = read_document(data, str(path), "a verification report", (1,), _REMEDY)
    return from_json(document.data, f"{path}: not a verification report")


def from_json(document: dict[str, Any], where: str = "report") -> VerificationReport:
    """The report that `VerificationReport.to_json` wrote.

    Raises:
        UsageError: it is none; with `where`.
    """
    fields = Fields(document, where, _REMEDY)
    fields.take("findings", list)
    proof = fields.maybe_inside("proof")
    return VerificationReport(
        root=Path(fields.take("bundle", str)),
        level=fields.choice("level", LEVELS) or fields.missing("level"),
        bundle_id=fields.maybe_hex("bundle_id"),
        files=fields.take("files", int),
        size=fields.take("bytes", int),
        findings=tuple(map(_finding, fields.each("findings"))),
        proof=None if proof is None else proof.maybe("payload", str),
        unproven=() if proof is None else proof.texts("unproven"),
        seal=None,
        stamp=None,
    )


def _finding(fields: Fields) -> Finding:
    problem = fields.choice("problem", PROBLEMS) or fields.missing("problem")
    return Finding(
        path=fields.take("path", str),
        code=fields.maybe("code", str) or problem,
        expected=fields.take("expected", str),
        actual=fields.take("found", str),
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
