"""`stage init`, `sign`, `push`, `patch` and `apply`: parses and prints, as `stage.cli` does.

`stage.cli` adds them to its group. Each command imports its modules inside itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stage.cli.base import bundle_argument, quiet_option, say, silent
from stage.errors import DamageError, IncompleteError, UsageError, quoted, suggest, suggest_path
from stage.files import (
    check_folder_of,
    check_new,
    human_count,
    human_size,
    write_atomically,
    write_new,
)
from stage.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stage.carry.push import PushOutcome
    from stage.staging.new_manifest import LocalEntry, RepositoryLookup

_SIZES = "   (its sizes first: --dry-run)"


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option(
    "-o",
    "--output",
    "manifest",
    default="manifest.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The manifest to write; never one that is there.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="The Hub or a mirror of it. Default: $HF_ENDPOINT, else the public one.",
)
@click.option(
    "--example",
    metavar="NAME",
    help="Write this example instead: bert-large-wikitext2, cifar10, gpt2-wikitext2, ...",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What the cluster offers: also an environment for it, and its environment.yml to start "
    "from.",
)
@quiet_option
def init(
    names: tuple[str, ...],
    manifest: Path,
    endpoint: str | None,
    example: str | None,
    profile: Path | None,
    quiet: bool,
) -> None:
    """Write a manifest for names on the Hub and paths of yours.

    A NAME is org/name, datasets/org/name, or a path: a table, a folder of texts or images, a model.
    The Hub is asked for kind, licence and configs. What is on this machine is taken from here.

    \b
    Examples:
      stage init google-bert/bert-base-uncased datasets/Salesforce/wikitext
      stage init ./reviews.csv ./my-model --profile envs/profiles/cluster.yml
      stage init --example bert-large-wikitext2
    """
    if bool(names) == (example is not None):
        raise UsageError("Give NAME..., or --example NAME.", "stage init --help")
    if example is not None:
        if profile is not None:
            raise UsageError(
                "--example and --profile do not go together.",
                "Write the example, then `profile:` of its environment, if it has one.",
            )
        _write_example(example, manifest, quiet)
        return
    from stage.installation import TO_FETCH, check_libraries

    check_libraries("stage init", *TO_FETCH)
    from stage.staging.new_manifest import (
        ENVIRONMENT,
        LocalEntry,
        look_at,
        new_manifest,
        place_for_bundle,
    )

    check_new(manifest)
    environment = _environment(profile, manifest)
    here = {name: look_at(Path(name)) for name in names if _is_path(name)}
    found = here | _on_the_hub([name for name in names if name not in here], endpoint, quiet)
    every = [found[name] for name in names]
    write_new(manifest, new_manifest(manifest, every, profile))
    if environment:
        write_new(*environment)
    if quiet:
        return
    if profile is not None:
        how = "written" if environment else "the one that is there"
        say(f"{manifest.with_name(ENVIRONMENT)}: {how}; for {profile}")
    for item in every:
        if isinstance(item, LocalEntry):
            how = f", `convert: {item.convert}`" if item.convert else ""
            say(f"{item.path}: on this machine: {item.what}{how}")
            if item.path.suffix == ".py":
                script = f"stage trace -o NEW.yaml -- python {quoted(item.path)}"
                say(f"{item.path}: a script; a manifest of what it loads: {script}")
            continue
        several = (
            f", {len(item.configs)} configs: choose in {manifest}" if len(item.configs) > 1 else ""
        )
        gated = ", gated: accept its terms on the Hub, and set HF_TOKEN" if item.gated else ""
        licence = item.licence or "none stated"
        say(f"{item.repository}: {item.kind}, licence {licence}{gated}{several}")
    say(f"next: stage fetch {quoted(manifest)} -o {place_for_bundle(every)}{_SIZES}")


def _environment(profile: Path | None, manifest: Path) -> tuple[Path, str] | None:
    """The environment file to write beside a manifest, and its text; None: none, or it is there.

    Raises:
        UsageError: the profile has mistakes.
    """
    if profile is None:
        return None
    from stage.environment.spec.profile import Profile, starter
    from stage.staging.new_manifest import ENVIRONMENT

    if not profile.exists():
        from stage.carry.clusters import profiles

        if known := [path for path in profiles(manifest) if path.exists()]:
            options = " or ".join(f"--profile {quoted(path)}" for path in known)
            raise UsageError(f"{profile}: no such profile.", f"clusters.yaml names: {options}")
    text, path = starter(Profile.load(profile)), manifest.with_name(ENVIRONMENT)
    return None if path.exists() else (path, text)


def _is_path(name: str) -> bool:
    """Whether a NAME is looked for on this machine alone: no repository, or hardly any, has it."""
    from stage.lock.manifest import BY_SUFFIX, is_local, is_repository

    path = Path(name)
    if is_local(name, Path()) or path.is_dir():
        return True
    is_file = path.suffix.lower() in BY_SUFFIX or (path.suffix[1:].isalpha() and "/" not in name)
    bare = name.removeprefix("datasets/").removeprefix("models/")
    return "://" not in name and (is_file or not is_repository(bare))


def _on_the_hub(
    names: Sequence[str], endpoint: str | None, quiet: bool
) -> dict[str, RepositoryLookup | LocalEntry]:
    """The repositories with these names.

    Raises:
        UsageError, IncompleteError: as for `stage.staging.new_manifest`.
    """
    if not names:
        return {}
    from stage.staging.new_manifest import look_up
    from stage.staging.sources.source import connect

    with Reporter(quiet=quiet) as reporter:
        hub, _ = connect(endpoint, reporter)
        found: dict[str, RepositoryLookup | LocalEntry] = {}
        for name in names:
            try:
                found[name] = look_up(hub, name)
            except (UsageError, IncompleteError) as error:
                if "://" not in name:
                    error.problem += " No such file or folder is here, either."
                    error.remedy = suggest_path(Path(name), error.remedy)
                if isinstance(error, IncompleteError):
                    error.remedy += " Without a network: stage init --example NAME."
                raise
        return found


def _write_example(name: str, manifest: Path, quiet: bool) -> None:

    folder = Path(__file__).parents[1] / "examples"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise UsageError(
            f"--example {name}: no such example.", suggest(name, known, f"All: {', '.join(known)}.")
        )
    write_new(manifest, (folder / f"{name}.yaml").read_text(encoding="utf-8"))
    with silent(if_=quiet):
        say(f"next: stage fetch {quoted(manifest)} -o bundle{_SIZES}")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="An OpenSSH private key, or the .pub of a key that is in your agent.",
)
@quiet_option
def sign(bundle: Path, key: Path, quiet: bool) -> None:
    """Sign BUNDLE with an OpenSSH key: one signature covers every byte.

    The signature is of the tag manifest.

    \b
    Examples:
      stage sign bundle --key ~/.ssh/id_ed25519
      stage verify bundle --signers allowed_signers    # at the receiver
    """
    from stage.bundle.bundle import SIGNATURE
    from stage.bundle.signature import sign as sign_bundle

    fingerprint = sign_bundle(bundle, key)
    with silent(if_=quiet):
        say(f"{bundle / SIGNATURE}: signed with {fingerprint}")


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
