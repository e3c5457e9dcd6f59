"""`runner logs`: the last lines of a log, and new ones as they are written."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from runner.from_stage import UsageError, quoted
from runner.run_folder.history import History, elements, numbers_in, where_asked
from stage.files import join_limited

READ_BACK = 4 * 2**20  # bytes from the end in which the last lines are searched
Line = TypeVar("Line")
LOOK_EVERY_S = 0.5  # twice as often as `tail -f`; one look is one stat
NAMED = 8  # at most so many ranks are named in a message
_OF_RANK = re.compile(r"rank-(\d{1,18})\.log")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Control sequences of a terminal (ECMA-48): CSI, OSC, and those of two characters."""


def log_of(folder: Path, rank: int | None) -> Path:
    """The log of a rank.

    Args:
        folder: of the run.
        rank: its number. None: the log of the newest job, else of rank 0.

    Raises:
        UsageError: there is no such log; names the existing ones.
    """
    if names := elements(folder):
        begun = [name for name in names if _of_element(folder / name)] or [*names]
        first, *others = [quoted(os.path.relpath(folder / name)) for name in begun[:NAMED]]
        raise UsageError(
            f"{folder}: a sweep, where each run has a log of its own.",
            f"runner logs {first}{where_asked()}"
            + (f"   (or of {', '.join(others)})" if others else ""),
        )
    if rank is None and (log := _of_element(folder)):
        return log
    history = History.read(folder)
    logs = history.folder.logs
    if rank is None and history.jobs:
        return logs / f"slurm-{history.jobs[-1]}.out"
    path = logs / f"rank-{rank or 0}.log"
    if not path.is_file():
        there = [f"without --rank the log of job {job}" for job in history.jobs[-1:]]
        there += [f"--rank {each}" for each in numbers_in(logs, _OF_RANK)]
        status = f"runner status {quoted(os.path.relpath(folder))}{where_asked()}"
        raise UsageError(
            f"{path}: no such log.",
            f"There are: {join_limited(there, NAMED)}."
            if there
            else f"None is there yet: {status}",
        )
    return path


def _of_element(folder: Path) -> Path | None:
    """The newest job's log of a run of a sweep, which is beside the runs; None: there is none."""
    index = elements(folder.parent).get(folder.name)
    found = folder.parent.glob(f"logs/slurm-*_{index}.out")
    return max(found, key=lambda log: log.stat().st_mtime, default=None)


def last_lines(path: Path, count: int) -> tuple[Sequence[str], int]:
    """The last `count` lines of a log, and the position after them in bytes."""
    with open(path, "rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - READ_BACK))
        data = file.read(end - file.tell())
    return newest(data.decode("utf-8", "replace").splitlines(), count), end


def newest(lines: Sequence[Line], count: int) -> Sequence[Line]:
    """The last `count` lines; all where there are fewer."""
    return lines[max(0, len(lines) - count) :]


def last_error(folder: Path) -> str:
    """The error that a run's log ends with, and its remedy; empty: it ends otherwise."""
    try:
        lines, _ = last_lines(log_of(folder, None), NAMED)
    except (UsageError, OSError):
        return ""
    said = re.search(r"^error: .*\n  -> .*\Z", "\n".join(map(readable, lines)), re.MULTILINE)
    return said[0] if said else ""


def readable(line: str) -> str:
    """A line without the colours and cursor movements of libraries; tabs become spaces."""
    return _ESCAPES.sub("", line).expandtabs()


def follow(path: Path, position: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yields what is written after `position`, as it appears, until the run is over.

    A log that became shorter was rewritten, so it is read from its beginning.

    Args:
        position: in bytes.
        is_over: called between two looks; whether the run is over.
    """
    with open(path, "rb") as file:
        file.seek(position)
        while True:
            over = is_over()
            if path.stat().st_size < file.tell():
                file.seek(0)
            if data := _whole_lines(file):
                yield data
            elif over:
                yield file.read().decode("utf-8", "replace")
                return
            time.sleep(LOOK_EVERY_S)


def _whole_lines(file: IO[bytes]) -> str:
    """Reads up to the last line break: the last character may be incomplete."""
    start = file.tell()
    data = file.read(READ_BACK)
    whole = data[: data.rfind(b"\n") + 1]
    file.seek(start + len(whole))
    return whole.decode("utf-8", "replace")


_MARKS = r"(?:\d+: ?)?(?:\[\w+\]: ?)?"  # of srun --label, and of torchrun
_TRACEBACK = re.compile(rf"{_MARKS}Traceback \(most recent call last\):")
_RAISED = re.compile(rf"{_MARKS}(?P<text>[A-Za-z_][\w.]*(?::(?: .*)?)?)$")
_OURS = re.compile(rf"{_MARKS}error: (?P<text>.*?)\.?$")
_REMEDY = re.compile(rf"{_MARKS}  -> (?P<text>.*)")
_OF_OTHERS = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessExitedException|Connection (closed|reset) by peer|"
    r"DistBackendError|DistNetworkError(?!.*failed to listen)|KeyboardInterrupt|SignalException"
)
"""Errors by which a launcher, or another rank, learns that a rank has failed."""
_OF_LAUNCHERS = re.compile(
    rf"{_MARKS}(runner\b|srun: |slurmstepd: |\[?\d{{4}}-\d\d-\d\d|[WE]\d{{4}} )"
)


class LastWords(NamedTuple):
    """Why a program ended, by its own words.

    Attributes:
        line: from 1, in the text; 0: nothing was found.
        text: the exception, or the last line.
        advice: what our own error, or the line of `runner exec` after it, says; else empty.
    """

    line: int
    text: str
    advice: str


def last_words(text: str) -> LastWords:
    """Finds in a log why a program ended: the last exception that is no consequence of another.

    Without one it is the last line that no launcher wrote. Pure.
    """
    lines = [readable(line) for line in text.splitlines()]
    found, raised = LastWords(0, "", ""), 0
    for number, line in enumerate(lines, 1):
        if _TRACEBACK.match(line):
            raised = number
        elif raised and (end := _RAISED.match(line)):
            raised = 0
            if not _OF_OTHERS.search(line):
                found = LastWords(number, end["text"], "")
        elif "runner exec: " in line and found.line and not found.advice:
            found = found._replace(advice=line.partition("runner exec: ")[2])
        elif (said := _OURS.match(line)) and not found.line:
            # With --label, lines of other tasks may stand between the two of an error of ours.
            helps = filter(None, map(_REMEDY.match, lines[number : number + NAMED]))
            if remedy := next(helps, None):
                found = LastWords(number, said["text"], remedy["text"])
    if not found.line:
        own = ((n, line) for n, line in enumerate(lines, 1) if not _OF_LAUNCHERS.match(line))
        for number, line in own:
            if re.search(r"[^\W_]", line):  # not a row of `=`, as torchrun draws
                found = LastWords(number, re.sub(rf"^{_MARKS}", "", line).strip(), "")
    return found
