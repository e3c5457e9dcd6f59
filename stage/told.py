"""A verification's findings for a person: lines to read, and commands that mend. `stage-verify.py` says the same.

The report keeps each finding; here a renamed file is one line, and so is a folder of files that are not of the bundle.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stage.bundle import JOURNAL, TAG_MANIFEST
from stage.findings import Finding, VerificationReport
from stage.names import printable
from stage.renames import moves, whole_folders

_COMMANDS = 5  # to print of one kind


def lines(report: VerificationReport) -> Iterator[str]:
    """One line for each thing that is not as it should be, in the order of the findings."""
    to_move = moves(report.root, report.renamed)
    move_of = {path: pair for pair, paths in to_move.items() for path in paths}
    moved, said = {new for _, new in report.renamed}, set[tuple[str, str]]()
    extra = {finding.path for finding in report.findings if finding.problem == "extra"} - moved
    folders = whole_folders(report.root, extra)
    counts, told = Counter(folders.values()), set[str]()
    for finding in report.findings:
        folder = folders.get(finding.path, "")
        if (pair := move_of.get(finding.path)) is not None:
            if pair not in said:
                files = f" ({len(to_move[pair]):,} files)" if len(to_move[pair]) > 1 else ""
                yield f"{printable(pair[0])}: renamed: it lies here as {printable(pair[1])}{files}"
            said.add(pair)
        elif counts[folder] > 1:
            if folder not in told:
                count = f"{counts[folder]:,} files"
                yield f"{printable(folder + '/')}: extra: a folder of {count} that are not of the bundle"
            told.add(folder)
        elif finding.path not in moved:
            yield str(finding)


def what_to_do(report: VerificationReport, written: Path | None) -> list[str]:
    """What mends it, a line each.

    Args:
        written: where the report was written; None: nowhere.
    """
    told = {(finding.path, finding.problem) for finding in report.findings}
    if {(TAG_MANIFEST, "missing"), (JOURNAL, "extra")} & told:
        return [
            "This bundle is unfinished: run `stage fetch` again where it was made, or copy it again: the copy had not "
            "ended."
        ]
    if any(finding.problem == "unloadable" for finding in report.findings):
        return [
            "Every byte is as it was fetched: no copy mends that. Fetch another revision where the bundle was made."
        ]
    moved, kinds = bool(report.renamed), _kinds(report)
    to_move = list(moves(report.root, report.renamed))
    advice = [f"Give it its name again: {_mv(report.root, *pair)}" for pair in to_move[:_COMMANDS]]
    if len(to_move) > _COMMANDS:
        advice.append(f"And so for {len(to_move) - _COMMANDS} more.")
    if "closed" in kinds:
        chmod = f"chmod -R u+rX {shlex.quote(str(report.root))}"
        advice.append(f"No right to read: {chmod} (its owner can); then verify again.")
    if is_for_a_patch(report):
        carry = written or "FILE"
        advice.append(
            f"Carry only what is damaged: {'' if written else f'stage verify {report.root} --report {carry}; '}"
            f"where the bundle was made: stage patch BUNDLE --report {carry} -o PATCH. Or copy again: rsync -c."
        )
    elif kinds == {"extra"} and not moved:
        advice.append("Nothing of the bundle is damaged. What is extra is not of it: move that out of the folder.")
        return advice
    if "extra" in kinds:
        advice.append("What is extra is not of the bundle: move it out of the folder.")
    return advice


def is_for_a_patch(report: VerificationReport) -> bool:
    """Whether anything of it has to be carried: not what is only moved, or extra, or closed to whoever verified."""
    return bool(_kinds(report) - {"extra", "closed"})


def _kinds(report: VerificationReport) -> set[str]:
    moved = {path for pair in report.renamed for path in pair}
    return {_kind(finding) for finding in report.findings if finding.path not in moved}


def is_closed(finding: Finding) -> bool:
    """Whether a right to read is all that is missing: nothing is known to be wrong with the bytes."""
    return finding.problem == "unreadable" and finding.found.startswith(os.strerror(errno.EACCES))


def _kind(finding: Finding) -> str:
    """A link is as good as extra: where it stands in a file's place, that file is missing and has a finding too."""
    if finding.problem == "unsafe":
        return "extra"
    return "closed" if is_closed(finding) else finding.problem


def _mv(root: Path, old: str, new: str) -> str:
    move = shlex.join(["mv", str(root / new), str(root / old)])
    above = (root / old).parent
    return move if above.is_dir() else f"{shlex.join(['mkdir', '-p', str(above)])} && {move}"
