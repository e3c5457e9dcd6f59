"""`stage push`, `patch` and `apply`: bring a bundle, or a part of it, to another machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stage.cli.base import bundle_argument, quiet_option, say
from stage.errors import DamageError, UsageError, quoted
from stage.files import check_folder_of, human_count, human_size, write_atomically
from stage.progress import Reporter

if TYPE_CHECKING:
    from stage.carry.push import PushOutcome


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("target", metavar="HOST:DIR")
@click.option(
    "--ssh", default="ssh", show_default=True, metavar="COMMAND", help="E.g. 'ssh -p 2222 -i KEY'."
)
@click.option(
    "--delete", is_flag=True, help="Remove files from the bundle at DIR that BUNDLE does not have."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file for findings at DIR. Default: BUNDLE.report.json, if there are any.",
)
@quiet_option
def push(
    bundle: Path,
    target: str,
    ssh: str,
    delete: bool,
    report: Path | None,
    quiet: bool,
) -> None:
    """Send BUNDLE to DIR on HOST with rsync, and verify every byte there.

    Run it again after an interruption: it resumes. HOST verifies with `stage` if it has it, else
    with python3 and the bundle's own stage-verify.py. If it has neither, push prints the command
    that checks the bytes with sha256sum, and exits 5. Without `HOST:`, DIR is a folder here (a
    disk).

    \b
    Examples:
      stage push bundle me@cluster:bundle
      stage push bundle /media/disk/bundle
    """
    from stage.bundle.verifier import state_folder
    from stage.carry.push import push as push_bundle
    from stage.carry.ssh import PushTarget

    place = PushTarget.parse(target)
    if report is not None:
        check_folder_of(report, "--report ")
    with Reporter(quiet=quiet) as reporter:
        outcome = push_bundle(
            bundle,
            place,
            ssh=ssh,
            delete="all" if delete else "nothing",
            reporter=reporter,
            quiet=quiet,
            state=state_folder(os.environ),
        )
    sound = bool(outcome.report["ok"])
    if report is not None or not sound:
        report = report or bundle.resolve().with_name(f"{bundle.resolve().name}.report.json")
        write_atomically(report, (json.dumps(outcome.report, indent=1) + "\n").encode())
    if sound and not quiet:
        _print_push(outcome, bundle)
    if not sound:
        for finding in outcome.report["findings"]:
            say(f"{finding['path']}: {finding['problem']}", err=True)
        raise _damaged_there(outcome, bundle, report, ssh)


_FIRST = "   (if this is a carried disk, copy the bundle to the cluster first)"


def _print_push(outcome: PushOutcome, bundle: Path) -> None:
    from stage.bundle.bundle import Bundle

    repaired = f", {human_count(outcome.repaired, 'file')} repaired" if outcome.repaired else ""
    say(f"{outcome.target}: sound there, every byte (by {outcome.verified_with}){repaired}")
    say(f"bundle id {outcome.bundle_id}")
    host = outcome.target.host
    there, first = (f"on {host}: ", "") if host else ("", _FIRST)
    folder = quoted(outcome.target.folder)
    assets = Bundle.open(bundle).lock.assets.values()
    environments = [asset.folder for asset in assets if asset.kind == "environment"]
    activate = ""
    if environments:
        activate = f"sh {folder}/{environments[0]}/bootstrap.sh ENV; . ENV/activate; "
    say(f"next: {there}{activate}runner check RUN --bundle {folder}{first}")


def _damaged_there(
    outcome: PushOutcome, bundle: Path, report: Path | None, ssh: str
) -> DamageError:
    from stage.carry.push import suggest_repairs

    findings = human_count(len(outcome.report["findings"]), "finding")
    what_to_do = suggest_repairs(outcome, bundle, report or Path("FILE"), ssh)
    return DamageError(
        f"{outcome.target}: {findings}, written to {report}.", "\n     ".join(what_to_do)
    )


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
