"""Receipts of sound bundles and records of damaged ones.

`stage verify` writes a receipt for each bundle that it read whole and found sound, into a folder of
the user. `runner` asks for it. It holds as long as the bundle at that path has the same tag
manifest, and the same payload files at the same paths, each with the `stat` that it had when it was
read: no byte is read for that. (docs/adr/0006)

A verification that found damage removes the receipt and keeps its report (`*.damage.json`), with
inode, size and mtime of each file that it names. The damage is known as long as one of these files
is as it was found. A later verification that reads everything and finds no damage removes the
record.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.report import Finding, VerificationReport, is_closed, read_report
from stage.bundle.stamp import TICK_NS, UNSURE_NS, Stamp, now_ns, stamp_of, unsure_ns
from stage.digests import sha256_of_bytes
from stage.errors import UsageError
from stage.files import format_age
from stage.version import __version__

FORMAT = 2  # 1 did not see folders that changed places

Look = tuple[int, int, int] | None
"""Inode, size and mtime (ns) of a path; None: nothing is there."""


@dataclass(frozen=True)
class Receipt:
    """What a verification can vouch for later.

    Attributes:
        seal: sha256 of the tag manifest.
        level: `full` or `deep`.
        path: the bundle's folder, resolved.
        began, ended: seconds since 1970; `began`: of the first byte, also if it was resumed.
        tool: name and version of what verified.
        stamp: of all payload files, as they were read.
    """

    bundle_id: str
    seal: str
    level: str
    files: int
    bytes: int
    host: str
    path: str
    began: float
    ended: float
    tool: str
    stamp: Stamp
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """As it is on disk."""
        return {**asdict(self), "stamp": self.stamp._asdict()}

    def describe(self, now: float) -> str:
        """`every byte verified 2 h ago on login1`."""
        how = (
            "verified to load, every byte read," if self.level == "deep" else "every byte verified"
        )
        return f"{how} {format_age(now - self.ended)} ago on {self.host}"


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
        return f"stage verify found it {format_age(now - self.ended)} ago on {self.host}"


def state_folder(environ: Mapping[str, str]) -> Path:
    """The folder of this user's receipts and checkpoints of verifications.

    XDG Base Directory: `$XDG_STATE_HOME`, else ~/.local/state. For a user without a home folder (a
    container's uid without passwd entry) a path where nothing can be.
    """
    if (base := environ.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(base, "airlift")
    try:
        return Path.home() / ".local" / "state" / "airlift"
    except RuntimeError:
        return Path(os.devnull, "no home folder", "airlift")


def wait_until_at_rest(root: Path) -> None:
    """Waits until a change of a payload file would show, at most about two seconds.

    A verification that begins just after files were written gets no receipt without that. It does
    not wait for a payload that cannot be looked at: the verification finds and names it.
    """
    try:
        newest = stamp_of(_payload(root)).newest
        left = newest + unsure_ns(root, newest) + TICK_NS - now_ns()
    except OSError:
        return
    time.sleep(min(max(left, 0), UNSURE_NS + TICK_NS) / 10**9)  # a disk's clock can be ahead


def record(folder: Path, report: VerificationReport) -> str | None:
    """Writes the receipt of a sound bundle that was read whole, or the record of its damage.

    Each removes the other. `--fast` removes nothing if it finds nothing.

    Returns:
        Why there is no receipt although the bundle is sound; None where there is no reason.

    Raises:
        OSError: the folder cannot be written.
    """
    path = _receipt_path(folder, report.root)
    if not report.ok:
        path.unlink(missing_ok=True)
        _record_damage(folder, report)
    if not report.ok or report.level == "fast":
        return None
    _damage_path(folder, report.root).unlink(missing_ok=True)
    if (
        report.stamp is None
        or report.began is None
        or report.seal is None
        or report.bundle_id is None
    ):
        return (
            "the verdict holds, but no receipt is kept: files were changed just before they were "
            "read. Where a run file says `bundle.verified: required`, verify once more in two "
            "seconds"
        )
    receipt = Receipt(
        bundle_id=report.bundle_id,
        seal=report.seal,
        level=report.level,
        files=report.files,
        bytes=report.size,
        host=os.uname().nodename,
        path=str(report.root.resolve()),
        began=report.began,
        ended=time.time(),
        tool=f"airlift {__version__}",
        stamp=report.stamp,
    )
    _write(path, receipt.to_json())
    return None


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a sync: a receipt that is lost in a power cut is only missed.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def _record_damage(folder: Path, report: VerificationReport) -> None:
    """Keeps the findings, with how each file looks now.

    Files that only do not load (`--deep`) are as they were fetched, and nothing is known of files
    without a right to read: no damage. A verification of names and sizes adds to what is known: it
    has not read the bytes.
    """
    findings = {
        f.path: f for f in report.findings if f.problem != "unloadable" and not is_closed(f)
    }
    if not findings:
        return
    as_found: dict[str, Any] = {path: _look(report.root / path) for path in findings}
    if report.level == "fast":
        for finding, look in _still_so(_damage_path(folder, report.root), report.root):
            findings.setdefault(finding.path, finding)
            as_found.setdefault(finding.path, look)
    document = replace(report, findings=tuple(sorted(findings.values()))).to_json() | {
        "host": os.uname().nodename,
        "ended": time.time(),
        "tool": f"airlift {__version__}",
        "as_found": as_found,
    }
    _write(_damage_path(folder, report.root), document)


def _still_so(path: Path, root: Path) -> list[tuple[Finding, Any]]:
    """The findings of a record of damage whose files are as they were found, with their look."""
    try:
        as_found = dict(json.loads(path.read_bytes())["as_found"])
        findings = read_report(path).findings
    except (OSError, ValueError, TypeError, KeyError, UsageError):
        return []
    looks = [(finding, as_found.get(finding.path)) for finding in findings]
    return [
        (finding, look)
        for finding, look in looks
        if _look(root / finding.path) == (tuple(look) if isinstance(look, list) else look)
    ]


def find_damage(folder: Path, root: Path) -> KnownDamage | None:
    """The known damage of the bundle at `root`; None: there is none, or all of it changed since.

    Args:
        folder: of the state, as `state_folder` gives it.
    """
    path = _damage_path(folder, root)
    if not _still_so(path, root):
        return None
    try:
        document = json.loads(path.read_bytes())
        return KnownDamage(
            report=replace(read_report(path), root=root),
            written=path,
            ended=float(document["ended"]),
            host=str(document["host"]),
        )
    except (OSError, ValueError, TypeError, KeyError, UsageError):
        return None


def _look(path: Path) -> Look:
    """Without the ctime: `chmod -R` after a verification changes it, and repairs nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def find(folder: Path, root: Path) -> Receipt | str:
    """The receipt of the bundle at `root`, if it still holds; else a text: why there is none."""
    try:
        document = json.loads(_receipt_path(folder, root).read_bytes())
        if (found := document["format"]) != FORMAT:
            return f"its receipt is of format {found!r}, which this version does not read"
        receipt = Receipt(**{**document, "stamp": Stamp(**document["stamp"])})
    except (FileNotFoundError, NotADirectoryError):
        return "not verified here"
    except (OSError, ValueError, TypeError, KeyError):
        return f"its receipt ({_receipt_path(folder, root)}) cannot be read"
    try:
        seal = sha256_of_bytes((root / layout.TAG_MANIFEST).read_bytes())
        if seal != receipt.seal or stamp_of(_payload(root)) != receipt.stamp:
            age = format_age(time.time() - receipt.ended)
            return f"changed since it was verified {age} ago on {receipt.host}"
    except OSError as error:
        return f"cannot be looked at ({error.filename}: {error.strerror})"
    return receipt


def _receipt_path(folder: Path, root: Path) -> Path:
    return (
        folder
        / "receipts"
        / f"{sha256(str(root.resolve()).encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    )


def _damage_path(folder: Path, root: Path) -> Path:
    return _receipt_path(folder, root).with_suffix(".damage.json")


def _payload(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of everything below the payload's folder that is not itself a folder."""
    folders = [layout.PAYLOAD]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as listing:
            for entry in listing:
                path, status = f"{folder}/{entry.name}", entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(path)
                else:
                    yield path, status
