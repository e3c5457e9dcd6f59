"""`verifier.verify` with the errors of `stage`: a fault that a user meets is a `StageError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stage.bundle import verifier
from stage.bundle.verifier import CannotVerify, VerificationReport
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError

_ERRORS: dict[int, type[StageError]] = {
    error.exit_code: error for error in (DamageError, UsageError, PolicyError, IncompleteError)
}


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    bundle_id: str | None = None,
    state: Path | None = None,
    note: Callable[[str], object] | None = None,
    resume: bool = True,
    progress: Callable[[int], object] | None = None,
) -> VerificationReport:
    """Verifies a bundle. Damage is a finding; a bundle that cannot be examined is an exception.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: processes that read; None: one for each core that this process may use.
        bundle_id: the id that the bundle must have, 64 hex digits. Another bundle is one finding,
            and its payload is not read.
        state: the folder of journals (`verifier.state_folder`), for a receipt and to resume; None:
            keep nothing.
        note: prints a line: what is resumed, or why nothing can be kept.
        resume: whether to use the journal of an interrupted verification.
        progress: called with the number of payload bytes just read.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
        PolicyError: a sound lock with a path that may not be in a bundle.
        IncompleteError: a process that read was ended from outside, or by its limits.
    """
    try:
        return verifier.verify(root, level, jobs, bundle_id, state, note, resume, progress)
    except CannotVerify as error:
        raise _ERRORS[error.exit_code](error.message, error.remedy) from None


def failure_of(report: VerificationReport) -> type[StageError]:
    """The error of a report with findings: where only rights to read are missing, no damage."""
    return _ERRORS[report.exit_code]
