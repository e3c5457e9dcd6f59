"""Verification on many machines: which shard a process reads, and the verdict of all shards.

Each shard checks all names and sizes but reads only its part of the bytes, and writes a partial
report. `merge` is strict: it gives a verdict only if every shard of one division saw the same
bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from pathlib import Path

from stage.bundle.stamp import Stamp
from stage.errors import UsageError
from stage.verify.report import Finding, Shard, VerificationReport, in_ranges


def parse_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """`I/N` (from 1 to N), or `auto`: SLURM_PROCID + 1 of SLURM_NTASKS.

    Raises:
        UsageError: neither, or `auto` outside a Slurm step.
    """
    if text == "auto":
        try:
            shard = Shard(int(environ["SLURM_PROCID"]) + 1, int(environ["SLURM_NTASKS"]))
        except (KeyError, ValueError):
            raise UsageError(
                "--shard auto: SLURM_PROCID and SLURM_NTASKS are not set: this is no task of a "
                "Slurm step.",
                "srun --ntasks 8 stage verify BUNDLE --shard auto --report ...   "
                "or give --shard I/N",
            ) from None
    else:
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal()):
            raise UsageError(
                f"--shard {text}: should be I/N or auto.", "The first of four: --shard 1/4"
            )
        shard = Shard(int(number), int(count))
    if not 1 <= shard.number <= shard.count:
        raise UsageError(f"--shard {text}: I counts from 1 to N.", "The first of four: --shard 1/4")
    return shard


def report_path(path: Path, shard: Shard) -> Path:
    """The file of one shard's report: `%` in the name is its number, so one command fits all."""
    return path.with_name(path.name.replace("%", str(shard.number)))


def merge(reports: Sequence[tuple[Path, VerificationReport]]) -> VerificationReport:
    """The verdict of all shards: equal to what one verification of everything would have said.

    Raises:
        UsageError: a report is of no shard, of another bundle, level or division, given twice, or
            missing.
    """
    first_path, first = reports[0]
    seen: dict[int, Path] = {}
    for path, report in reports:
        if report.shard is None or first.shard is None:
            raise UsageError(
                f"{path}: a whole verification, not a shard of one.", "Give what `--shard` wrote."
            )
        if _common(report) != _common(first):
            raise UsageError(
                f"{path}: does not belong with {first_path}: {_difference(first, report)}.",
                "Verify all shards of one bundle with one N, then merge those.",
            )
        if report.shard.number in seen:
            raise UsageError(
                f"{path}: shard {report.shard} is there already, in {seen[report.shard.number]}.",
                "Give each once.",
            )
        seen[report.shard.number] = path
    count = first.shard.count if first.shard else 0
    if missing := [str(n) for n in islice((n for n in range(1, count + 1) if n not in seen), 11)]:
        shown = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise UsageError(
            f"shards are missing: {shown} ({count - len(seen)} of {count}).",
            f"stage verify BUNDLE --shard {missing[0]}/{count} --report FILE, then merge all.",
        )
    findings = _merged(finding for _, report in reports for finding in report.findings)
    stamps = [report.stamp for _, report in reports]
    return replace(
        first,
        findings=tuple(sorted(findings)),
        shard=None,
        began=min(
            (report.began for _, report in reports if report.began is not None), default=None
        ),
        stamp=reduce(Stamp.plus, [stamp for stamp in stamps if stamp is not None])
        if None not in stamps
        else None,
    )


def _common(report: VerificationReport) -> tuple[object, ...]:
    """What all shards of one bundle say."""
    count = report.shard.count if report.shard else 0
    whole = (report.bundle_id, report.seal, report.level, report.files, report.size)
    return (count, *whole, report.proof, report.unproven)


def _difference(one: VerificationReport, other: VerificationReport) -> str:
    if one.bundle_id != other.bundle_id:
        return f"bundle id {other.bundle_id}, not {one.bundle_id}"
    if one.level != other.level:
        return f"level {other.level}, not {one.level}"
    if one.shard and other.shard and one.shard.count != other.shard.count:
        return f"{other.shard.count} shards, not {one.shard.count}"
    if one.proof != other.proof:
        return "one was verified with --id, the other without"
    return "the files beside the payload were not the same"


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a path. Several shards may each have found bad blocks of one file."""
    by_path: dict[str, Finding] = {}
    for finding in findings:
        before = by_path.setdefault(finding.path, finding)
        if before != finding and before.ranges and finding.ranges:
            parts = [(*span, _why(one)) for one in (before, finding) for span in one.ranges]
            by_path[finding.path] = in_ranges(
                finding.path, finding.expected.removeprefix("sha256 "), parts
            )
    return list(by_path.values())


def _why(finding: Finding) -> str:
    return finding.found.partition(" at bytes ")[0] if finding.problem == "unreadable" else ""
