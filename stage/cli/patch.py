"""`stage patch` and `stage apply`: carry only what is damaged, or only what is new."""

from __future__ import annotations

import re
from pathlib import Path

import click

from stage.cli.base import bundle_argument, quiet_option, say
from stage.errors import UsageError

_UNITS = {
    "": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@click.command()
@bundle_argument
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repair the damage in a report of `verify --report`.",
)
@click.option(
    "--since",
    type=click.Path(path_type=Path),
    metavar="OLD.lock",
    help="Turn the bundle of that lock into BUNDLE: carry what is new and changed.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATCH",
    help="A new folder.",
)
@click.option(
    "--volume-size",
    metavar="SIZE",
    help="Split into volumes of at most SIZE (4GB, 700MB), for media.",
)
@quiet_option
def patch(
    bundle: Path,
    report: Path | None,
    since: Path | None,
    output: Path,
    volume_size: str | None,
    quiet: bool,
) -> None:
    """Write what another copy of BUNDLE needs to a small folder.

    `stage apply` puts it in place. Of a damaged file larger than 64 MiB, the patch has only the bad
    16 MiB blocks. A content is in it once, even if several files have it, and not at all if the
    older bundle has it under another name.

    \b
    Examples:
      stage patch bundle --report damage.json -o patch
      stage patch bundle --since old.lock -o patch --volume-size 4GB
    """
    from stage.transfer.make_patch import patch_damage, patch_since
    from stage.util.files import human_count, human_size
    from stage.util.progress import Reporter
    from stage.verify.report import read_report

    size = _parse_size(volume_size) if volume_size else None
    with Reporter(quiet=quiet) as reporter:
        if report is not None and since is None:
            outcome = patch_damage(bundle, read_report(report), output, size, reporter)
        elif since is not None and report is None:
            outcome = patch_since(bundle, since, output, size, reporter)
        else:
            raise UsageError("Give one of --report and --since.", "stage patch --help")
    for path in outcome.left:
        say(f"not repaired: {path} is not of the bundle: move it out of the copy", err=True)
    if not quiet:
        plan = outcome.plan
        parts = f" in {human_count(plan.count, 'volume')}" if size else ""
        say(f"{output}: {human_count(len(plan.pieces), 'piece')}, {human_size(plan.size)}{parts}")
        say(
            f"next: carry {output} to the other bundle, then there: "
            f"stage apply BUNDLE {output.name}"
        )


def _parse_size(text: str) -> int:
    text = re.sub(r"K(i?B)$", r"k\1", text)  # written either way
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]i?B|)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"--volume-size {text}: not a size.", "For example: --volume-size 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


@click.command()
@bundle_argument
@click.argument(
    "patches", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATCH..."
)
@quiet_option
def apply(bundle: Path, patches: tuple[Path, ...], quiet: bool) -> None:
    """Apply a patch to BUNDLE, and verify every byte.

    PATCH is the folder that `stage patch -o` wrote, or any of its volumes: give them together or
    one by one, in any order. It is checked first, and each file is put in place whole. Run it again
    after an interruption.

    \b
    Example:
      stage apply bundle patch
    """
    from stage.transfer.apply_patch import apply as apply_patch
    from stage.util.files import human_count
    from stage.util.progress import Reporter

    with Reporter(quiet=quiet) as reporter:
        outcome = apply_patch(bundle, list(patches), reporter)
    if not quiet:
        changed = human_count(len(outcome.changed) + len(outcome.beside), "file")
        beside = f" ({len(outcome.beside)} of them beside the payload)" if outcome.beside else ""
        removed = human_count(len(outcome.removed), "file")
        say(
            f"{bundle}: sound: {changed} put in place{beside}, {removed} removed, "
            "every byte verified"
        )
        say(f"bundle id {outcome.bundle_id}")
