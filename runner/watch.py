"""The launcher's eye on its ranks: who does not get on, where they all stand, and who failed first.

Reads what ranks leave (`runner.vitals`) and never waits for them. A hang is a rank without a sign of life for longer
than a step can take; clocks of other nodes are not compared, only whether a pulse has changed since the last look.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runner.vitals import SLOW_PHASES, Failure, clear, read_failure, read_pulse, stacks_path

LOOK_EVERY_S = 2.0
SILENT_S = 300.0
"""A rank that trains is silent this long at least before it is said to hang: ten times its longest silence so far."""
SLOW_SILENT_S = 1800.0
STACKS_WAIT_S = 5.0
FRAMES_SHOWN = 8

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class Watch:
    """Watches the ranks of one run.

    Args:
        logs: where they leave their signs.
        ranks: how many there are.
        hang_after_s: silence that counts as a hang; None: by what they are at and how long steps took so far.
        clock: monotonic seconds.
    """

    def __init__(
        self, logs: Path, ranks: int, hang_after_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        clear(logs)
        self._logs, self._ranks, self._hang_after_s, self._clock = logs, ranks, hang_after_s, clock
        self._seen: dict[int, object] = {}
        self._changed = dict.fromkeys(range(ranks), clock())
        self._phase = dict.fromkeys(range(ranks), "start")
        self._longest = 0.0
        self._looked = clock()

    def silent(self) -> dict[int, float]:
        """The ranks that hang, with the seconds since their last sign of life; none while all get on.

        Only where somebody gave a sign at all: programs that know nothing of pulses never hang.
        """
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return {}
        self._looked = now
        for rank in range(self._ranks):
            pulse = read_pulse(self._logs, rank)
            if pulse is None or pulse == self._seen.get(rank):
                continue
            if rank in self._seen and self._phase[rank] not in SLOW_PHASES:
                self._longest = max(self._longest, now - self._changed[rank])
            self._seen[rank], self._changed[rank], self._phase[rank] = pulse, now, str(pulse.get("phase"))
        if not self._seen:
            return {}
        silences = {rank: now - changed for rank, changed in self._changed.items()}
        return {rank: silence for rank, silence in silences.items() if silence > self._limit(rank)}

    def _limit(self, rank: int) -> float:
        if self._hang_after_s is not None and self._phase[rank] not in SLOW_PHASES:
            return self._hang_after_s
        return SLOW_SILENT_S if self._phase[rank] in SLOW_PHASES else max(SILENT_S, 10 * self._longest)

    def wait_for_stacks(self) -> None:
        """Gives the ranks a moment to write the stacks they were asked for."""
        deadline = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline and not all(self._stacks(rank) for rank in range(self._ranks)):
            time.sleep(0.1)

    def report_hang(self, silent: dict[int, float]) -> list[str]:
        """What to tell: who is silent for how long, and where each rank stands; equal stacks once."""
        longest = max(silent.values())
        lines = [f"{_named(silent)} gave no sign of life for {longest:.0f} s: a hang. Where each rank stands:"]
        places: dict[tuple[str, ...], list[int]] = {}
        for rank in range(self._ranks):
            places.setdefault(tuple(standing(self._stacks(rank))), []).append(rank)
        for frames, ranks in sorted(places.items(), key=lambda item: len(item[1])):
            phase = self._phase[ranks[0]]
            lines.append(f"{_named(ranks)} ({phase}):" + ("" if frames else " does not answer (stopped? node gone?)"))
            lines += [f"    {frame}" for frame in frames]
        lines.append(f"whole stacks: {stacks_path(self._logs, 0).with_name('rank-*.stacks')}")
        return lines

    def _stacks(self, rank: int) -> str:
        try:
            return stacks_path(self._logs, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def first_failure(self) -> Failure | None:
        """What went wrong first: of the ranks that did not merely lose another one, the earliest."""
        failures = [failure for rank in range(self._ranks) if (failure := read_failure(self._logs, rank))]
        return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)

    def report_failure(self) -> list[str]:
        """The first failure, once, by rank; empty if no rank said anything."""
        first = self.first_failure()
        if first is None:
            return []
        others = sum(read_failure(self._logs, rank) is not None for rank in range(self._ranks)) - 1
        more = f" ({others} more failed too or lost it: their logs are beside this one's)" if others else ""
        return [f"rank {first.rank} on {first.host}{more}:", *first.text.rstrip().splitlines()]


def standing(stacks: str) -> list[str]:
    """The innermost frames of the main thread in faulthandler's output (its last thread), innermost first."""
    main = stacks.split("\n\n")[-1] if "\n\n" in stacks else stacks
    frames = [match for line in main.splitlines() if (match := _FRAME.match(line))]
    return [f"{match['function']} ({match['file']}:{match['line']})" for match in frames[:FRAMES_SHOWN]]


def _named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {parts}"
