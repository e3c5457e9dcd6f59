"""The `stage` command: parses, prints, sets the exit code; nothing else.

Each command imports what it needs inside itself, so that `stage verify --help` starts in a blink on a login node.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stage import __version__, cli_carry
from stage.errors import DamageError, IncompleteError, StageError, UsageError, as_shown

if TYPE_CHECKING:
    from stage.sign import Trust
    from stage.verify import VerificationReport


class _Group(click.Group):
    """Turns every fault a user can meet into one short paragraph on stderr and the right exit code."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        _require_utf8_names()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a name the locale cannot spell is no reason to fail
        try:
            super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as request:
            sys.exit(request.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "stage"
            _fail(UsageError(error.format_message(), f"{command} --help"))
        except (KeyboardInterrupt, click.Abort):
            _fail(IncompleteError("Interrupted. What is already here is kept.", "Run the same command again."))
        except BrokenPipeError:
            sys.stderr.close()  # the reader went away (`stage verify | head`): nobody hears words, but 0 would be a lie
            sys.exit(IncompleteError.exit_code)
        except StageError as error:
            _fail(error)
        except OSError as error:
            _fail(_from_os_error(error))
        sys.exit(0)


def _require_utf8_names() -> None:
    """Starts over in UTF-8 mode under a locale (`de_DE.ISO-8859-1`) in which Python would misread and miswrite names.

    A bundle's names are UTF-8 on every disk; PEP 540 has only `C` and `POSIX` covered.
    """
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8") and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _fail(error: StageError) -> NoReturn:
    _say(f"error: {error}", err=True)
    sys.exit(error.exit_code)


def _say(text: str, *, err: bool = False) -> None:
    click.echo(as_shown(text), err=err)


def _from_os_error(error: OSError) -> StageError:
    """A file system's refusal, in words. Disk full and quota exceeded are the ones people meet."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return IncompleteError(f"{what}.", "Mend that (space, quota, permissions), then run the same command again.")


_manifest = click.argument("manifest", type=click.Path(path_type=Path))
_bundle = click.argument("bundle", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there.")
_signers = click.option(
    "--signers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Demand a signature by somebody in FILE (as ssh's allowed_signers); exit code 4 without.",
)
_quiet = click.option("-q", "--quiet", is_flag=True, help="Only errors.")
_verbose = click.option("-v", "--verbose", is_flag=True, help="Also every retry and every file left out.")
_endpoint = click.option(
    "--endpoint", metavar="URL", help="The Hub or a mirror of it. Default: $HF_ENDPOINT, else https://huggingface.co."
)
_allow_pickle = click.option(
    "--allow-pickle",
    is_flag=True,
    help="Take Hub models that have only pickles: converted to safetensors here (needs torch).",
)
_EVERY_ASSET = "*"
_update = click.option(
    "--update",
    "updates",
    multiple=True,
    is_flag=False,
    flag_value=_EVERY_ASSET,
    metavar="[ASSET]",
    help="Resolve anew what the lock pins: one asset, or all. May be repeated.",
)


class _Updating(click.Command):
    """A command whose `--update` may go without a value, even right before MANIFEST.

    click takes whatever follows for the value. An asset's name is told from a manifest by its form: names have no
    `/`, and manifests end in .yaml or .yml (`--update=NAME` takes any name).
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for index, argument in enumerate(args[:-1]):
            if argument == "--":
                break
            if argument == "--update" and ("/" in args[index + 1] or args[index + 1].endswith((".yaml", ".yml"))):
                args = [*args[:index], f"--update={_EVERY_ASSET}", *args[index + 1 :]]
        return super().parse_args(ctx, args)


def _pinning(command: Callable[..., None]) -> Callable[..., None]:
    for option in (_endpoint, _update, _quiet, _verbose, _json):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stage")
def main() -> None:
    """Carries models, datasets and files over an air gap: one folder, every byte accounted for.

    \b
    laptop:   stage fetch manifests/my.yaml -o bundle
              rsync -a --partial bundle/ me@cluster:bundle/
    cluster:  stage verify bundle

    Exit codes: 0 sound or done; 1 damage or failure found; 2 wrong usage or a bad manifest; 3 refused by policy;
    4 signature missing or wrong; 5 could not finish, run it again.
    """


@main.command(cls=_Updating)
@_manifest
@_allow_pickle
@_pinning
def lock(
    manifest: Path,
    allow_pickle: bool,
    endpoint: str | None,
    updates: tuple[str, ...],
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Resolve MANIFEST to exact commits and files, and write that as its .lock; download nothing."""
    from stage.fetch import load_or_resolve
    from stage.progress import Reporter
    from stage.sources import Sources

    with Reporter(quiet=quiet or as_json, verbose=verbose) as reporter:
        sources = Sources(endpoint, reporter, allow_pickle=allow_pickle)
        resolved = load_or_resolve(manifest, sources, updates=updates, reporter=reporter)
    if as_json:
        click.echo(json.dumps({"lock": str(resolved.lock_path), "changed": resolved.changed}))


@main.command(cls=_Updating)
@_manifest
@click.option(
    "-o", "--output", "bundle", required=True, type=click.Path(path_type=Path), help="The bundle's folder, new or not."
)
@click.option("--dry-run", is_flag=True, help="Print the plan with sizes; download and write nothing.")
@click.option("--locked", is_flag=True, help="Follow the .lock exactly; refuse to resolve anything anew.")
@click.option("--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Files downloaded at once.")
@_allow_pickle
@click.option(
    "--offline-check/--no-offline-check",
    default=True,
    show_default=True,
    help="At the end, load what was fetched in a process without network; what does not load is no bundle.",
)
@_pinning
def fetch(
    manifest: Path,
    bundle: Path,
    dry_run: bool,
    locked: bool,
    jobs: int,
    allow_pickle: bool,
    offline_check: bool,
    endpoint: str | None,
    updates: tuple[str, ...],
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Download what MANIFEST asks for into one checksummed folder.

    Follows MANIFEST's .lock, and writes one where there is none. Run it again after any interruption: it goes on
    where it stopped. Run it again after changing the manifest: it fetches the difference.
    """
    from stage.fetch import fetch_manifest
    from stage.progress import Reporter

    with Reporter(quiet=quiet or as_json, verbose=verbose) as reporter:
        outcome = fetch_manifest(
            manifest,
            bundle,
            endpoint=endpoint,
            jobs=jobs,
            locked=locked,
            updates=updates,
            dry_run=dry_run,
            reporter=reporter,
            allow_pickle=allow_pickle,
            offline_check=offline_check,
        )
    if as_json:
        click.echo(json.dumps(outcome.to_json(), indent=1))
    elif not dry_run and not quiet:
        click.echo(f"bundle id {outcome.bundle_id}")
        click.echo(
            f"next: rsync -a --partial {bundle}/ me@cluster:{bundle.name}/   then there: stage verify {bundle.name}"
        )


@main.command()
@_bundle
@_signers
@_json
def show(bundle: Path, signers: Path | None, as_json: bool) -> None:
    """What is inside BUNDLE: assets, revisions, licences, sizes, rows, id, signature."""
    from stage.show import describe, describe_json

    if as_json:
        click.echo(json.dumps(describe_json(bundle, signers), indent=1, ensure_ascii=False))
    else:
        _say(describe(bundle, signers))


@main.command()
@_bundle
@click.option("--fast", is_flag=True, help="Only presence and size of every file, not its bytes.")
@click.option("--deep", is_flag=True, help="Also load configs, weights' headers, tokenizers and parquet footers.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Threads that read. Default: one a core.")
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="FILE", help="Also write the findings there, as JSON."
)
@_signers
@_quiet
@_json
def verify(
    bundle: Path,
    fast: bool,
    deep: bool,
    jobs: int | None,
    report: Path | None,
    signers: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prove that every byte of BUNDLE is as it was fetched. Never touches the network.

    Finds all damage, not the first: exit code 1 and one line for each file that is missing, extra or changed.
    """
    from stage.disk import write_atomically
    from stage.progress import Reporter
    from stage.sign import Trust
    from stage.verify import verify as verify_bundle

    if fast and deep:
        raise UsageError("--fast and --deep contradict each other.", "Leave one of them out.")
    if report is not None:
        _check_report_path(report, bundle)
    with Reporter(quiet=quiet or as_json) as reporter, reporter.bytes_bar("verify", 0) as bar:
        trust = Trust.check(bundle, signers)
        result = verify_bundle(bundle, "fast" if fast else "full", jobs=jobs, progress=bar)
        if deep:
            from stage.loadcheck import verify_deep

            result, unchecked = verify_deep(result)
            for said in unchecked:
                reporter.note(f"not checked: {said}")
    trust = trust.with_findings(bundle, result.findings)
    text = json.dumps(result.to_json() | trust.to_json(), indent=1) + "\n"
    if report is not None:
        write_atomically(report, text.encode())
    if as_json:
        click.echo(text, nl=False)
    else:
        _print_verification(result, trust, quiet)
    if trust.error is not None:
        sys.exit(trust.error.exit_code)
    if not result.ok:
        sys.exit(1)


def _check_report_path(report: Path, bundle: Path) -> None:
    """Before hours of reading, not after."""
    if bundle.resolve() in report.resolve().parents:
        raise UsageError(
            f"--report {report}: inside the bundle it would itself be an extra file.", "Put it beside the bundle."
        )
    if report.is_dir():
        raise UsageError(f"--report {report}: is a folder.", "Give the name of a file.")
    if not report.parent.is_dir():
        raise UsageError(f"--report {report}: there is no folder {report.parent}.", f"mkdir -p {report.parent}")


def _print_verification(result: VerificationReport, trust: Trust, quiet: bool) -> None:
    from stage.disk import human_count, human_size

    for finding in result.findings:
        _say(str(finding))
    if result.ok:
        how = {
            "fast": "names and sizes are right (bytes not read)",
            "full": "every byte is as it was fetched",
            "deep": "every byte is as it was fetched, and everything that could be checked loads",
        }[result.level]
        if not quiet:
            _say(f"{result.root}: sound: {human_count(result.files, 'file')}, {human_size(result.size)}, {how}")
            click.echo(f"bundle id {result.bundle_id}")
            if trust.signer is not None:
                _say(f"signed by {trust.signer}")
    else:
        damage = DamageError(
            f"{result.root}: {human_count(len(result.findings), 'finding')}.",
            "Copy again with `rsync -c`, or run `stage fetch` again where the bundle was made.",
        )
        _say(f"error: {damage}", err=True)
    if trust.error is not None:
        _say(f"error: {trust.error}", err=True)


main.add_command(cli_carry.push)
main.add_command(cli_carry.sign)
