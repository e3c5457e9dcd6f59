"""`stage init`: writes the manifest of names on the Hub and of paths on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stage.cli.base import endpoint_option, new_manifest_option, quiet_option, say, silent
from stage.errors import IncompleteError, UsageError, quoted, suggest, suggest_path
from stage.files import check_new, write_new
from stage.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stage.staging.new_manifest import LocalEntry, RepositoryLookup

_SIZES = "   (its sizes first: --dry-run)"


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1)
@new_manifest_option
@endpoint_option
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
    from stage.lock.manifest import BY_SUFFIX, is_repository_id, names_local_file

    path = Path(name)
    if names_local_file(name, Path()) or path.is_dir():
        return True
    is_file = path.suffix.lower() in BY_SUFFIX or (path.suffix[1:].isalpha() and "/" not in name)
    bare = name.removeprefix("datasets/").removeprefix("models/")
    return "://" not in name and (is_file or not is_repository_id(bare))


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
