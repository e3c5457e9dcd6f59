"""`stage verify`: compares a bundle with its lock.

`stage.verify` is both this package and the function of the Python API. Python sets the attribute
`verify` of `stage` to this package as soon as any module of it is imported; a function of that
name would be replaced. So the package itself can be called, whatever was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from stage.verify.report import VerificationReport


class VerifyPackage(ModuleType):
    """The type of the package `stage.verify`."""

    def __call__(
        self,
        path: Path | str,
        level: str = "full",
        *,
        jobs: int | None = None,
        bundle_id: str | None = None,
        quiet: bool = False,
    ) -> VerificationReport:
        """Compares a bundle with its lock, and returns all findings.

        Writes nothing: no receipt and no checkpoint to resume from. `stage verify` writes both.

        Args:
            path: the folder of the bundle.
            level: `fast` compares names, kinds and sizes; `full` also reads every byte; `deep`
                also loads configs, headers of weights, tokenizers and parquet footers.
            jobs: processes that read; None: one per core that this process may use.
            bundle_id: the id that the bundle must have, 64 hex digits; None: any.
            quiet: print nothing. Progress, and what `deep` could not check, go to stderr.

        Returns:
            The report. `report.ok` is true where there is no finding; damage is not an exception.

        Raises:
            StageError: exit code 2 not a bundle, a newer format, or a wrong argument, 5 run it
                again.
        """
        from pathlib import Path

        from stage.bundle.bundle import announced_size, check_is_bundle
        from stage.errors import UsageError
        from stage.util.digests import is_hex
        from stage.util.progress import Reporter
        from stage.verify.report import LEVELS
        from stage.verify.verify import verify

        root = Path(path)
        if level not in LEVELS:
            raise UsageError(
                f"level={level!r}: there is no such level.", f"Use one of: {', '.join(LEVELS)}."
            )
        if bundle_id is not None:
            bundle_id = bundle_id.removeprefix("sha256:").lower()
            if not is_hex(bundle_id, 64):
                raise UsageError(
                    f"bundle_id={bundle_id!r}: a bundle id has 64 hex digits.",
                    "`stage show BUNDLE` prints it.",
                )
        check_is_bundle(root)
        if level == "fast":
            return verify(root, "fast", bundle_id=bundle_id)
        with Reporter(quiet=quiet) as reporter:
            with reporter.bytes_bar("verify", announced_size(root)) as bar:
                report = verify(root, "full", jobs=jobs, progress=bar, bundle_id=bundle_id)
            if level == "deep":
                from stage.verify.load_test import verify_deep

                with reporter.at_work("load"):
                    report, unchecked = verify_deep(report)
                for text in unchecked:
                    reporter.note(f"not checked: {text}")
        return report


sys.modules[__name__].__class__ = VerifyPackage
