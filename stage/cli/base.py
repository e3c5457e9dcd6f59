"""The common parts of all commands: help in sections, safe output, errors with exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from stage.errors import (
    IncompleteError,
    StageError,
    UsageError,
    nearest_name,
    shortage,
    suggest,
)
from stage.processes import Ended, ending_signals
from stage.progress import has_colour, shown

_WHOLE = 1000  # characters of a summary: it is never cut


class Group(click.Group):
    """Turns every fault a user can meet into one short paragraph on stderr and the right exit code.

    Args:
        elsewhere: commands that are imported at their first use: the module of each, by name.
        sections: the heading of each part of the help -> its commands, in order.
    """

    program = "stage"

    def free_space(self, folder: Path) -> str:
        """The remedy for a full disk."""
        from stage.staging.working_folder import clearing, store_from

        return f"Free space there{clearing(store_from(os.environ), folder)}"

    def __init__(
        self,
        *args: Any,
        elsewhere: Mapping[str, str] | None = None,
        sections: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._elsewhere = elsewhere or {}
        self._sections = sections or {}
        super().__init__(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._elsewhere})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands in their sections, with aligned summaries."""
        every = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        names = [name for name, command in every.items() if command and not command.hidden]
        placed = {name for section in self._sections.values() for name in section}
        parts = {**self._sections, "More": [name for name in names if name not in placed]}
        width = max(map(len, names), default=0)
        with formatter.section("Commands"):
            for heading, members in parts.items():
                if rows := [
                    (name.ljust(width), command.get_short_help_str(_WHOLE))
                    for name in members
                    if (command := every.get(name)) is not None
                ]:
                    with formatter.section(heading):
                        formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._elsewhere and cmd_name not in self.commands:
            self.add_command(getattr(import_module(self._elsewhere[cmd_name]), cmd_name))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Adds the nearest command to the error about an unknown one.

        click does so only since 8.3, and only with the commands that are imported.
        """
        name = args[0]
        if not ctx.resilient_parsing and name[:1] != "-" and self.get_command(ctx, name) is None:
            path = ctx.command_path
            nearest = nearest_name(name, self.list_commands(ctx))
            question = f"Did you mean `{path} {nearest}`? " if nearest else ""
            raise UsageError(f"No such command '{name}'.", f"{question}All commands: {path} --help")
        return super().resolve_command(ctx, args)

    def _called(self, words: Sequence[str]) -> str:
        """The command of a call: click has no context for an option without its value."""
        is_known = words and words[0] in self.list_commands(click.Context(self))
        return f"{self.program} {words[0]}" if is_known else self.program

    def remedy_of(self, error: click.ClickException, command: str) -> str:
        """What to do after a wrong option or argument of a command."""
        return f"{command} --help"

    def ending_signals(self) -> AbstractContextManager[None]:
        """What SIGTERM and SIGHUP do to a command."""
        return ending_signals()

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        given = args[0] if args else kwargs.get("args")
        words = list(sys.argv[1:] if given is None else given)
        ours = _own_words(words)
        words[:ours] = map(_with_home, words[:ours])
        _Document.is_due = "--json" in words[:ours]
        _check_utf8_names()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A name that the locale cannot encode must not end the command.
                stream.reconfigure(errors="backslashreplace")
        try:
            with self.ending_signals():
                super().main(*args[1:], **{**kwargs, "args": words, "standalone_mode": False})
        except click.exceptions.Exit as request:
            sys.exit(request.exit_code)
        except click.ClickException as error:
            if (
                type(error).__name__ == "NoArgsIsHelpError"
            ):  # click 8.2; older ones print the help themselves
                error.show()
                sys.exit(2)
            context = getattr(error, "ctx", None)
            command = context.command_path if context else self._called(words)
            message = " ".join(error.format_message().split())  # click lists choices with tabs
            fail(UsageError(message, self.remedy_of(error, command)))
        except (KeyboardInterrupt, click.Abort):
            _leave_at_once(
                IncompleteError(
                    "Interrupted. What is already here is kept.", "Run the same command again."
                )
            )
        except Ended as end:
            message = f"Ended by {end.name}. What is already here is kept."
            _leave_at_once(
                IncompleteError(message, "Run the same command again: it resumes.", end.exit_code)
            )
        except BrokenPipeError:
            # The reader is gone (`stage verify | head`): no message, but not exit code 0.
            sys.stderr.close()
            sys.exit(IncompleteError.exit_code)
        except StageError as error:
            fail(error)
        except OSError as error:
            fail(_from_os_error(error, self.free_space))
        except Exception as error:  # noqa: BLE001 - 1 means damage: what is not foreseen must not say so
            _RESERVE.clear()
            fail(shortage(error) or _unforeseen(error))
        sys.exit(0)


def _own_words(words: list[str]) -> int:
    """How many words of a command line are not of a user's own command (`exec`, `trace`)."""
    if "--" in words:
        return words.index("--")
    return 0 if words[:1] in (["exec"], ["trace"]) else len(words)


def _with_home(word: str) -> str:
    """A word with the home folder in place of the `~` of `--output=~/x`.

    Shells replace it only at the beginning of a word. Without this a folder `~` would be made.
    """
    option, is_home, path = word.partition("=~/")
    if not (word.startswith("-") and is_home):
        return word
    return f"{option}={os.path.expanduser('~/')}{path}"  # noqa: PTH111 - `Path` drops a last slash


def _check_utf8_names() -> None:
    """Restarts in UTF-8 mode under a locale such as `de_DE.ISO-8859-1`.

    A bundle's names are UTF-8 on every disk; Python would read and write them wrong. PEP 540 covers
    only the locales `C` and `POSIX`.
    """
    if (
        sys.getfilesystemencoding().lower() not in ("utf-8", "utf8")
        and os.environ.get("PYTHONUTF8") != "1"
    ):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


# Address space to print an error with when all other is used. None of it is touched.
_RESERVE = [bytearray(4 << 20)]


def _unforeseen(error: Exception) -> StageError:
    """An error of Airlift itself, printed with its traceback."""
    traceback.print_exception(error)
    return IncompleteError(
        f"Airlift failed unexpectedly: {error!r}.", "Report it, with the lines above."
    )


def fail(error: StageError) -> NoReturn:
    """Prints an error and exits with its code."""
    _print_error(error)
    sys.exit(error.exit_code)


def _print_error(error: StageError) -> None:
    """Prints an error on stderr; with --json also as a document, if none is there yet."""
    if _Document.is_due:
        found = {"message": error.message, "remedy": error.remedy}
        print_json({"format": 1, "exit_code": error.exit_code, "error": found})
    say(f"error: {error}", err=True)


class _Document:
    """The one JSON document that a command with --json prints."""

    is_due = False  # it was asked for, and is not printed yet


def print_json(document: Mapping[str, Any]) -> None:
    """Prints the document of --json."""
    _Document.is_due = False
    click.echo(json.dumps(document, indent=1))


@contextmanager
def silent(*, if_: bool) -> Iterator[None]:
    """Discards what this process and its children print on stdout, for -q."""
    if not if_:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        try:
            with redirect_stdout(nothing):
                yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _leave_at_once(error: StageError) -> NoReturn:
    """Ends without waiting for threads, which may wait for a server. Their work can be resumed."""
    with suppress(OSError):  # the terminal may be what went away
        _print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(error.exit_code)


def say(text: str, *, err: bool = False) -> None:
    """Prints text as a terminal or a file should get it: see `stage.progress`."""
    stream = sys.stderr if err else sys.stdout
    click.echo(
        shown(text, stream, os.environ),
        err=err,
        color=has_colour(stream, os.environ),
    )


_NO_SUCH_PLACE = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def _from_os_error(error: OSError, free_space: Callable[[Path], str]) -> StageError:
    """An error of the file system with its remedy. Most are a full disk or quota."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if error.errno in (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    ):  # running it again would end the same
        may = (
            "That disk is mounted read-only"
            if error.errno == errno.EROFS
            else "You have no right to do that there"
        )
        return UsageError(
            f"{what}.", f"{may}: use a folder of yours (`ls -ld` and `id` show who may)."
        )
    if error.errno in _NO_SUCH_PLACE:
        return UsageError(f"{what}.", "No file can be at that path: give another.")
    remedies = {
        errno.ENOSPC: "The disk is full. " + free_space(Path(str(error.filename or "."))),
        errno.ENOMEM: "There is not enough memory (`ulimit -v`, the job's memory)",
        errno.EAGAIN: "No more processes can be started (`ulimit -u`)",
        errno.EFBIG: "No file may be larger here (`ulimit -f`, or that disk)",
        errno.EMFILE: "Too few files may be open (`ulimit -n`)",
        errno.EDQUOT: "Your quota is used up (of bytes, or of files). "
        "Free space there, or use another folder",
    }
    remedy = remedies.get(error.errno or 0, "Fix that (space, quota, permissions)")
    return IncompleteError(f"{what}.", f"{remedy}; then run the same command again: it resumes.")


class Choice(click.Choice):  # type: ignore[type-arg]  # click 8.0's is not generic
    """A choice whose error names the nearest value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value not in self.choices:
            self.fail(
                suggest(
                    value, self.choices, f"{value!r} is not one of: {', '.join(self.choices)}."
                ),
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there."
)
endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="The Hub or a mirror of it. Default: $HF_ENDPOINT, else https://huggingface.co.",
)
new_manifest_option = click.option(
    "-o",
    "--output",
    "manifest",
    default="manifest.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The manifest to write; never one that is there.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, is_eager=True, help="Only errors.")
signers_option = click.option(
    "--signers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Demand a signature by somebody in FILE (as ssh's allowed_signers); exit code 4 without.",
)
