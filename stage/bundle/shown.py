"""One verification as a person sees it: at any level, with a bar, and with what was not checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stage.bundle.bundle import announced_size, check_is_bundle
from stage.bundle.verifier import VerificationReport
from stage.bundle.verify import verify

if TYPE_CHECKING:
    from stage.progress import Reporter


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
    """Verifies at any level, with a bar; `deep` also loads what is sound.

    Args:
        reporter: shows the progress and what could not be checked.

    Raises:
        StageError: as for `verify`.
    """
    check_is_bundle(root)
    if level == "fast":
        return verify(root, "fast", bundle_id=bundle_id)
    with reporter.bytes_bar("verify", announced_size(root)) as bar:
        report = verify(
            root,
            jobs=jobs,
            bundle_id=bundle_id,
            state=state,
            note=reporter.note,
            resume=resume,
            progress=bar,
        )
    if level == "deep":
        from stage.bundle.load_test import verify_deep

        with reporter.at_work("load"):
            report, unchecked = verify_deep(report)
        for text in unchecked:
            reporter.note(f"not checked: {text}")
    return report
