"""How ranks ended: one pure function, from what a launcher saw to an `Outcome`.

The exit code, the message and the requeue are read from it (`runner.launch.start`).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from runner.errors import says_no_memory
from runner.launch.reach import lost_by_watchdog
from runner.run_folder.heartbeat import Failure

Kind = Literal["done", "stopped", "failed", "hung", "no_memory"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TAIL_LINES = 20
STOPPED_AND_SAVED = "stopped by a signal; run the same command again to resume"
_ALLOCATORS = ("bad_alloc", "MemoryError", "can't allocate memory", "Cannot allocate memory")
"""What C++, Python and torch print when memory runs out on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a launcher saw of the end of its ranks.

    Attributes:
        in_job: srun started them, in a Slurm job.
        code: of the rank that failed first; negative: the signal that ended it; 0: all ended well.
        rank: the number of that rank; None: not known.
        words: how that rank ended, for people.
        hung: ranks gave no heartbeat, or took too long, and were ended.
        saved: rank 0 wrote, after all ranks had saved because of a signal, that they have. Errors
            during their exit do no harm.
        signals: those that stop the ranks: sent by the launcher, or, as srun reports, by Slurm.
        newest: the name of the newest checkpoint; empty: none.
        failure: the first failure that a rank recorded.
        num_failures: how many ranks recorded one.
        last_words: the end of what it wrote to its log.
    """

    in_job: bool
    code: int = 0
    rank: int | None = None
    words: str = ""
    hung: bool = False
    saved: bool = False
    signals: frozenset[int] = frozenset()
    newest: str = ""
    failure: Failure | None = None
    num_failures: int = 0
    last_words: str = ""


@dataclass(frozen=True)
class Outcome:
    """How ranks ended.

    Attributes:
        kind: `stopped`: by a signal, with or without a checkpoint. `no_memory`: a rank ran out of
            memory, or was killed, which the kernel does where memory runs out.
        exit_code: of the launcher.
        messages: lines for people, in order.
        report: lines that a rank wrote; they are printed first, as they are.
        cause: what ended the first rank, in one line.
        killed: by SIGKILL.
    """

    kind: Kind
    exit_code: int
    messages: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    cause: str = ""
    killed: bool = False


def outcome_of(ended: Ended) -> Outcome:
    """Judges how ranks ended. Pure."""
    again = "submit the run again" if ended.in_job else "run the same command again"
    if ended.hung:
        words = f"the ranks were ended; {again} to resume from the last checkpoint"
        return Outcome("hung", 5, (words,))
    if ended.saved or -ended.code in ended.signals:
        return Outcome("stopped", 5, _stopped(ended))
    if ended.code == 0:
        return Outcome("done", 0)
    report = tuple(_recorded(ended) or _tail(ended))
    if ended.code == -signal.SIGABRT and (line := lost_by_watchdog(ended.last_words)):
        return _lost_peer(ended, line, report)
    kind: Kind = "no_memory" if _ran_out_of_memory(ended) else "failed"
    from_outside = -ended.code in (signal.SIGKILL, *STOP_SIGNALS)
    messages: tuple[str, ...] = ()  # in a job srun has printed how the tasks ended
    if not ended.in_job:
        messages = (ended.words,)
    elif from_outside:
        messages = (
            f"the ranks were ended from outside ({ended.words})",
            "submit the run again to resume from its last checkpoint",
        )
    code = 5 if from_outside else ended.code
    killed = ended.code == -signal.SIGKILL
    cause = _cause(replace(ended, failure=None) if killed else ended)
    return Outcome(kind, code if 0 < code <= 5 else 1, messages, report, cause, killed)


def _cause(ended: Ended) -> str:
    """The first sentence of an error, or the last line of a traceback; else how the rank ended."""
    first = ended.failure
    if first is None or first.consequence:
        return ended.words.partition("; ")[0]
    lines = first.text.strip().splitlines() or [ended.words]
    line = lines[0] if lines[0].startswith("error: ") else lines[-1]
    return line.removeprefix("error: ").partition(". ")[0]


def _stopped(ended: Ended) -> tuple[str, ...]:
    """What is printed of ranks that a signal stopped; the requeue of a job has lines of its own."""
    if ended.in_job:
        return () if ended.saved else ("the ranks got a stop signal before they could save",)
    if ended.newest:
        return (
            f"stopped by a signal; {ended.newest} is saved: run the same command again to resume "
            "from there",
        )
    if ended.saved:
        return (STOPPED_AND_SAVED,)
    return (
        "stopped by a signal before a checkpoint was saved: run the same command again, it starts "
        "from the beginning",
    )


def _recorded(ended: Ended) -> list[str]:
    """The first failure, for people; empty if no rank recorded one."""
    first, others = ended.failure, ended.num_failures - 1
    if first is None:
        return []
    more = f" ({others} more failed too or lost it: their logs are beside this one's)"
    return [
        f"rank {first.rank} on {first.host}{more if others else ''}:",
        *first.text.rstrip().splitlines(),
    ]


def _tail(ended: Ended) -> list[str]:
    """The last lines of the log of the rank that failed, for people."""
    return [f"[rank {ended.rank}] {line}" for line in ended.last_words.splitlines()[-TAIL_LINES:]]


def _lost_peer(ended: Ended, line: str, report: tuple[str, ...]) -> Outcome:
    """NCCL's watchdog ended a rank; `line` is what it wrote."""
    words = f"NCCL's watchdog ended a rank, because another rank is gone or hangs: {line}"
    first = ended.failure
    if first is not None and not first.consequence:
        cause = f"the cause is rank {first.rank}, see above"
        return Outcome("failed", first.code, (words, cause), report)
    again = "the ranks were ended; run it again to resume from the last checkpoint"
    return Outcome("failed", 5, (words, again), report)


def _ran_out_of_memory(ended: Ended) -> bool:
    first, said = ended.failure, ended.last_words
    if ended.code == -signal.SIGKILL:
        return True
    if first is not None and not first.consequence:
        return first.no_memory
    return says_no_memory(said) or any(words in said for words in _ALLOCATORS)
