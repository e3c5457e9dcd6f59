"""`stage verify`: proves that a bundle is as it was fetched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from stage.cli.base import (
    bundle_argument,
    json_option,
    print_json,
    quiet_option,
    say,
    signers_option,
)
from stage.errors import UsageError
from stage.files import is_hex, read_file, write_atomically


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
    "--jobs", type=click.IntRange(1, 256), help="Processes that read. Default: one per core."
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
    from stage.bundle.bundle import check_outputs, verify_shown
    from stage.bundle.signature import Trust
    from stage.bundle.verifier import state_folder, write_lists
    from stage.cli.verdict import (
        exit_code,
        keep_receipt,
        known_damage,
        print_verdict,
        verdict_json,
    )
    from stage.progress import Reporter

    if deep and fast:
        raise UsageError(
            "--deep cannot be combined with --fast: it loads files after every byte was read.",
            "Omit one of them.",
        )
    if deep:
        from stage.installation import check_libraries

        check_libraries("--deep", "pyarrow")
    bundle_id = _bundle_id_of(id_text)
    check_outputs(bundle, {"--report": report, "--failed": failed})
    state = state_folder(os.environ)
    with Reporter(quiet=quiet or as_json) as reporter:
        trust = Trust() if signers is None else Trust.check(bundle, signers)
        result = verify_shown(
            bundle,
            "fast" if fast else "full",
            reporter,
            jobs=jobs,
            bundle_id=bundle_id,
            state=state,
            resume=not no_resume,
        )
        if deep:
            from stage.staging.load_test import verify_deep

            result = verify_deep(result, reporter)
        trust = trust.with_findings(bundle, result.findings)
        keep_receipt(result, trust, state, reporter)
    known = known_damage(result, state)
    written = list(
        write_lists(result, verdict_json(result, trust, None), report, failed, write_atomically)
    )
    if as_json:
        print_json(verdict_json(result, trust, known))
    else:
        print_verdict(result, trust, report, known, quiet=quiet)
        for line in () if quiet and result.ok else written:
            say(line, err=True)
    if code := exit_code(result, trust, known):
        sys.exit(code)


def _bundle_id_of(text: str | None) -> str | None:
    """The id that is meant by `--id`.

    Raises:
        UsageError: neither an id nor a complete lock.
    """
    if text is None:
        return None
    from stage.lock.model import read_lock

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
    lock = read_lock(data, text)
    if not lock.is_complete:
        raise UsageError(
            f"--id {text}: an incomplete lock: no bundle was ever finished with it.",
            "Give the id of the finished bundle: `stage show BUNDLE` prints it.",
        )
    return lock.id
