"""`verifier` with the errors of `stage`: a fault that a user meets is a `StageError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stage.bundle import verifier
from stage.bundle.bundle import announced_size, check_is_bundle
from stage.bundle.verifier import CannotVerify, VerificationReport
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError

if TYPE_CHECKING:
    from stage.progress import Reporter

_ERRORS: dict[int, type[StageError]] = {
    error.exit_code: error for error in (DamageError, UsageError, PolicyError, IncompleteError)
}


@contextmanager
def _errors() -> Iterator[None]:
    """Inside it, `CannotVerify` is the `StageError` of its exit code."""
    try:
        yield
    except CannotVerify as error:
        raise _ERRORS[error.exit_code](error.message, error.remedy) from None


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
    with _errors():
        return verifier.verify(root, level, jobs, bundle_id, state, note, resume, progress)


def verify_shown(
    root: Path,
    level: str,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    bundle_id: str | None = None,
    state: Path | None = None,
    resume: bool = True,
) -> VerificationReport:
    """`verify` with a bar, where bytes are read.

    Raises:
        StageError: as for `verify`.
    """
    check_is_bundle(root)
    if level == "fast":
        return verify(root, "fast", bundle_id=bundle_id)
    with reporter.bytes_bar("verify", announced_size(root)) as bar:
        return verify(
            root,
            jobs=jobs,
            bundle_id=bundle_id,
            state=state,
            note=reporter.note,
            resume=resume,
            progress=bar,
        )


def check_outputs(root: Path, files: Mapping[str, Path | None]) -> None:
    """Checks before hours of reading that files can be written.

    Args:
        files: option -> the file that it names.

    Raises:
        UsageError: one is in the bundle, is a folder, or has none.
    """
    with _errors():
        for option, path in files.items():
            verifier.check_output(option, path, root)


def failure_of(report: VerificationReport) -> type[StageError]:
    """The error of a report with findings: where only rights to read are missing, no damage."""
    return _ERRORS[report.exit_code]
