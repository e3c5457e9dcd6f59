"""What `stage verify` prints about a bundle, and what it keeps for the next command.

The words of a verdict are `verifier`'s.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from stage.bundle.bundle import VERIFIER, is_known_verifier
from stage.bundle.receipt import KnownDamage, find_damage, format_findings, record
from stage.bundle.signature import Trust
from stage.bundle.verifier import (
    HOW,
    VerificationReport,
    describe_sound,
    keep_verdict,
    suggest_fixes,
)
from stage.cli.base import say
from stage.errors import DamageError
from stage.files import human_count, human_size, read_file
from stage.progress import Reporter


def keep_receipt(result: VerificationReport, trust: Trust, state: Path, reporter: Reporter) -> None:
    """Keeps a receipt, or the record of damage.

    If a signature is demanded and cannot be believed, a sound bundle gets no receipt.
    """
    if result.is_another or (result.ok and trust.error is not None):
        return
    if why_not := keep_verdict(record, state, result):
        reporter.note(why_not)


def known_damage(result: VerificationReport, state: Path) -> KnownDamage | None:
    """The damage on record: found now, or by an earlier verification and not repaired since."""
    was_all_read = result.ok and result.level != "fast"
    return None if was_all_read or result.is_another else find_damage(state, result.root)


def verdict_json(
    result: VerificationReport, trust: Trust, known: KnownDamage | None
) -> dict[str, Any]:
    """What `--json` prints; without `known`, what `--report` writes."""
    found = result.to_json() | trust.to_json()
    if result.ok and known is not None:  # found by a verification that read the bytes
        damage = {"findings": len(known.report.findings), "report": str(known.written)}
        found["known_damage"] = damage
    return found


def exit_code(result: VerificationReport, trust: Trust, known: KnownDamage | None) -> int:
    """A missing signature comes before damage: who signed is what was asked."""
    if trust.error is not None:
        return trust.error.exit_code
    return DamageError.exit_code if known is not None else result.exit_code


def print_verdict(
    result: VerificationReport,
    trust: Trust,
    report: Path | None,
    known: KnownDamage | None,
    *,
    quiet: bool,
) -> None:
    """Prints the verdict, what repairs the bundle, and who signed it.

    Args:
        report: the file of `--report`.
        known: the damage on record.
    """
    is_signed = trust.signer is not None
    for line in format_findings(result):
        say(line)
    if not result.ok:
        kept = known.written if known else None
        _print_damage(result, "", report or kept)
        if kept is not None:
            say(f"The report is kept in {kept}", err=True)
    elif known is not None:  # found by a verification that read the bytes, as `--fast` does not
        say(f"{result.root}: known to be damaged; {HOW[result.level]}")
        when = f": {known.describe(time.time())}, and not repaired since"
        _print_damage(known.report, when, known.written)
    elif not quiet:
        count, size = human_count(result.files, "file"), human_size(result.size)
        for line in describe_sound(result, count, size, is_signed):
            say(line)
    if not is_signed and _has_unknown_verifier(result):
        say(
            f"{result.root}: this version of airlift does not know its {VERIFIER}: another version "
            "wrote it, or it was replaced. The bundle id does not cover it: do not run it "
            "unless the bundle is signed (--signers)",
            err=True,
        )
    if is_signed and not quiet:
        but = (
            "" if result.ok else ": the signature is good; what is damaged is not as it was signed"
        )
        say(f"signed by {trust.signer}{but}")
    if trust.error is not None:
        say(f"error: {trust.error}", err=True)


def _print_damage(report: VerificationReport, when: str, written: Path | None) -> None:
    count = human_count(len(report.findings), "finding")
    advice = "\n     ".join(suggest_fixes(report, written))
    say(f"error: {DamageError(f'{report.root}: {count}{when}.', advice)}", err=True)


def _has_unknown_verifier(result: VerificationReport) -> bool:
    return VERIFIER in result.unproven and not is_known_verifier(
        read_file(result.root / VERIFIER, follow=False)
    )
