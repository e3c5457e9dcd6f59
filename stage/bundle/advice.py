"""The findings of a verification for a person: lines to read, and commands that repair.

The report keeps each finding; here a folder of files that are not of the bundle is one line.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stage.bundle.bundle import FETCH_PARTIAL, LOCK, PAYLOAD, TAG_MANIFEST
from stage.bundle.receipt import find_damage, state_folder
from stage.bundle.report import Finding, VerificationReport, is_closed
from stage.files import read_start
from stage.paths import printable


def format_findings(report: VerificationReport) -> Iterator[str]:
    """One line for each thing that is not as it should be, in the order of the findings."""
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


def suggest_fixes(report: VerificationReport, written: Path | None) -> list[str]:
    """What repairs the damage, a line each.

    Args:
        written: the file of the report; None: there is none.
    """
    seen = {(finding.path, finding.problem) for finding in report.findings}
    if {(TAG_MANIFEST, "missing"), (FETCH_PARTIAL, "extra")} & seen:
        return [
            "This bundle is unfinished: run `stage fetch` again where it was made, or copy it "
            "again: the copy had not ended."
        ]
    if report.is_another:
        return [
            "This is another bundle than the one asked for; its payload was not read. Give the "
            "right folder, or copy the right bundle. If it was fetched again since, `stage show` "
            "where it was made prints its id now."
        ]
    if any(finding.problem == "unloadable" for finding in report.findings):
        return [
            "Every byte is as it was fetched, so another copy does not help. Fetch another "
            "revision where the bundle was made."
        ]
    kinds, advice = _kinds(report), []
    if _has_other_line_ends(report.root):
        advice.append(
            "Its text files have the line ends of Windows: the transfer was in text mode (ASCII), "
            "or git changed them. Copy the bundle again, in binary mode."
        )
    if "closed" in kinds:
        chmod = f"chmod -R u+rX {shlex.quote(str(report.root))}"
        advice.append(f"No right to read: {chmod} (its owner can); then verify again.")
    if is_for_a_patch(report):
        root, file = shlex.quote(str(report.root)), shlex.quote(str(written or "FILE"))
        first = "" if written else f"Write a report: stage verify {root} --report {file}. "
        advice.append(
            f"{first}Carry {file} to the machine with a sound bundle. There: "
            f"stage patch BUNDLE --report {file} -o PATCH. Bring PATCH back. "
            f"Here: stage apply {root} PATCH."
        )
        advice.append("Other ways: copy again with rsync -c, or `stage fetch` where it was made.")
    elif kinds == {"extra"}:
        advice.append(
            "Nothing of the bundle is damaged. Extra files are not part of it: move them out of "
            "the folder."
        )
        return advice
    if "extra" in kinds:
        advice.append("Extra files are not part of the bundle: move them out of the folder.")
    return advice


def _has_other_line_ends(root: Path) -> bool:
    """Whether the lock, which we write with `\\n` alone, has the line ends of Windows."""
    try:
        return b"\r\n" in read_start(root / LOCK, 2**12)
    except OSError:
        return False


def remedy_for_damage(root: Path) -> str:
    """What repairs a damaged bundle, where one damaged file was met.

    If a verification found damage before, its report is kept, and the commands name it. Else the
    next command is `stage verify`.
    """
    known = find_damage(state_folder(os.environ), root)
    if known is None:
        return f"stage verify {shlex.quote(str(root))} names all damage, and what repairs it."
    return " ".join(suggest_fixes(known.report, known.written))


def describe_proof(report: VerificationReport, *, signed: bool) -> list[str]:
    """What was proven of a sound bundle, and against what, a line each.

    Args:
        signed: a signature was checked and is good: it covers every file.
    """
    but = (
        f" (which does not cover {', '.join(report.unproven)})"
        if report.unproven and not signed
        else ""
    )
    return [f"every byte of {PAYLOAD}/ proven against the bundle id{but}"] if report.proof else []


def is_for_a_patch(report: VerificationReport) -> bool:
    """Whether something must be carried: not for extra files and files without a right to read."""
    return bool(_kinds(report) - {"extra", "closed"})


def _kinds(report: VerificationReport) -> set[str]:
    return {_kind(finding) for finding in report.findings}


def _kind(finding: Finding) -> str:
    """A link counts as extra: if it replaced a file, that file has a finding of its own."""
    if finding.problem == "unsafe":
        return "extra"
    return "closed" if is_closed(finding) else finding.problem
