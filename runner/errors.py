"""The errors of `runner`, beside those of `stage`, and how a run gets another place."""

from __future__ import annotations

import errno
from pathlib import Path

from runner.from_stage import Group, IncompleteError, StageError, print_line

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
