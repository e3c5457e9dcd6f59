"""What verifications leave: reports, receipts of sound bundles, and records of damaged ones.

A report is a file that a user asked for (`stage verify --report`). Receipts and records are in a
folder of the user.

`stage verify` and `stage-verify.py` write a receipt for each bundle that they read whole and found
sound (`verifier.write_receipt`). `runner` asks for it. It holds for 30 days, as long as the bundle
at that path has the same tag manifest, and the same payload files at the same paths, each with the
`stat` that it had when it was read: no byte is read for that. (docs/adr/0006)

A verification that found damage keeps its report (`*.damage.json`), with inode, size and mtime of
each file that it names. The damage is known as long as one of these files is as it was found. A
later verification that reads everything and finds no damage removes the record.
"""

from __future__ import annotations

import json
import os
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from stage.bundle.verifier import (
    EXPIRES_S,
    LEVELS,
    PAYLOAD,
    PROBLEMS,
    RECEIPT_FORMAT,
    TAG_MANIFEST,
    TICK_NS,
    UNSURE_NS,
    Finding,
    VerificationReport,
    age,
    line_of,
    now_ns,
    printable,
    receipt_path,
    rests_after,
    sha256_of,
    stamp_of,
    state_folder,
    suggest_fixes,
    unsure_ns,
    write_json,
    write_receipt,
)
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
        raise UsageError(
            f"{path}: not a verification report: its end is missing; the file was cut.",
            f"Copy it again, or write it again: {_WRITE}.",
        )
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


@dataclass(frozen=True)
class Receipt:
    """What a verification can vouch for later.

    Attributes:
        seal: sha256 of the tag manifest.
        level: `full` or `deep`.
        digest, contents: of the payload files as they were read (`verifier.Stamp`).
        began, ended: seconds since 1970; `began`: of the first byte, also if it was resumed.
    """

    bundle_id: str
    seal: str
    level: str
    host: str
    digest: str
    contents: str
    began: float
    ended: float

    def describe(self, now: float) -> str:
        """`every byte verified 2 h ago on login1`."""
        how = (
            "verified to load, every byte read," if self.level == "deep" else "every byte verified"
        )
        return f"{how} {age(now - self.ended)} ago on {self.host}"


@dataclass(frozen=True)
class KnownDamage:
    """The damage that a verification found, of which at least one file is still as it was found.

    Attributes:
        report: what was found.
        written: the file of that report; `stage patch --report` takes it.
        ended: seconds since 1970; `host`: where.
    """

    report: VerificationReport
    written: Path
    ended: float
    host: str

    def describe(self, now: float) -> str:
        """`stage verify found it 2 h ago on login1`."""
        return f"stage verify found it {age(now - self.ended)} ago on {self.host}"


def wait_until_at_rest(root: Path) -> None:
    """Waits until a change of a payload file would show, at most about two seconds.

    A verification that begins just after files were written gets no receipt without that. It does
    not wait for a payload that cannot be looked at: the verification finds and names it.
    """
    try:
        unsure = unsure_ns(root)
        newest = max((rests_after(status, unsure) for _, status in _payload(root)), default=0)
    except OSError:
        return
    left = newest + TICK_NS - now_ns()
    # At most one uncertain time: the clock of a file server can be minutes ahead of ours.
    time.sleep(min(max(left, 0), UNSURE_NS + TICK_NS) / 10**9)


def record(state: Path, report: VerificationReport) -> str | None:
    """Writes the receipt of a sound bundle that was read whole, or the record of its damage.

    Each removes the other. `--fast` removes nothing if it finds nothing. Files that only do not
    load (`--deep`) are as they were fetched, and nothing is known about files that cannot
    be read: no damage.

    Returns:
        Why there is no receipt although the bundle is sound; None where there is no reason.

    Raises:
        OSError: the folder cannot be written.
    """
    kept = _damage_path(state, report.root)
    findings = {f.path: f for f in report.findings if f.code not in ("unloadable", "closed")}
    if findings:
        as_found: dict[str, Any] = {path: _look(report.root / path) for path in findings}
        if report.level == "fast":  # it has not read the bytes: it adds to what is known
            for finding, look in _still_so(kept, report.root):
                findings.setdefault(finding.path, finding)
                as_found.setdefault(finding.path, look)
        document = report._replace(findings=tuple(sorted(findings.values()))).to_json()
        facts = {"host": os.uname().nodename, "ended": time.time(), "as_found": as_found}
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, document | facts)
    return write_receipt(state, report)


def _still_so(kept: Path, root: Path) -> list[tuple[Finding, Any]]:
    """The findings of a record of damage whose files are as they were found, with their look."""
    try:
        document = json.loads(kept.read_bytes())
        looks = document["as_found"]
        findings = from_json(document).findings
        return [(f, looks[f.path]) for f in findings if _look(root / f.path) == looks[f.path]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UsageError):
        return []


def find_damage(state: Path, root: Path) -> KnownDamage | None:
    """The known damage of the bundle at `root`; None: there is none, or all of it changed since.

    Args:
        state: as `verifier.state_folder` gives it.
    """
    kept = _damage_path(state, root)
    if not _still_so(kept, root):
        return None
    document = json.loads(kept.read_bytes())
    report = from_json(document)._replace(root=root)
    return KnownDamage(report, kept, float(document["ended"]), str(document["host"]))


def remedy_for_damage(root: Path) -> str:
    """What repairs a damaged bundle, where one damaged file was met.

    If a verification found damage before, its report is kept, and the commands name it. Else the
    next command is `stage verify`.
    """
    known = find_damage(state_folder(os.environ), root)
    if known is None:
        return f"stage verify {quote(str(root))} names all damage, and what repairs it."
    return " ".join(suggest_fixes(known.report, known.written))


def _look(path: Path) -> list[int] | None:
    """Inode, size and mtime. Not the ctime: `chmod -R` changes it, and repairs nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def find_receipt(state: Path, root: Path) -> Receipt | str:
    """The receipt of the bundle at `root`, if it still holds; else a text: why there is none."""
    path = receipt_path(state, root)
    try:
        document = json.loads(path.read_bytes())
        if (version := document["format"]) != RECEIPT_FORMAT:
            return f"its receipt is of format {version!r}, which this version does not read"
        receipt = Receipt(**{field.name: document[field.name] for field in fields(Receipt)})
        now = time.time()
        when = f"{age(now - receipt.ended)} ago on {receipt.host}"
    except (FileNotFoundError, NotADirectoryError):
        return "not verified here"
    except (OSError, ValueError, TypeError, KeyError):
        return f"its receipt ({path}) cannot be read"
    if now - receipt.began > EXPIRES_S:
        return f"verified {when}: a receipt holds for {age(EXPIRES_S)}"
    try:
        seal = sha256_of((root / TAG_MANIFEST).read_bytes())
        stamp = stamp_of((line_of(*file) for file in _payload(root)), receipt.began)
    except OSError as error:
        return f"cannot be looked at ({error.filename}: {error.strerror})"
    if seal == receipt.seal and stamp.digest == receipt.digest:
        return receipt
    is_only_ctime = seal == receipt.seal and stamp.contents == receipt.contents
    why = " (only ctimes: chmod, chown or a new hard link move them too)" if is_only_ctime else ""
    return f"changed since it was verified {when}{why}"


def _damage_path(state: Path, root: Path) -> Path:
    return receipt_path(state, root).with_suffix(".damage.json")


def _payload(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of everything below the payload's folder that is not itself a folder."""
    folders = [PAYLOAD]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as listing:
            for entry in listing:
                path = f"{folder}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    yield path, entry.stat(follow_symlinks=False)
