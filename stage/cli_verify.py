"""`stage verify`: the whole of a bundle, one shard of it, or the verdict of many shards."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stage.errors import DamageError, UsageError
from stage.terminal import json_option, quiet_option, say, signers_option

if TYPE_CHECKING:
    from stage.findings import Shard, VerificationReport
    from stage.progress import Reporter
    from stage.sign import Trust


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE")
@click.option("--fast", is_flag=True, help="Only presence and size of every file, not its bytes.")
@click.option("--deep", is_flag=True, help="Also load configs, weights' headers, tokenizers and parquet footers.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes that read. Default: one a core.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the findings there, as JSON. With --shard, `%` in FILE becomes the shard's number.",
)
@click.option(
    "--shard",
    "shard_text",
    metavar="I/N",
    help="Read only the I-th of N parts (from 1). `auto`: this task's part of a Slurm step.",
)
@click.option(
    "--no-resume", is_flag=True, help="Read everything, also what an interrupted verification found sound today."
)
@click.option("--merge", is_flag=True, help="Take the reports of all shards instead of BUNDLE; give the verdict.")
@signers_option
@quiet_option
@json_option
def verify(
    paths: tuple[Path, ...],
    fast: bool,
    deep: bool,
    jobs: int | None,
    report: Path | None,
    shard_text: str | None,
    no_resume: bool,
    merge: bool,
    signers: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prove that every byte of BUNDLE is as it was fetched. Never touches the network.

    Finds all damage, not the first: exit code 1 and one line for each file that is missing, extra or changed; of a
    file larger than 64 MiB, which 16 MiB blocks.

    \b
    On many nodes:  srun stage verify BUNDLE --shard auto --report 'part-%.json'
                    stage verify --merge part-*.json
    """
    from stage.disk import write_atomically
    from stage.progress import Reporter

    if deep and (fast or merge or shard_text):
        raise UsageError(
            "--deep: loads what is sound after every byte was read, so it goes without --fast, --shard and --merge.",
            "Leave one of them out.",
        )
    shard = _shard(shard_text)
    if merge and (shard or fast or signers or no_resume):
        raise UsageError(
            "--merge: takes reports, so it goes without --shard, --fast, --no-resume and --signers.",
            "stage verify BUNDLE --fast --signers FILE checks the signature.",
        )
    if not merge and len(paths) > 1:
        raise UsageError(f"{paths[1]}: one bundle at a time.", "Reports of shards go with --merge.")
    if report is not None:
        report = _report_of(report, shard, None if merge else paths[0])
    with Reporter(quiet=quiet or as_json) as reporter:
        if merge:
            result, trust = _merged(paths), None
        else:
            trust = _trust(paths[0], signers)
            level = "deep" if deep else "fast" if fast else "full"
            result = _verified(paths[0], level, jobs, shard, not no_resume, reporter)
            trust = trust and trust.with_findings(paths[0], result.findings)
        if not result.ok or trust is None or trust.error is None:  # who demanded a signature got none to believe
            _leave_receipt(result, reporter)
    text = json.dumps(result.to_json() | (trust.to_json() if trust else {}), indent=1) + "\n"
    if report is not None:
        write_atomically(report, text.encode())
    if as_json:
        click.echo(text, nl=False)
    else:
        _print(result, trust, report, quiet)
    if trust is not None and trust.error is not None:
        sys.exit(trust.error.exit_code)
    if not result.ok:
        sys.exit(1)


def _shard(text: str | None) -> Shard | None:
    if text is None:
        return None
    from stage.shards import parse_shard

    return parse_shard(text, os.environ)


def _merged(paths: Sequence[Path]) -> VerificationReport:
    from stage.findings import read_report
    from stage.shards import merge

    return merge([(path, read_report(path)) for path in paths])


def _trust(bundle: Path, signers: Path | None) -> Trust | None:
    if signers is None:
        return None
    from stage.sign import Trust

    return Trust.check(bundle, signers)


def _verified(
    bundle: Path, level: str, jobs: int | None, shard: Shard | None, resume: bool, reporter: Reporter
) -> VerificationReport:
    from stage.headstart import HeadStart
    from stage.settling import settle
    from stage.workers import cores

    if level != "fast":
        settle(bundle, reporter.note)
    reads_all = level != "fast" and shard is None
    with HeadStart(bundle, jobs or cores()) if reads_all else nullcontext() as ahead:
        from stage.bundle import announced_size  # what takes long to import, from here on
        from stage.journal import Journal
        from stage.receipts import state_folder
        from stage.verify import verify

        if level == "fast":
            with _no_collections():
                return verify(bundle, "fast", shard=shard)
        journal = Journal(state_folder(os.environ) / "verify", bundle, shard, reporter.note, resume=resume)
        to_read = announced_size(bundle) // (shard.count if shard else 1)
        with reporter.bytes_bar("verify", to_read) as bar, _no_collections():
            report = verify(bundle, "full", jobs=jobs, shard=shard, progress=bar, journal=journal, ahead=ahead)
    if level == "deep":
        from stage.loadcheck import verify_deep

        with reporter.at_work("load"):
            report, unchecked = verify_deep(report)
        for said in unchecked:
            reporter.note(f"not checked: {said}")
    return report


@contextmanager
def _no_collections() -> Iterator[None]:
    """A lock is many objects without a cycle: going through them again and again takes long and frees nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _leave_receipt(report: VerificationReport, reporter: Reporter) -> None:
    """A verdict is worth having without a receipt: where that cannot be written, say so and go on."""
    from stage.receipts import record, state_folder

    try:
        why_not = record(state_folder(os.environ), report)
    except OSError as error:
        why_not = f"the verdict holds; no receipt of it could be written: {error.filename}: {error.strerror}"
    if why_not:
        reporter.note(why_not)


def _report_of(report: Path, shard: Shard | None, bundle: Path | None) -> Path:
    """Where the report goes; that it can is found out before hours of reading, not after."""
    from stage.disk import require_folder_of

    if shard is not None:
        from stage.shards import report_path

        report = report_path(report, shard)
    if bundle is not None and bundle.resolve() in report.resolve().parents:
        raise UsageError(
            f"--report {report}: inside the bundle it would itself be an extra file.", "Put it beside the bundle."
        )
    if report.is_dir():
        raise UsageError(f"--report {report}: is a folder.", "Give the name of a file.")
    require_folder_of(report, "--report ")
    return report


def _print(result: VerificationReport, trust: Trust | None, report: Path | None, quiet: bool) -> None:
    from stage.disk import human_count, human_size
    from stage.told import lines, what_to_do

    for line in lines(result):
        say(line)
    if not result.ok:
        advice = "\n     ".join(what_to_do(result, report))
        damage = DamageError(f"{result.root}: {human_count(len(result.findings), 'finding')}.", advice)
        say(f"error: {damage}", err=True)
    elif not quiet:
        say(f"{result.root}: sound: {human_count(result.files, 'file')}, {human_size(result.size)}, {_how(result)}")
        click.echo(f"bundle id {result.bundle_id}")
    if trust is not None and trust.signer is not None and not quiet:
        but = "" if result.ok else ": the signature is good; what is damaged is not as it was signed"
        say(f"signed by {trust.signer}{but}")
    if trust is not None and trust.error is not None:
        say(f"error: {trust.error}", err=True)


def _how(result: VerificationReport) -> str:
    if result.shard is not None:
        return f"no damage in shard {result.shard} (the others not read; `stage verify --merge` gives the verdict)"
    if result.level == "deep":
        return "every byte is as it was fetched, and everything that could be checked loads"
    if result.level == "full":
        return "every byte is as it was fetched"
    return "names and sizes are right (bytes not read)"
