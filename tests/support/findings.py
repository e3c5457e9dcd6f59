"""The kinds of what the checks of a run find."""

from __future__ import annotations

from collections.abc import Iterable

from runner.job.findings import Finding


def errors(found: Iterable[Finding]) -> list[Finding]:
    """What ends the run."""
    return [finding for finding in found if finding.level == "error"]


def others(found: Iterable[Finding]) -> list[Finding]:
    """Warnings and notes."""
    return [finding for finding in found if finding.level in ("warning", "note")]


def lines(found: Iterable[Finding]) -> list[str]:
    """Lines about the run, without details."""
    return [finding.message for finding in found if finding.level == "fact"]
