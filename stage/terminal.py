"""What every command of `stage` shares: how faults become words and exit codes, how text reaches a terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from stage.errors import IncompleteError, StageError, UsageError, as_shown
from stage.signals import Ended, told_to_end


class Group(click.Group):
    """Turns every fault a user can meet into one short paragraph on stderr and the right exit code.

    Args:
        elsewhere: commands that are imported when they are asked for: name -> the module that has one of that name.
    """

    make_room = "Make room there (`stage gc` drops what no bundle uses from the shared store)"
    """What to do where the disk is full."""

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere = elsewhere or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._elsewhere and cmd_name not in self.commands:
            self.add_command(getattr(import_module(self._elsewhere[cmd_name]), cmd_name))
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        _require_utf8_names()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a name the locale cannot spell is no reason to fail
        try:
            with told_to_end():
                super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as request:
            sys.exit(request.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "stage"
            fail(UsageError(error.format_message(), f"{command} --help"))
        except (KeyboardInterrupt, click.Abort):
            _leave_at_once(IncompleteError("Interrupted. What is already here is kept.", "Run the same command again."))
        except Ended as end:
            told = f"Ended by {end.name}. What is already here is kept."
            _leave_at_once(IncompleteError(told, "Run the same command again: it goes on from there.", end.exit_code))
        except BrokenPipeError:
            sys.stderr.close()  # the reader went away (`stage verify | head`): nobody hears words, but 0 would be a lie
            sys.exit(IncompleteError.exit_code)
        except StageError as error:
            fail(error)
        except OSError as error:
            fail(_from_os_error(error, self.make_room))
        sys.exit(0)


def _require_utf8_names() -> None:
    """Starts over in UTF-8 mode under a locale (`de_DE.ISO-8859-1`) in which Python would misread and miswrite names.

    A bundle's names are UTF-8 on every disk; PEP 540 has only `C` and `POSIX` covered.
    """
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8") and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def fail(error: StageError) -> NoReturn:
    """Says what went wrong and exits with its code."""
    say(f"error: {error}", err=True)
    sys.exit(error.exit_code)


def _leave_at_once(error: StageError) -> NoReturn:
    """Ends without waiting for threads, which may be waiting for a server: whatever they hold can be gone on with."""
    with suppress(OSError):  # the terminal may be what went away
        say(f"error: {error}", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(error.exit_code)


def say(text: str, *, err: bool = False) -> None:
    """Prints text with whatever could rewrite a terminal escaped."""
    click.echo(as_shown(text), err=err)


_NO_SUCH_PLACE = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def _from_os_error(error: OSError, make_room: str) -> StageError:
    """A file system's refusal, in words. Disk full and quota exceeded are the ones people meet."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # running it again would end the same
        may = "That disk is mounted read-only" if error.errno == errno.EROFS else "You have no right to do that there"
        return UsageError(f"{what}.", f"{may}: use a folder of yours (`ls -ld` and `id` tell who may).")
    if error.errno in _NO_SUCH_PLACE:
        return UsageError(f"{what}.", "Nothing can lie at that path: give another.")
    remedies = {
        errno.ENOSPC: f"The disk is full. {make_room}",
        errno.EDQUOT: "Your quota is used up (of bytes, or of files). Make room there, or use another folder",
    }
    remedy = remedies.get(error.errno or 0, "Mend that (space, quota, permissions)")
    return IncompleteError(f"{what}.", f"{remedy}; then run the same command again: it goes on from there.")


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Only errors.")
signers_option = click.option(
    "--signers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Demand a signature by somebody in FILE (as ssh's allowed_signers); exit code 4 without.",
)
