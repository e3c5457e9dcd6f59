"""Whether a bundle is verified, or known to be damaged. Reads no payload."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import DamageError, StageError, quoted
from stage.bundle.bundle import failure_of, verify
from stage.bundle.receipt import find_damage, find_receipt
from stage.bundle.verifier import VerificationReport, state_folder, suggest_fixes

FILES_NAMED = 5  # at most so many damaged files are named in a message


class Verification(NamedTuple):
    """Whether a receipt of `stage verify` is valid for a bundle now, and a text on it."""

    holds: bool
    text: str


def verification(bundle: Path, environ: Mapping[str, str]) -> Verification:
    """Reports whether a bundle is verified. Calls `stat` once per payload file; reads none.

    Without a valid receipt it compares names and sizes, as `stage verify --fast` does.

    Raises:
        DamageError: a verification found damage, or names or sizes differ from the lock.
        IncompleteError: files or folders may not be looked at.
    """
    check_known_damage(bundle, environ)
    receipt = find_receipt(state_folder(environ), bundle)
    if isinstance(receipt, str):
        check_names_and_sizes(bundle)
        return Verification(False, f"{receipt}; names and sizes are right")
    text = f"{receipt.describe(time.time())}, unchanged since"
    return Verification(True, text)


def check_known_damage(bundle: Path, environ: Mapping[str, str]) -> None:
    """Checks that this user's last verification found no damage that is still there.

    Raises:
        DamageError: it did; names the damaged files and what to do.
    """
    known = find_damage(state_folder(environ), bundle)
    if known is not None:
        raise _damage(bundle, known.report, known.describe(time.time()), known.written)


def check_names_and_sizes(bundle: Path) -> None:
    """Compares names, kinds and sizes with the lock, as `stage verify --fast`. Reads no payload.

    Raises:
        DamageError, IncompleteError: as for `verification`; with the files and what to do.
    """
    report = verify(bundle, "fast")
    if not report.ok:
        raise _damage(bundle, report, "by its names and sizes", None)


def _damage(bundle: Path, report: VerificationReport, how: str, written: Path | None) -> StageError:
    named = [f"{finding.path} ({finding.problem})" for finding in report.findings[:FILES_NAMED]]
    if more := len(report.findings) - len(named):
        named.append(f"and {more} more")
    advice = [*suggest_fixes(report, written), f"Then: stage verify {quoted(bundle)}"]
    failure = failure_of(report)
    what = "damaged" if failure is DamageError else "cannot be looked at"
    return failure(f"{bundle}: {what} ({how}): {', '.join(named)}.", " ".join(advice))
