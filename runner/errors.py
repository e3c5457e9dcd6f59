"""The errors of `runner`, and the parts of `stage` that `runner` uses.

Only this module and `inputs` import `stage`.
"""

from __future__ import annotations

import errno
from pathlib import Path

from stage import __version__
from stage.cli.base import Choice, Group, json_option, print_json, quiet_option, silent
from stage.cli.base import say as print_line
from stage.errors import (
    DamageError,
    IncompleteError,
    Mistakes,
    Place,
    PolicyError,
    StageError,
    UsageError,
    about,
    as_shown,
    join_errors,
    nearest_name,
    quoted,
    says_no_memory,
    shortage,
    suggest,
    suggest_path,
)
from stage.file_kinds import DS_CONFIG, RUN_FILE, check_kind, suggest_file
from stage.files import (
    format_age,
    human_count,
    human_size,
    read_start,
    sync_folder,
    write_atomically,
    write_new,
)
from stage.installation import check_libraries, install_command
from stage.lock.reader import (
    HIDDEN,
    REQUIRED,
    Key,
    Lines,
    Reader,
    Where,
    WrongValueError,
    dotted,
    keys_of,
    lookup,
    plain,
    setting,
)
from stage.lock.yaml_lines import load_yaml_with_lines, read_value, reading_yaml, scalar
from stage.sandbox import close_network, isolated
from stage.text import save_as_utf8

__all__ = [
    "DS_CONFIG",
    "FULL_DISK",
    "HIDDEN",
    "OTHER_DISK",
    "OTHER_RUN",
    "REQUIRED",
    "RUN_FILE",
    "Choice",
    "CommandGroup",
    "DamageError",
    "IncompleteError",
    "Key",
    "Lines",
    "LostPeerError",
    "Mistakes",
    "NeverMetError",
    "NoMemoryError",
    "Place",
    "PolicyError",
    "Reader",
    "StageError",
    "UsageError",
    "Where",
    "WrongValueError",
    "__version__",
    "about",
    "as_shown",
    "check_kind",
    "check_libraries",
    "close_network",
    "dotted",
    "format_age",
    "human_count",
    "human_size",
    "install_command",
    "isolated",
    "join_errors",
    "json_option",
    "keys_of",
    "load_yaml_with_lines",
    "lookup",
    "nearest_name",
    "plain",
    "print_json",
    "print_line",
    "quiet_option",
    "quoted",
    "read_start",
    "read_value",
    "reading_yaml",
    "save_as_utf8",
    "says_no_memory",
    "scalar",
    "setting",
    "shortage",
    "silent",
    "suggest",
    "suggest_file",
    "suggest_path",
    "sync_folder",
    "write_atomically",
    "write_new",
]


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""The system errors of a full disk or quota: for these it helps to free space."""
OTHER_RUN = "another name (--set name=NAME, or `name:` in the run file; with --output, another one)"
"""How a run gets another run folder, here and with --to."""
OTHER_DISK = "another --output (with --to: another `folder:` in clusters.yaml)"
"""How a run gets onto another disk, here and with --to."""


class CommandGroup(Group):
    """The command group of `runner`: here a run fills the disk, not the store of bundles."""

    program = "runner"

    def free_space(self, folder: Path) -> str:
        return f"Free space there (older runs, checkpoints), or choose {OTHER_DISK}"


class LostPeerError(IncompleteError):
    """This rank lost the connection to another rank, where the cause is."""


class NoMemoryError(IncompleteError):
    """This rank ran out of memory."""


class NeverMetError(StageError):
    """This rank could never connect to another rank. Running it again does not help."""

    exit_code = 1


def say(text: str) -> None:
    """Prints a line on stderr."""
    print_line(f"runner: {text}", err=True)
