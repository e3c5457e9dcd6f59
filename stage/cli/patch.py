"""`stage patch` and `stage apply`: carry only the files that are damaged, or new."""

from __future__ import annotations

from pathlib import Path

import click

from stage.cli.base import bundle_argument, quiet_option, say
from stage.errors import UsageError
from stage.files import human_count, human_size
from stage.progress import Reporter


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
@quiet_option
def patch(
    bundle: Path,
    report: Path | None,
    since: Path | None,
    output: Path,
    quiet: bool,
) -> None:
    """Write what another copy of BUNDLE needs to a small folder.

    `stage apply` puts it in place. The patch has whole files: those that are damaged, missing or
    new. What the older bundle has under another name is not in it.

    \b
    Examples:
      stage patch bundle --report damage.json -o patch
      stage patch bundle --since old.lock -o patch
    """
    from stage.bundle.receipt import read_report
    from stage.carry.patch import patch_damage, patch_since

    with Reporter(quiet=quiet) as reporter:
        if report is not None and since is None:
            outcome = patch_damage(bundle, read_report(report), output, reporter)
        elif since is not None and report is None:
            outcome = patch_since(bundle, since, output, reporter)
        else:
            raise UsageError("Give one of --report and --since.", "stage patch --help")
    for path in outcome.left:
        say(f"not repaired: {path} is not of the bundle: move it out of the copy", err=True)
    if not quiet:
        files = f"{human_count(outcome.files, 'file')}, {human_size(outcome.size)}"
        say(f"{output}: {files}, and the files beside the payload")
        say(
            f"next: carry {output} to the other bundle, then there: "
            f"stage apply BUNDLE {output.name}"
        )


@click.command()
@bundle_argument
@click.argument("patch_folder", type=click.Path(path_type=Path), metavar="PATCH")
@quiet_option
def apply(bundle: Path, patch_folder: Path, quiet: bool) -> None:
    """Apply a patch to BUNDLE, and verify every byte.

    PATCH is the folder that `stage patch -o` wrote. It is checked first, and each file is put in
    place whole. Run it again after an interruption.

    \b
    Example:
      stage apply bundle patch
    """
    from stage.carry.patch import apply as apply_patch

    with Reporter(quiet=quiet) as reporter:
        outcome = apply_patch(bundle, patch_folder, reporter)
    if not quiet:
        changed = human_count(len(outcome.changed) + len(outcome.beside), "file")
        beside = f" ({len(outcome.beside)} of them beside the payload)" if outcome.beside else ""
        removed = human_count(len(outcome.removed), "file")
        say(
            f"{bundle}: sound: {changed} put in place{beside}, {removed} removed, "
            "every byte verified"
        )
        say(f"bundle id {outcome.bundle_id}")
