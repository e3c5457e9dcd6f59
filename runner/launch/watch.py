"""Watches ranks until they end: passes on signals, detects a hang, finds who failed first.

The launcher reads the files of the ranks (`runner.run_folder.heartbeat`) and never waits for a
rank. A rank hangs if its heartbeat does not change for longer than a step can take. Clocks of other
nodes are not compared: only whether the file changed since the last look.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from runner.errors import say
from runner.launch.outcome import STOP_SIGNALS
from runner.run_folder.heartbeat import (
    ASK_FOR_STACKS,
    JOIN,
    SLOW_PHASES,
    START,
    clear,
    flight_prefix,
    read_pulse,
    stacks_path,
)

STOPPING = "the ranks stop, and save a checkpoint if they have made a step"
WAIT_S = 0.05
"""Between two looks at the processes: a rank that failed ends the others at once."""
LOOK_EVERY_S = 2.0
"""Between two reads of the heartbeats, which are on a shared disk and change once a second."""
SILENT_S = 300.0
"""A training rank hangs after ten times the longest pause so far, and never before this time."""
SLOW_SILENT_S = 1800.0
"""The same in a slow phase, such as imports or saving."""
STACKS_WAIT_S = 5.0
"""faulthandler writes at once; a network disk shows the file to other nodes after seconds."""
COLLECTIVES_WAIT_S = 10.0
"""torch looks up the stack of each collective, which takes some seconds."""
FRAMES_SHOWN = 8
"""Innermost frames of a stack: from the library that waits to the line of ours that called it."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class Waited(NamedTuple):
    """How a wait for processes ended: one failed, all ended, or their ranks hang.

    Attributes:
        failed: the number of the process that failed first; None: none did.
        signals: those that were sent to stop the ranks.
        hung: whether the ranks hang.
    """

    failed: int | None
    signals: frozenset[int]
    hung: bool = False


def wait_for_end(
    processes: Sequence[subprocess.Popen[bytes]],
    received: deque[int],
    detector: HangDetector,
    passed_on: Callable[[int], int],
) -> Waited:
    """Waits for the end of ranks, or of what started them. It ends none of them.

    A second Ctrl-C counts as a failure of one that still runs. Of ranks that hang the stacks are
    printed.

    Args:
        received: the stop signals that this process got, of `recorded_signals`.
        detector: finds ranks that hang.
        passed_on: the signal that the processes get for one of these.
    """
    signals: frozenset[int] = frozenset()
    interrupts = 0
    while True:
        while received:
            number = received.popleft()
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                running = (n for n, process in enumerate(processes) if process.poll() is None)
                # The caller sends both: it does not wait for a checkpoint any more.
                return Waited(next(running, None), signals | {signal.SIGTERM, signal.SIGKILL})
            if not signals:
                say(f"{signal.Signals(number).name} received: {STOPPING}")
            signals |= {passed_on(number)}
            for process in processes:
                process.send_signal(passed_on(number))
        codes = [process.poll() for process in processes]
        if failed := [number for number, code in enumerate(codes) if code]:
            return Waited(min(failed, key=lambda number: _order(codes[number] or 0)), signals)
        if all(code == 0 for code in codes):
            return Waited(None, signals)
        if silent := detector.hung_ranks():
            for process in processes:
                process.send_signal(ASK_FOR_STACKS)
            detector.wait_for_stacks()
            for line in detector.report_hang(silent):
                say(line)
            return Waited(None, signals, hung=True)
        time.sleep(WAIT_S)


def _order(code: int) -> int:
    """Which of several ended ranks is the cause: one that was killed, else one that failed.

    NCCL's watchdog aborts the ranks that lost another one.
    """
    if code == -signal.SIGABRT:
        return 2
    return 1 if code > 0 else 0


@contextmanager
def recorded_signals() -> Iterator[deque[int]]:
    """Records stop signals in a queue instead of acting on them.

    The waiting loop passes them on, so no signal meets a list of ranks that is half filled.
    """
    received: deque[int] = deque()

    def note(signum: int, _frame: object) -> None:
        received.append(signum)

    # A signal that was ignored when we started (nohup) stays ignored.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HangDetector:
    """Watches the ranks of one run.

    Args:
        logs: the folder of their heartbeat files.
        ranks: how many there are.
        hang_after_s: seconds without a heartbeat that count as a hang. None: chosen from the phase
            and from the longest step so far.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        logs: Path,
        ranks: int,
        hang_after_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        clear(logs)
        self._logs, self._ranks, self._hang_after_s, self._clock = logs, ranks, hang_after_s, clock
        self._seen: dict[int, object] = {}
        self._changed = dict.fromkeys(range(ranks), clock())
        self._phase = dict.fromkeys(range(ranks), START)
        self._longest = 0.0
        self._looked = clock()

    def hung_ranks(self) -> dict[int, float]:
        """Returns the ranks that hang, with the seconds since their last heartbeat.

        A rank in a slow phase does not hang as long as another one works there: it may wait for it.
        """
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return {}
        self._looked = now
        for rank in range(self._ranks):
            pulse = read_pulse(self._logs, rank)
            if pulse is None or pulse == self._seen.get(rank):
                continue
            if rank in self._seen and not self._is_slow(rank):
                self._longest = max(self._longest, now - self._changed[rank])
            self._seen[rank], self._changed[rank], self._phase[rank] = (
                pulse,
                now,
                str(pulse.get("phase")),
            )
        silences = {rank: now - changed for rank, changed in self._changed.items()}
        silent = {
            rank: silence for rank, silence in silences.items() if silence > self._limit(rank)
        }
        waits = any(self._works_slowly(rank) for rank in silences.keys() - silent.keys())
        return {rank: s for rank, s in silent.items() if not (waits and self._is_slow(rank))}

    def _works_slowly(self, rank: int) -> bool:
        """Whether others may wait for this rank's work; all ranks beat while they only join."""
        return rank in self._seen and self._is_slow(rank) and self._phase[rank] != JOIN

    def _is_slow(self, rank: int) -> bool:
        return self._phase[rank] in SLOW_PHASES

    def _limit(self, rank: int) -> float:
        if self._is_slow(rank):
            return SLOW_SILENT_S
        if self._hang_after_s is not None:
            return self._hang_after_s
        return max(SILENT_S, 10 * self._longest)

    def wait_for_stacks(self) -> None:
        """Waits until the ranks have written their stacks, at most `STACKS_WAIT_S` seconds.

        Then it waits for their last collectives, which not every program writes.
        """
        _wait(STACKS_WAIT_S, lambda: all(self._stacks(rank) for rank in range(self._ranks)))
        _wait(COLLECTIVES_WAIT_S, lambda: len(self._collectives()) == self._ranks)

    def _collectives(self) -> list[Path]:
        prefix = flight_prefix(self._logs)
        return list(prefix.parent.glob(f"{prefix.name}*"))

    def report_hang(self, silent: dict[int, float]) -> list[str]:
        """Describes a hang for people: which ranks, and the stack of each; equal stacks once.

        Args:
            silent: rank -> seconds without a heartbeat.
        """
        longest = max(silent.values())
        lines = [
            f"{_named(silent)} gave no sign of life for {longest:.0f} s: a hang. "
            "The stack of each rank:"
        ]
        stacks: dict[tuple[str, ...], list[int]] = {}
        for rank in range(self._ranks):
            stacks.setdefault(tuple(innermost_frames(self._stacks(rank))), []).append(rank)
        for frames, ranks in sorted(stacks.items(), key=lambda item: len(item[1])):
            phase = self._phase[ranks[0]]
            lines.append(
                f"{_named(ranks)} ({phase}):"
                + ("" if frames else " does not answer (stopped? node gone?)")
            )
            lines += [f"    {frame}" for frame in frames]
        lines.append(f"whole stacks: {stacks_path(self._logs, 0).with_name('rank-*.stacks')}")
        if self._collectives():
            files = f"{flight_prefix(self._logs)}*"
            lines.append(f"the last collectives of each rank, for torchfrtrace: {files}")
        return lines

    def _stacks(self, rank: int) -> str:
        try:
            return stacks_path(self._logs, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _wait(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.1)


def innermost_frames(stacks: str) -> list[str]:
    """The frames of the main thread in faulthandler's output, innermost first.

    faulthandler prints the main thread last.
    """
    main = stacks.split("\n\n")[-1] if "\n\n" in stacks else stacks
    frames = [match for line in main.splitlines() if (match := _FRAME.match(line))]
    return [
        f"{match['function']} ({match['file']}:{match['line']})" for match in frames[:FRAMES_SHOWN]
    ]


def _named(ranks: Iterable[int]) -> str:
    """Such as `rank 3` or `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {parts}"
