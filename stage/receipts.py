"""The receipt of a verification: what was verified, how, when and where; and whether it still holds.

`stage verify` writes one for each bundle it read whole and found sound, into a folder of the user's, and removes it
when it finds damage. `runner` asks for it. It holds as long as the bundle at that path has the same tag manifest and
every payload file the `stat` it had when it was read: no byte is read for that. (docs/adr/0020)
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from stage import __version__
from stage import bundle as layout
from stage.digest import sha256_of_bytes
from stage.disk import age_in_words
from stage.findings import VerificationReport
from stage.stamp import Stamp, stamp_of

FORMAT = 1


@dataclass(frozen=True)
class Receipt:
    """What a verification can vouch for later.

    Attributes:
        seal: sha256 of the tag manifest.
        level: `full` or `deep`.
        path: the bundle's folder, resolved.
        began, ended: seconds since 1970; `began` of the first byte, also of an interrupted verification gone on with.
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
        """As it lies on disk."""
        return {**asdict(self), "stamp": self.stamp._asdict()}

    def in_words(self, now: float) -> str:
        """`every byte verified 2 h ago on login1`."""
        how = "verified to load, every byte read," if self.level == "deep" else "every byte verified"
        return f"{how} {age_in_words(now - self.ended)} ago on {self.host}"


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where this user's receipts and journals lie (XDG Base Directory: `$XDG_STATE_HOME`, else ~/.local/state).

    For a user without a home folder (a container's uid that no passwd entry has) nowhere: a path where nothing can be.
    """
    if (base := environ.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(base, "airlift")
    try:
        return Path.home() / ".local" / "state" / "airlift"
    except RuntimeError:
        return Path(os.devnull, "no home folder", "airlift")


def record(folder: Path, report: VerificationReport) -> str | None:
    """Writes the receipt of a whole verification; after one that found damage, removes what an earlier one left.

    Returns:
        Why there is none although the bundle is sound; None where that needs no words.

    Raises:
        OSError: the folder cannot be written.
    """
    path = _receipt_path(folder, report.root)
    if not report.ok:
        path.unlink(missing_ok=True)
    if not report.ok or report.level == "fast" or report.shard is not None:
        return None
    if report.stamp is None or report.began is None or report.seal is None or report.bundle_id is None:
        return (
            "the verdict holds; a receipt of it is kept only of files that were not changed just before they were "
            "read. Where a run file says `bundle.verified: required`, verify once more"
        )
    if not report.root.is_dir():
        return f"the verdict holds; no receipt of it is kept, for what was verified is not here: {report.root}"
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")  # no sync: a receipt lost in a power cut is only missed
    partial.write_text(json.dumps(receipt.to_json(), indent=1) + "\n")
    partial.replace(path)
    return None


def find(folder: Path, root: Path) -> Receipt | str:
    """The receipt of the bundle at `root`, if it still holds; else why there is none, in words."""
    try:
        document = json.loads(_receipt_path(folder, root).read_bytes())
        receipt = Receipt(**{**document, "stamp": Stamp(**document["stamp"])})
        if receipt.format != FORMAT:
            return f"its receipt is of format {receipt.format!r}, which this version does not read"
    except (FileNotFoundError, NotADirectoryError):
        return "not verified here"
    except (OSError, ValueError, TypeError, KeyError):
        return f"its receipt ({_receipt_path(folder, root)}) cannot be read"
    try:
        seal = sha256_of_bytes((root / layout.TAG_MANIFEST).read_bytes())
        if seal != receipt.seal or stamp_of(_payload(root)) != receipt.stamp:
            return f"changed since it was verified {age_in_words(time.time() - receipt.ended)} ago on {receipt.host}"
    except OSError as error:
        return f"cannot be looked at ({error.filename}: {error.strerror})"
    return receipt


def _receipt_path(folder: Path, root: Path) -> Path:
    return folder / "receipts" / f"{sha256(str(root.resolve()).encode(errors='surrogateescape')).hexdigest()[:32]}.json"


def _payload(root: Path) -> Iterator[os.stat_result]:
    """The status of everything below the payload's folder that is not itself a folder."""
    folders = [root / layout.PAYLOAD]
    while folders:
        with os.scandir(folders.pop()) as listing:
            for entry in listing:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(Path(entry.path))
                else:
                    yield status
