"""Who trains in a run folder: one launcher at a time, for two would write each other's checkpoints.

`holding` takes the place (`<run folder>/running`, made with O_EXCL), touches it while it lasts, leaves it at the end.
A holder that was killed leaves the file behind; its place is taken once nobody trains there any more, its ranks neither
(adr/0049). No flock: on some Lustre mounts it does nothing.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.errors import IncompleteError, UsageError
from runner.jobs import running_step, states, step_name
from runner.ranks import say
from runner.records import RunFolder

TOUCH_EVERY_S = 20.0
GONE_AFTER_S = 300.0
"""Somebody on another machine, of whom Slurm says nothing, is gone after so long without a sign of life."""

_TRIES = 5


@dataclass(frozen=True)
class Holder:
    """A launcher.

    Attributes:
        born: when its process started, in ticks of the kernel; None where there is no /proc.
        machine: this boot and these process numbers: a container or a namesake of a host counts others.
        job, restart: of Slurm; None and 0 outside a job.
        since: seconds since 1970.
    """

    pid: int
    born: str | None
    host: str
    machine: str
    job: int | None
    restart: int
    since: float

    @staticmethod
    def me(environ: Mapping[str, str]) -> Holder:
        """This process."""
        job, restart = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "")
        return Holder(
            pid=os.getpid(),
            born=_born(os.getpid()),
            host=platform.node(),
            machine=_machine(),
            job=int(job) if job.isdecimal() else None,
            restart=int(restart) if restart.isdecimal() else 0,
            since=time.time(),
        )

    def is_at_home(self, me: Holder) -> bool:
        """Whether its process number means the same here."""
        return (self.host, self.machine) == (me.host, me.machine)

    @property
    def in_words(self) -> str:
        """For people: `process 4711 on gpu7 (job 17), since 2026-11-22 10:00:00`."""
        job = f" (job {self.job})" if self.job is not None else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%F %T', time.localtime(self.since))}"


@contextmanager
def holding(folder: RunFolder, environ: Mapping[str, str]) -> Iterator[None]:
    """Trains in a run folder alone, for as long as this lasts.

    Raises:
        UsageError: somebody else does; says who.
        IncompleteError: the disk is full.
    """
    me = Holder.me(environ)
    _take(folder, me)
    over = threading.Event()
    touching = threading.Thread(target=_touch, args=(folder.holder, over), daemon=True)
    touching.start()
    try:
        yield
    finally:
        over.set()
        touching.join()
        if _read(folder.holder) == me:
            folder.holder.unlink(missing_ok=True)


def refuse_held(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Refuses what would train where somebody trains already.

    Raises:
        UsageError: who, since when, and the ways out.
    """
    if holder := holder_of(folder, Holder.me(environ)):
        raise _refused(folder, holder, Holder.me(environ))


def holder_of(folder: RunFolder, me: Holder) -> Holder | None:
    """Who trains there now; None: nobody, or one that is gone."""
    holder = _read(folder.holder)
    return holder if holder is not None and not _why_gone(holder, me, folder) else None


def _take(folder: RunFolder, me: Holder) -> None:
    for _ in range(_TRIES):
        try:
            descriptor = os.open(folder.holder, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _clear(folder, me)
            continue
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(me)))
        except OSError as error:
            folder.holder.unlink(missing_ok=True)
            raise IncompleteError(
                f"{folder.holder}: {error.strerror}.", "Free space or quota there, then run the same command again."
            ) from None
        return
    raise UsageError(f"{folder.holder}: others come and go in this run folder.", f"runner status {folder.root}")


def _clear(folder: RunFolder, me: Holder) -> None:
    """Takes away what somebody left who is gone.

    Raises:
        UsageError: they are not gone.
    """
    holder = _read(folder.holder)
    if holder is None:
        if _age_s(folder.holder) < 1:  # it is being written, or was just taken away
            time.sleep(0.3)
            return
        why = "it cannot be read"
    else:
        why = _why_gone(holder, me, folder)
        if not why:
            raise _refused(folder, holder, me)
    # By a name of our own: who comes at the same moment must not take away what we write next.
    aside = folder.holder.with_name(f"{folder.holder.name}.{me.host}.{me.pid}")
    try:
        folder.holder.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != holder:
        with suppress(OSError):
            os.link(aside, folder.holder)
    elif holder is not None:
        say(f"{folder.root}: left by {holder.in_words}: {why}; its place is taken")
    aside.unlink(missing_ok=True)


def _refused(folder: RunFolder, holder: Holder, me: Holder) -> UsageError:
    if holder.is_at_home(me) and not _lives(holder) and (step := _step_of(holder)):
        return UsageError(
            f"{folder.root}: {holder.in_words} was killed, and its ranks still run (step {step}).",
            f"scancel {step}; then run the same command again.",
        )
    return UsageError(
        f"{folder.root}: {holder.in_words} trains in this run folder.",
        f"runner status {folder.root}; wait for its end, or give another --output.",
    )


def _why_gone(holder: Holder, me: Holder, folder: RunFolder) -> str:
    """Why a holder is gone with its ranks, in words; empty: it is not, as far as anybody can see."""
    if holder.job is not None and holder.job == me.job and me.restart > holder.restart:
        return "this job was requeued"
    here = holder.is_at_home(me)
    if here and _lives(holder):
        return ""
    if here and holder.job is None:
        return "that process is gone"  # and its ranks: the kernel ends them with it
    if holder.job is not None and (here or holder.job != me.job) and (found := states(holder.job)) is not None:
        if not found:
            return f"job {holder.job} is over"
        # While a job ends, its steps are no longer told and may still run.
        if not here or "COMPLETING" in found:
            return ""
        if (step := _step_of(holder)) is not None:
            return "" if step else "that process is gone"
    signs = [folder.holder, folder.metrics, *folder.logs.glob("rank-*.pulse")]
    silent = min(map(_age_s, signs))
    return f"no sign of life for {silent / 60:.0f} min" if silent > GONE_AFTER_S else ""


def _step_of(holder: Holder) -> str | None:
    """The step of its ranks that still runs; empty: none does. None: Slurm does not say."""
    return None if holder.job is None else running_step(holder.job, step_name(holder.host, holder.pid))


def _lives(holder: Holder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return holder.born is None or _born(holder.pid) in (holder.born, None)


def _touch(path: Path, over: threading.Event) -> None:
    while not over.wait(TOUCH_EVERY_S):
        with suppress(OSError):
            os.utime(path)


def _read(path: Path) -> Holder | None:
    try:
        found = Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    kinds = ((found.pid, int), (found.host, str), (found.machine, str), (found.restart, int), (found.since, float))
    fits = all(isinstance(value, kind) for value, kind in kinds) and isinstance(found.job, int | None)
    return found if fits and found.pid > 0 else None


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _born(pid: int) -> str | None:
    """When a process started (proc(5), stat, field 22); `gone`: it is over and waits for its parent; None: not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "gone" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
