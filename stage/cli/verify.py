"""`stage verify`: proves that a bundle is as it was fetched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stage.cli.base import (
    bundle_argument,
    json_option,
    print_json,
    quiet_option,
    say,
    signers_option,
)
from stage.errors import DamageError, UsageError
from stage.files import human_count, human_size

if TYPE_CHECKING:
    from stage.bundle.receipt import KnownDamage
    from stage.bundle.signature import Trust
    from stage.bundle.verifier import VerificationReport
    from stage.progress import Reporter


@click.command()
@bundle_argument
@click.option(
    "--fast",
    is_flag=True,
    help="Only presence and size of every file, not its bytes. Damage that was found before and is "
    "not repaired is damage here too.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also load configs, weights' headers, tokenizers and parquet footers.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 256), help="Processes that read. Default: one a core."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the findings there, as JSON.",
)
@click.option(
    "--failed",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the paths of the damaged and missing files there, for rsync --files-from.",
)
@click.option(
    "--no-resume",
    is_flag=True,
    help="Read everything, also what an interrupted verification found sound.",
)
@click.option(
    "--id",
    "id_text",
    metavar="ID",
    help="The bundle must be this one: its id, or the file of its lock (x.lock beside x.yaml).",
)
@signers_option
@quiet_option
@json_option
def verify(
    bundle: Path,
    fast: bool,
    deep: bool,
    jobs: int | None,
    report: Path | None,
    failed: Path | None,
    no_resume: bool,
    id_text: str | None,
    signers: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prove that every byte of BUNDLE is as it was fetched, offline.

    Finds all damage: exit code 1 and one line for each file that is missing, extra or changed.

    \b
    Examples:
      stage verify bundle
      stage verify bundle --fast               # names and sizes
      stage verify bundle --report damage.json # for stage patch
      stage verify bundle --failed paths       # for rsync --files-from
    """
    from stage.bundle.shown import verify_shown
    from stage.bundle.verifier import state_folder
    from stage.files import write_atomically
    from stage.progress import Reporter

    if deep and fast:
        raise UsageError(
            "--deep cannot be combined with --fast: it loads files after every byte was read.",
            "Omit one of them.",
        )
    if deep:
        from stage.installation import check_libraries

        check_libraries("--deep", "pyarrow")
    bundle_id = _bundle_id(id_text)
    for option, path in (("--report", report), ("--failed", failed)):
        if path is not None:
            _check_output(option, path, bundle)
    with Reporter(quiet=quiet or as_json) as reporter:
        trust = _trust(bundle, signers)
        level = "deep" if deep else "fast" if fast else "full"
        result = verify_shown(
            bundle,
            level,
            reporter,
            jobs=jobs,
            bundle_id=bundle_id,
            state=state_folder(os.environ),
            resume=not no_resume,
        )
        trust = trust and trust.with_findings(bundle, result.findings)
        if not result.is_another and (
            not result.ok or trust is None or trust.error is None
        ):  # who demanded a signature got none to believe
            _leave_receipt(result, reporter)
    known = _known_damage(result)
    document = result.to_json() | (trust.to_json() if trust else {})
    if report is not None:
        write_atomically(report, (json.dumps(document, indent=1) + "\n").encode())
    if failed is not None:
        write_atomically(failed, "".join(f"{path}\n" for path in result.to_carry).encode())
    if as_json:
        before = known if result.ok else None
        print_json(document | ({} if before is None else {"known_damage": _as_known(before)}))
    else:
        _print(result, trust, report, known, quiet)
        for what, path in (("report", report), ("list of paths", failed)):
            if path is not None and not (quiet and result.ok):
                say(f"The {what} is written to {path}", err=True)
    if trust is not None and trust.error is not None:
        sys.exit(trust.error.exit_code)
    if not result.ok or known is not None:
        sys.exit(DamageError.exit_code if known is not None else result.exit_code)


def _as_known(known: KnownDamage) -> dict[str, Any]:
    return {"findings": len(known.report.findings), "report": str(known.written)}


def _bundle_id(text: str | None) -> str | None:
    """The id that is meant by `--id`.

    Raises:
        UsageError: neither an id nor a complete lock.
    """
    from stage.digests import is_hex
    from stage.files import read_file

    if text is None:
        return None
    if is_hex(value := text.removeprefix("sha256:").lower(), 64):
        return value
    try:
        data = read_file(Path(text))
    except OSError as error:
        raise UsageError(
            f"--id {text}: neither an id (64 hex digits) nor a lock that can be read "
            f"({error.strerror}).",
            "`stage show` prints the id where the bundle was made; its lock is the x.lock beside "
            "the manifest.",
        ) from None
    from stage.lock.read import read_lock

    lock = read_lock(data, text)
    if not lock.is_complete:
        raise UsageError(
            f"--id {text}: an incomplete lock: no bundle was ever finished with it.",
            "Give the id of the finished bundle: `stage show BUNDLE` prints it.",
        )
    return lock.id


def _trust(bundle: Path, signers: Path | None) -> Trust | None:
    if signers is None:
        return None
    from stage.bundle.signature import Trust

    return Trust.check(bundle, signers)


def _leave_receipt(report: VerificationReport, reporter: Reporter) -> None:
    """Writes a receipt. Where that fails, prints it and continues: the verdict holds without."""
    from stage.bundle.receipt import record
    from stage.bundle.verifier import state_folder

    try:
        why_not = record(state_folder(os.environ), report)
    except OSError as error:
        why_not = (
            "the verdict holds; no receipt of it could be written: "
            f"{error.filename}: {error.strerror}"
        )
    if why_not:
        reporter.note(why_not)


def _known_damage(report: VerificationReport) -> KnownDamage | None:
    """The damage on record: found now, or by an earlier verification and not repaired since."""
    from stage.bundle.receipt import find_damage
    from stage.bundle.verifier import state_folder

    was_all_read = report.ok and report.level != "fast"
    if was_all_read or report.is_another:
        return None
    return find_damage(state_folder(os.environ), report.root)


def _check_output(option: str, path: Path, bundle: Path) -> None:
    """Whether a file can be written is found out before hours of reading, not after."""
    from stage.files import check_folder_of

    if bundle.resolve() in path.resolve().parents:
        raise UsageError(
            f"{option} {path}: inside the bundle it would itself be an extra file.",
            "Put it beside the bundle.",
        )
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder.", "Give the name of a file.")
    check_folder_of(path, f"{option} ")


def _print(
    result: VerificationReport,
    trust: Trust | None,
    report: Path | None,
    known: KnownDamage | None,
    quiet: bool,
) -> None:
    from stage.bundle.bundle import VERIFIER
    from stage.bundle.report import format_findings
    from stage.bundle.verifier import suggest_fixes

    is_signed = trust is not None and trust.signer is not None
    for line in format_findings(result):
        say(line)
    if not result.ok:
        kept = None if known is None else known.written
        advice = "\n     ".join(suggest_fixes(result, report or kept))
        damage = DamageError(
            f"{result.root}: {human_count(len(result.findings), 'finding')}.", advice
        )
        say(f"error: {damage}", err=True)
        if kept is not None:
            say(f"The report is kept in {kept}", err=True)
    elif known is not None:
        _print_known_damage(result, known)
    elif not quiet:
        _print_sound(result, is_signed)
    if not is_signed and _has_unknown_verifier(result):
        say(
            f"{result.root}: its {VERIFIER} is none that this version of airlift knows: another "
            "version wrote it, or somebody replaced it. The bundle id does not cover it: do not "
            "run it unless the bundle is signed (--signers)",
            err=True,
        )
    if trust is not None and trust.signer is not None and not quiet:
        but = (
            "" if result.ok else ": the signature is good; what is damaged is not as it was signed"
        )
        say(f"signed by {trust.signer}{but}")
    if trust is not None and trust.error is not None:
        say(f"error: {trust.error}", err=True)


def _has_unknown_verifier(result: VerificationReport) -> bool:
    from stage.bundle.bundle import VERIFIER, is_known_verifier
    from stage.files import read_file

    return VERIFIER in result.unproven and not is_known_verifier(
        read_file(result.root / VERIFIER, follow=False)
    )


def _print_sound(result: VerificationReport, is_signed: bool) -> None:
    from stage.bundle.verifier import describe_proof

    files, size = human_count(result.files, "file"), human_size(result.size)
    say(f"{result.root}: sound: {files}, {size}, {_how(result)}")
    for line in describe_proof(result, is_signed):
        say(line)


def _print_known_damage(result: VerificationReport, known: KnownDamage) -> None:
    """For a verification that does not read the bytes that an earlier one found to be damaged."""
    import time

    from stage.bundle.verifier import suggest_fixes

    say(f"{result.root}: known to be damaged; {_how(result)}")
    findings = human_count(len(known.report.findings), "finding")
    advice = "\n     ".join(suggest_fixes(known.report, known.written))
    when = known.describe(time.time())
    damage = DamageError(f"{result.root}: {findings}: {when}, and not repaired since.", advice)
    say(f"error: {damage}", err=True)


def _how(result: VerificationReport) -> str:
    if result.level == "deep":
        return "every byte is as it was fetched, and everything that could be checked loads"
    if result.level == "full":
        return "every byte is as it was fetched"
    return "names and sizes are right (bytes not read)"
