"""How ranks ended: one pure function, from what a launcher saw to an `Outcome`.

The exit code, the message and the requeue are read from it (`runner.launch.supervise`).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from runner.from_stage import says_no_memory
from runner.launch.reach import lost_by_watchdog
from runner.run_folder.heartbeat import Failure
from runner.run_folder.logs import LastWords

Kind = Literal["done", "stopped", "failed", "hung", "no_memory"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TAIL_LINES = 20
STOPPED_AND_SAVED = "stopped by a signal; run the same command again to resume"
_ALLOCATORS = ("bad_alloc", "MemoryError", "can't allocate memory", "Cannot allocate memory")
"""What C++, Python and torch print when memory runs out on a CPU."""


@dataclass(frozen=True, kw_only=True)
class RanksExit:
    """What a launcher saw of the end of its ranks.

    Attributes:
        in_job: srun started them, in a Slurm job.
        code: of the rank that failed first; negative: the signal that ended it; 0: all ended well.
        rank: the number of that rank; None: not known.
        words: how that rank ended, for people.
        hung: ranks gave no heartbeat, or took too long, and were ended.
        signals: those that stop the ranks: sent by the launcher, or, as srun reports, by Slurm.
    """

    in_job: bool
    code: int = 0
    rank: int | None = None
    words: str = ""
    hung: bool = False
    signals: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What ranks left in the run folder when they ended.

    Attributes:
        saved: rank 0 wrote, after all ranks had saved because of a signal, that they have. Errors
            during their exit do no harm.
        newest: the name of the newest checkpoint; empty: none.
        failures: what ranks recorded, the cause first.
        last_words: the end of what the rank that failed first wrote to its log.
    """

    saved: bool = False
    newest: str = ""
    failures: tuple[Failure, ...] = ()
    last_words: str = ""

    @property
    def cause(self) -> Failure | None:
        """The first failure that is no consequence of another one; None: no rank recorded it."""
        causes = (failure for failure in self.failures if not failure.consequence)
        return next(causes, None)


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
        place: of a command: `LOG:LINE` of what ended it.
        remedy: of a command: what helps.
    """

    kind: Kind
    exit_code: int
    messages: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    cause: str = ""
    killed: bool = False
    place: str = ""
    remedy: str = ""


def outcome_of(ended: RanksExit, left: Traces) -> Outcome:
    """Judges how ranks ended. Pure."""
    again = "submit the run again" if ended.in_job else "run the same command again"
    if ended.hung:
        words = f"the ranks were ended; {again} to resume from the last checkpoint"
        return Outcome("hung", 5, (words,))
    if left.saved or -ended.code in ended.signals:
        return Outcome("stopped", 5, _stopped(ended, left))
    if ended.code == 0:
        return Outcome("done", 0)
    report = tuple(_recorded(left) or _tail(ended, left))
    if ended.code == -signal.SIGABRT and (line := lost_by_watchdog(left.last_words)):
        return _lost_peer(line, left, report)
    kind: Kind = "no_memory" if _ran_out_of_memory(ended, left) else "failed"
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
    # A rank that was killed recorded nothing: what others recorded followed from it.
    cause = _cause(None if killed else left.cause, ended.words)
    return Outcome(kind, code if 0 < code <= 5 else 1, messages, report, cause, killed)


def _cause(failure: Failure | None, words: str) -> str:
    """The first sentence of an error, or the last line of a traceback; else how the rank ended."""
    if failure is None:
        return words.partition("; ")[0]
    lines = failure.text.strip().splitlines() or [words]
    line = lines[0] if lines[0].startswith("error: ") else lines[-1]
    return line.removeprefix("error: ").partition(". ")[0]


def _stopped(ended: RanksExit, left: Traces) -> tuple[str, ...]:
    """What is printed of ranks that a signal stopped; the requeue of a job has lines of its own."""
    if ended.in_job:
        return () if left.saved else ("the ranks got a stop signal before they could save",)
    if left.newest:
        return (
            f"stopped by a signal; {left.newest} is saved: run the same command again to resume "
            "from there",
        )
    if left.saved:
        return (STOPPED_AND_SAVED,)
    return (
        "stopped by a signal before a checkpoint was saved: run the same command again, it starts "
        "from the beginning",
    )


def _recorded(left: Traces) -> list[str]:
    """The first failure, for people; empty if no rank recorded one."""
    if not left.failures:
        return []
    first, *others = left.failures
    more = f" ({len(others)} more failed too or lost it: their logs are beside this one's)"
    return [
        f"rank {first.rank} on {first.host}{more if others else ''}:",
        *first.text.rstrip().splitlines(),
    ]


def _tail(ended: RanksExit, left: Traces) -> list[str]:
    """The last lines of the log of the rank that failed, for people."""
    return [f"[rank {ended.rank}] {line}" for line in left.last_words.splitlines()[-TAIL_LINES:]]


def _lost_peer(line: str, left: Traces, report: tuple[str, ...]) -> Outcome:
    """NCCL's watchdog ended a rank; `line` is what it wrote."""
    words = f"NCCL's watchdog ended a rank, because another rank is gone or hangs: {line}"
    if (first := left.cause) is not None:
        cause = f"the cause is rank {first.rank}, see above"
        return Outcome("failed", first.code, (words, cause), report)
    again = "the ranks were ended; run it again to resume from the last checkpoint"
    return Outcome("failed", 5, (words, again), report)


def _ran_out_of_memory(ended: RanksExit, left: Traces) -> bool:
    if ended.code == -signal.SIGKILL:  # also what the kernel does where memory runs out
        return True
    if left.cause is not None:
        return left.cause.no_memory
    said = left.last_words
    return says_no_memory(said) or any(words in said for words in _ALLOCATORS)


def outcome_of_command(
    ended: RanksExit, said: LastWords, place: str, *, resumes: bool, made: int
) -> Outcome:
    """Judges how a command ended. Pure.

    Args:
        said: why, by its own words.
        place: `LOG:LINE` of these words; empty: not known.
        resumes: whether the run file says that it goes on from its own results.
        made: how many results this start has made.
    """
    if ended.hung:
        what = "neither its log nor a file in work/ changed (hang_after)"
        remedy = "Look at the last lines of its log; if it was only slow, set a larger hang_after."
        message = f"error: the command was ended: {what}\n  -> {remedy}"
        return Outcome("hung", 5, (message,), cause=what, remedy=remedy)
    if ended.signals:  # also with exit code 0: what gets SIGTERM may save and exit
        what, remedy = _why_not_again(ended, resumes=resumes, made=made)
        messages = (f"error: {what}\n  -> {remedy}",) if what else ()
        if not ended.in_job:
            goes_on = ": it goes on" if resumes else ""
            messages = (f"stopped by a signal; run the same command again{goes_on}",)
        return Outcome("stopped", 5, messages, cause=what, remedy=remedy)
    if ended.code == 0:
        return Outcome("done", 0)
    kind: Kind = "no_memory" if ended.code == -signal.SIGKILL else "failed"
    rank = f" (task {ended.rank})" if ended.rank is not None else ""
    how = ended.words if ended.code < 0 else f"exit code {ended.code}"
    text = f": {said.text}" if said.text else ""
    remedy = said.advice or "Correct that, and submit the run again."
    if kind == "no_memory":
        remedy = "The kernel does this where memory runs out: ask for more in slurm.options (mem)."
    where = f"{place}: " if place else ""
    message = f"error: {where}the command ended with {how}{rank}{text}\n  -> {remedy}"
    code = ended.code if 0 < ended.code < 256 else 1
    cause = said.text or how
    return Outcome(kind, code, (message,), (), cause, kind == "no_memory", place, remedy)


def _why_not_again(ended: RanksExit, *, resumes: bool, made: int) -> tuple[str, str]:
    """Why a job that a signal stopped is not requeued, and what helps; empty: it is."""
    if not ended.in_job:
        return "", ""
    if not resumes and signal.SIGUSR1 not in ended.signals:
        return (
            "the job was cancelled, or was to make room, before the command had ended",
            "Submit the run again. If the command goes on from its own checkpoints, write in the "
            "run file: resumes: true",
        )
    if not resumes:
        return (
            "the job's time was over before the command had ended",
            "Set a longer slurm.time, and submit the run again. If the command goes on from its "
            "own checkpoints, write in the run file: resumes: true",
        )
    if not made:
        return (
            "this start wrote no result, so another would make none: the job is not requeued",
            "Let the command save more often, or set a longer slurm.time; then submit the run "
            "again",
        )
    return "", ""
