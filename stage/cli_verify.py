"""`stage verify`: the whole of a bundle, one shard of it, or the verdict of many shards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stage.errors import DamageError, UsageError
from stage.terminal import fail, json_option, quiet_option, say

if TYPE_CHECKING:
    from stage.findings import Shard, VerificationReport


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE")
@click.option("--fast", is_flag=True, help="Only presence and size of every file, not its bytes.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Threads that read. Default: one a core.")
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
@click.option("--merge", is_flag=True, help="Take the reports of all shards instead of BUNDLE; give the verdict.")
@quiet_option
@json_option
def verify(
    paths: tuple[Path, ...],
    fast: bool,
    jobs: int | None,
    report: Path | None,
    shard_text: str | None,
    merge: bool,
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
    from stage.findings import read_report
    from stage.progress import Reporter
    from stage.shards import merge as merge_reports
    from stage.shards import parse_shard, report_path
    from stage.verify import verify as verify_bundle

    shard = parse_shard(shard_text, os.environ) if shard_text else None
    if merge and (shard or fast):
        raise UsageError("--merge: takes reports, so it goes without --shard and --fast.", "stage verify --help")
    if not merge and len(paths) > 1:
        raise UsageError(f"{paths[1]}: one bundle at a time.", "Reports of shards go with --merge.")
    if report is not None and shard is not None:
        report = report_path(report, shard)
    if report is not None:
        _check_report_path(report, None if merge else paths[0])
    if merge:
        result = merge_reports([(path, read_report(path)) for path in paths])
    else:
        with Reporter(quiet=quiet or as_json) as reporter, reporter.bytes_bar("verify", 0) as bar:
            result = verify_bundle(paths[0], "fast" if fast else "full", jobs=jobs, shard=shard, progress=bar)
    text = json.dumps(result.to_json(), indent=1) + "\n"
    if report is not None:
        write_atomically(report, text.encode())
    if as_json:
        click.echo(text, nl=False)
    else:
        _print(result, result.shard, report, quiet)
    if not result.ok:
        sys.exit(1)


def _check_report_path(report: Path, bundle: Path | None) -> None:
    """Before hours of reading, not after."""
    if bundle is not None and bundle.resolve() in report.resolve().parents:
        raise UsageError(
            f"--report {report}: inside the bundle it would itself be an extra file.", "Put it beside the bundle."
        )
    if report.is_dir():
        raise UsageError(f"--report {report}: is a folder.", "Give the name of a file.")
    if not report.parent.is_dir():
        raise UsageError(f"--report {report}: there is no folder {report.parent}.", f"mkdir -p {report.parent}")


def _print(result: VerificationReport, shard: Shard | None, report: Path | None, quiet: bool) -> None:
    from stage.disk import human_count, human_size

    for finding in result.findings:
        say(str(finding))
    if not result.ok:
        carry = report or "FILE"
        fail(
            DamageError(
                f"{result.root}: {human_count(len(result.findings), 'finding')}.",
                f"Carry only what is damaged: {'' if report else f'stage verify {result.root} --report {carry}; '}"
                f"where the bundle was made: stage patch BUNDLE --report {carry} -o PATCH. Or copy again: rsync -c.",
            )
        )
    if quiet:
        return
    whole = (
        "every byte is as it was fetched" if result.level == "full" else "names and sizes are right (bytes not read)"
    )
    if shard is not None:
        how = f"no damage in shard {shard} (the others not read; `stage verify --merge` gives the verdict)"
    else:
        how = whole
    say(f"{result.root}: sound: {human_count(result.files, 'file')}, {human_size(result.size)}, {how}")
    click.echo(f"bundle id {result.bundle_id}")
