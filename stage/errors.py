"""The faults that a user can meet: what happened, where, and the command to run next.

Each such fault is a `StageError`. The command line prints `message` and `remedy`, then exits with
`exit_code`; it shows no traceback. Exit codes are part of the contract: 0 sound, 1 damage found,
2 wrong usage, 3 refused by policy, 4 signature, 5 could not finish (run it again).
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Place:
    """Where something is written. Its text is `file:line`, as messages begin.

    Attributes:
        file: the path as the user gave it, or what else gave a value: `--set batch.micro`.
        line: from 1; 0: unknown.
        name: of what is meant there, where messages name it too: "m.yaml:3: `bert`".
    """

    file: str
    line: int = 0
    name: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: `{self.name}`" if self.name else place


class StageError(Exception):
    """A fault with a remedy.

    Args:
        problem: what happened, one short paragraph.
        remedy: what to run or change next; empty only where the problem already says it.
        exit_code: the process exit status.
        place: where it happened: a place in a file, or a label such as "model bert".

    Attributes:
        parts: the errors that this one lists (`join_errors`); empty for a single fault.
    """

    exit_code = 2
    parts: Sequence[StageError] = ()

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        exit_code: int | None = None,
        *,
        place: Place | str = "",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.place = place
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def message(self) -> str:
        """The problem after its place, as it is printed."""
        return f"{self.place}: {self.problem}" if self.place else self.problem

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.remedy}" if self.remedy else self.message


@contextmanager
def about(place: Place | str) -> Iterator[None]:
    """Says where the block's work is: a `StageError` without a place gets this one.

    A label is narrower than what is around it, and stays before the problem: "m.yaml:3: `bert`:
    part-1.zip: it is cut off". Of several places in files the innermost counts.
    """
    try:
        yield
    except StageError as error:
        for part in (error, *error.parts):  # `Mistakes` takes the parts of a joined error
            if isinstance(part.place, Place):
                continue
            if part.place:
                part.problem = part.message
            part.place = place
        raise


# Unicode's embeddings, overrides and isolates (UAX 9, section 2). With them a terminal shows
# `photo\u202egpj.exe` as `photoexe.jpg`.
_BIDI_CONTROLS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def as_shown(text: str) -> str:
    """Text that is safe for a terminal or a log: control characters are escaped, except line ends.

    Names from a Hub or a damaged disk can hold escape sequences that change what a person reads.
    """
    hidden = {c for c in set(text) - {"\n"} if unicodedata.category(c) in ("Cc", "Cs")}
    hidden |= {c for c in set(text) if unicodedata.bidirectional(c) in _BIDI_CONTROLS}
    return text.translate({ord(c): ascii(c)[1:-1] for c in hidden})


_ADDRESS = re.compile(
    r"\b(?!file:)([a-zA-Z][\w+.-]*://)(?:[^\s/?#]*@)?([^\s/?#]*)"  # scheme, login, host
    r"(?:/t/[^/\s?#]+(?=/))?([^\s?#\"'`]*)(?:[?#][^\s\"'`]*)?"  # conda's token, path, query
)


def without_secrets(text: str) -> str:
    """The same text, its addresses without login, conda token (`/t/TOKEN/`) and query."""
    return _ADDRESS.sub(r"\1\2\3", text)


def quoted(value: object) -> str:
    """A path or a text as one word of a shell's command, for a user to copy or to run there."""
    return shlex.quote(str(value))


class DamageError(StageError):
    """Bytes are not what they were when the bundle was made."""

    exit_code = 1


class UsageError(StageError):
    """The command, a manifest or a run file asks for something that is not possible."""

    exit_code = 2


class PolicyError(StageError):
    """Possible, but refused: an unsafe path, a pickle, remote code."""

    exit_code = 3


class SignatureError(StageError):
    """A signature is missing, wrong, or of a key that is not trusted."""

    exit_code = 4


class IncompleteError(StageError):
    """Could not finish (network, disk, interrupted). The same command, run again, resumes."""

    exit_code = 5


def join_errors(errors: Sequence[StageError], what: str, place: Place | str = "") -> StageError:
    """One error that lists several, of the class of the most important one.

    Damage is the most important: it can be the cause of the others. Else it is the first error.

    Args:
        errors: at least one; a single one is returned unchanged.
        what: what they are, such as "mistakes".
        place: the file they are in.
    """
    parts = [part for error in errors for part in error.parts or (error,)]
    if len(parts) == 1:
        return parts[0]
    lines = [f"{len(parts)} {what}:"]
    for number, part in enumerate(parts, 1):
        lines.append(f"  {number}. {part.message}")
        lines += ["     -> " + part.remedy.replace("\n", "\n   ")] if part.remedy else []
    most = next((part for part in parts if isinstance(part, DamageError)), parts[0])
    joined = type(most)("\n".join(lines), exit_code=most.exit_code, place=place)
    joined.parts = parts
    return joined


class Mistakes:
    """Collects the mistakes of one file, so that all of them are reported together.

    `with mistakes:` keeps a `UsageError` or `PolicyError` that its block raises; the code after the
    block runs. `check` raises what was kept.
    """

    def __init__(self) -> None:
        self.found: list[StageError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, UsageError | PolicyError):
            kept = {id(part) for part in self.found}  # `check` inside of the block raises them
            self.found += [part for part in error.parts or (error,) if id(part) not in kept]
            return True
        return False

    def check(self, file: str) -> None:
        """Raises what was kept, in the order of the file's lines; what has none is first.

        Raises:
            UsageError, PolicyError: there are mistakes.
        """

        def place(mistake: StageError) -> Place:
            found = mistake.place
            return found if isinstance(found, Place) and found.file == file else Place(file)

        if self.found:
            raise join_errors(sorted(self.found, key=place), "mistakes", file)


_NO_MEMORY = (
    "annot allocate memory",
    "can't allocate memory",
    "emory allocation",  # Rust, OpenBLAS
    "ut of memory",
    "bad_alloc",  # C++
    "MemoryError",
    "failed to map segment",  # ld.so
)


def says_no_memory(text: str) -> bool:
    """Whether the output of a process, or of a library in C++ or Rust, reports a lack of memory."""
    return any(message in text for message in _NO_MEMORY)


def shortage(error: BaseException) -> IncompleteError | None:
    """A lack of memory, stack or threads as a `StageError`; None for other errors."""
    if isinstance(error, RecursionError):
        return IncompleteError(
            "Some data is nested too deeply to be read.",
            "Nothing after it was checked: look for lists inside lists, hundreds deep, in JSON or "
            "YAML.",
        )
    if "can't start new thread" in str(error):
        return IncompleteError(
            "No more threads can be started.", f"Raise `ulimit -u`, or use fewer --jobs; {_AGAIN}"
        )
    if isinstance(error, MemoryError) or says_no_memory(str(error)):
        return IncompleteError(
            "There is not enough memory.", f"Look at `ulimit -v` and the job's memory; {_AGAIN}"
        )
    return None


_AGAIN = "then run the same command again."


_MOST_ENTRIES = 10_000  # of a folder that are looked at


def suggest(name: str, known: Iterable[str], remedy: str = "") -> str:
    """A remedy that asks for the nearest known name, such as "Did you mean `verify`?".

    Args:
        name: what the user wrote.
        known: the names that exist.
        remedy: what else to do; it follows the question, or replaces it where no name is near.
    """
    nearest = nearest_name(name, known)
    question = f"Did you mean `{nearest}`?" if nearest else ""
    return " ".join(part for part in (question, remedy) if part)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs least from `name`, if one is near enough; case does not count."""
    import difflib  # only for an error message

    by_folded = {item.casefold(): item for item in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def suggest_path(
    path: Path, remedy: str = "Check the path.", fits: Callable[[Path], bool] = lambda _: True
) -> str:
    """A remedy for a path that does not exist: the nearest path that does.

    Each part of the path is compared with the names in its folder, from left to right.

    Args:
        path: what the user wrote.
        remedy: what else to do; it follows the question, or replaces it where no path is near.
        fits: whether a path can be what was meant.
    """
    nearest = _nearest_path(path, fits)
    question = f"Did you mean {nearest}?" if nearest is not None else ""
    return " ".join(part for part in (question, remedy) if part)


def suggest_relative(written: str, path: Path, to: str) -> str:
    """A remedy for a path in a file that does not exist: the nearest path that does.

    Args:
        written: as the file has it.
        path: what it means on this machine.
        to: what relative paths are relative to, such as "the manifest's folder".
    """
    is_relative = not written.startswith(("/", "~"))
    return suggest_path(path, f"Paths are relative to {to}." if is_relative else "Check the path.")


def _nearest_path(path: Path, fits: Callable[[Path], bool]) -> Path | None:
    found = type(path)(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if part == ".." or (found / part).exists():
            found = found / part
            continue
        try:
            names = [entry.name for entry, _ in zip(found.iterdir(), range(_MOST_ENTRIES))]  # noqa: B905
        except OSError:
            return None
        while (nearest := nearest_name(part, names)) and not fits(found / nearest):
            names.remove(nearest)
        if nearest is None:
            return None
        found = found / nearest
    return found if found != path else None
