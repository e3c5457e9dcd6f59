"""What a user can be told went wrong: what, where, and the command to run next.

Every fault a user can meet is a `StageError`. The command line prints `message` and `remedy`, then exits
with `exit_code`; nothing here is ever shown as a traceback. Exit codes are part of the contract:
0 sound, 1 damage found, 2 wrong usage, 3 refused by policy, 4 signature, 5 could not finish (run it again).
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StageError(Exception):
    """A fault with a way out.

    Args:
        message: what happened and where (file:line for YAML), one short paragraph.
        remedy: what to run or change next; empty only where the message already says it.
        exit_code: the process exit status.
    """

    exit_code = 2

    def __init__(self, message: str, remedy: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.remedy}" if self.remedy else self.message


# Unicode's embeddings, overrides and isolates: `photo\u202egpj.exe` is shown as `photoexe.jpg` (UAX 9, 2).
_TURNS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def is_deceptive(character: str) -> bool:
    """Whether a character is a control character, no character at all, or turns the direction of what follows."""
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in _TURNS


def as_shown(text: str) -> str:
    """Text as a terminal or a log may see it: deceptive characters and bytes that are no text escaped, lines kept.

    Names from a Hub or a damaged disk can hold escape sequences that rewrite what a person reads.
    """
    return "".join(ascii(c)[1:-1] if c != "\n" and is_deceptive(c) else c for c in text)


def all_at_once(where: str, mistakes: Sequence[StageError]) -> StageError:
    """Several mistakes as one, of the first's kind; one as it is.

    Args:
        where: the file they are in.
    """
    first = mistakes[0]
    if len(mistakes) == 1:
        return first
    told = "\n".join(f"  {mistake.message} {mistake.remedy}" for mistake in mistakes)
    return type(first)(f"{where}: {len(mistakes)} mistakes:\n{told}", "Correct these lines.")


class DamageError(StageError):
    """Bytes are not what they were when the bundle was made."""

    exit_code = 1


class UsageError(StageError):
    """The command, a manifest or a run file asks for something that cannot be."""

    exit_code = 2


class PolicyError(StageError):
    """Refused although possible: an unsafe path, a pickle, remote code."""

    exit_code = 3


class SignatureError(StageError):
    """A signature is missing, wrong, or by nobody who is trusted."""

    exit_code = 4


class IncompleteError(StageError):
    """Could not finish (network, disk, interrupted). Running the same command again goes on from there."""

    exit_code = 5
