"""The locks of a run folder: one process trains there, and one submits.

`hold_run_folder` makes the folder `<run folder>/running` (`submitting` of `runner submit`), touches
the file in it while it holds the lock, and removes it at the end. A process that was killed leaves
the folder behind; another takes the lock when neither the old one nor its ranks run
(docs/adr/0012). flock is not used: on some Lustre mounts it does nothing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runner.errors import FULL_DISK, OTHER_RUN, say
from runner.from_stage import IncompleteError, UsageError, quoted
from runner.processes import birth_time, is_alive
from runner.run_folder.layout import HOLDER, RunFolder
from runner.slurm.jobs import running_step, states, step_name

# Fifteen touches within GONE_AFTER_S: NFS may show another node a time that is a minute old.
TOUCH_EVERY_S = 20.0
GONE_AFTER_S = 300.0
"""A launcher on another machine that Slurm does not know is gone after this silence."""

_TRIES = 5  # each fails only where another process took or left the lock at that moment


class HeldError(UsageError):
    """Another process works in the run folder."""


@dataclass(frozen=True)
class RunLock:
    """The process that holds a run folder: the content of `running/holder`.

    Attributes:
        born: the `birth_time` of its process; None where there is no /proc.
        machine: identifies the boot and the process namespace: process numbers mean something else
            in a container, or on a host with the same name.
        job: the number of its Slurm job, or None.
        restart: the restart count of its Slurm job, or 0.
        since: when it took the lock, in seconds since 1970.
    """

    pid: int
    born: str | None
    host: str
    machine: str
    job: int | None
    restart: int
    since: float

    @staticmethod
    def me(environ: Mapping[str, str]) -> RunLock:
        """The lock of this process."""
        job, restart = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "")
        return RunLock(
            pid=os.getpid(),
            born=birth_time(os.getpid()),
            host=platform.node(),
            machine=_machine(),
            job=int(job) if job.isdecimal() else None,
            restart=int(restart) if restart.isdecimal() else 0,
            since=time.time(),
        )

    def is_gone_from(self, machine: str) -> bool:
        """Whether its process was one of this machine and has ended."""
        return self.machine == machine and not is_alive(self.pid, self.born)

    def step(self) -> str | None:
        """The Slurm step of its ranks that still runs; empty: none. None: unknown."""
        return running_step(self.job, step_name(self.host, self.pid)) if self.job else None

    def describe(self) -> str:
        """For people: `process 4711 on gpu7 (job 17), since 2026-11-22 10:00:00`."""
        job = f" (job {self.job})" if self.job is not None else ""
        since = time.strftime("%F %T", time.localtime(self.since))
        return f"process {self.pid} on {self.host}{job}, since {since}"


@contextmanager
def hold_run_folder(
    folder: RunFolder, environ: Mapping[str, str], *, to_submit: bool = False
) -> Iterator[None]:
    """Holds a lock of a run folder while the block runs.

    Args:
        to_submit: the lock of those who submit, not of those who train.

    Raises:
        UsageError: another process holds it; names that process.
        IncompleteError: the file cannot be written.
    """
    me, lock = RunLock.me(environ), folder.submitter if to_submit else folder.holder
    _take(folder, lock, me)
    over = threading.Event()
    touching = threading.Thread(target=_touch, args=(lock, over), daemon=True)
    touching.start()
    try:
        yield
    finally:
        over.set()
        touching.join()
        if _read(lock) == me:
            for path in (lock.parent, *folder.root.glob(_aside(lock, "*").name)):
                shutil.rmtree(path, ignore_errors=True)


def check_not_held(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Checks that no launcher holds the run folder.

    Raises:
        UsageError: one does; names it, since when, and what to do.
    """
    me = RunLock.me(environ)
    if holder := holder_of(folder, me):
        raise _refused(folder, folder.holder, holder, me)


def holder_of(folder: RunFolder, me: RunLock) -> RunLock | None:
    """The launcher that holds the run folder; None if there is none or it is gone."""
    holder = _read(folder.holder)
    if holder is None or _why_gone(holder, me, folder, folder.holder):
        return None
    return holder


def _take(folder: RunFolder, lock: Path, me: RunLock) -> None:
    for _ in range(_TRIES):
        try:
            if _create(lock.parent, me):
                return
        except OSError as error:
            remedy = "Free space or quota there" if error.errno in FULL_DISK else "Correct that"
            raise IncompleteError(
                f"{lock}: {error.strerror}.", f"{remedy}, then run the same command again."
            ) from None
        _move_aside(folder, lock, me)
    raise UsageError(
        f"{lock.parent}: other processes start and end in this run folder.",
        f"runner status {quoted(folder.root)}",
    )


def _create(path: Path, me: RunLock) -> bool:
    """Makes the lock's folder with its content in one step; whether there was none.

    No process sees a lock without content, and a folder never takes the place of one that is not
    empty.
    """
    own = path.with_name(f"{path.name}.{me.host}.{me.pid}.{threading.get_native_id()}")
    try:
        own.mkdir()
        (own / HOLDER).write_text(json.dumps(asdict(me)), encoding="utf-8")
        try:
            own.rename(path)
        except OSError:  # NFS may report a step that it did as a failure
            return _read(path / HOLDER) == me
        return True
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _move_aside(folder: RunFolder, lock: Path, me: RunLock) -> None:
    """Moves the lock of a process that is gone aside.

    The new name is of that process alone, or of that torn file. If it is taken, another launcher
    was first: then the rename fails, and the new lock of that launcher stays.

    Raises:
        UsageError: it is not gone.
    """
    holder = _read(lock)
    why = "" if holder is None else _why_gone(holder, me, folder, lock)
    if holder is not None and not why:
        raise _refused(folder, lock, holder, me)
    if holder is not None:
        name = f"{holder.pid}.{holder.since}"
    else:
        try:
            torn = lock.stat()
        except OSError:  # no lock any more; or an empty folder, which goes only while it is empty
            with suppress(OSError):
                lock.parent.rmdir()
            return
        name = f"unreadable.{torn.st_ino}.{torn.st_mtime_ns}"
    try:
        if _read(lock) == holder:
            lock.parent.rename(_aside(lock, name))
    except OSError:
        time.sleep(0.3)  # another launcher was first, and is about to make its own lock
    else:
        if holder is not None:
            say(f"{folder.root}: left by {holder.describe()}: {why}; its lock is taken over")


def _aside(lock: Path, name: str) -> Path:
    return lock.parent.with_name(f"{lock.parent.name}-left.{name}")


def _refused(folder: RunFolder, lock: Path, holder: RunLock, me: RunLock) -> HeldError:
    if lock == folder.submitter:
        return HeldError(
            f"{folder.root}: {holder.describe()} submits this run.",
            f"Wait for its end; then see the job: runner status {quoted(folder.root)}",
        )
    if holder.is_gone_from(me.machine) and (step := holder.step()):
        return HeldError(
            f"{folder.root}: {holder.describe()} was killed, and its ranks still run "
            f"(step {step}).",
            f"scancel {step}; then run the same command again.",
        )
    return HeldError(
        f"{folder.root}: {holder.describe()} works in this run folder.",
        f"runner status {quoted(folder.root)}; wait for its end, or give the run {OTHER_RUN}.",
    )


def _why_gone(holder: RunLock, me: RunLock, folder: RunFolder, lock: Path) -> str:
    """The reason to believe that a launcher and its ranks are gone; empty: they may still run."""
    here, same_job = holder.machine == me.machine, holder.job == me.job
    if holder.job is not None and same_job and me.restart > holder.restart:
        return "this job was requeued"
    if here and not holder.is_gone_from(me.machine):
        return ""
    if here and holder.job is None:
        return "that process is gone"  # and its ranks: the kernel ends them with it
    known = states(holder.job) if holder.job is not None and (here or not same_job) else None
    if known is not None:
        if not known:
            return f"job {holder.job} is over"
        # While a job ends, Slurm no longer lists its steps, which may still run.
        if not here or "COMPLETING" in known:
            return ""
        if (step := holder.step()) is not None:
            return "" if step else "that process is gone"
    signs = [lock]
    if lock == folder.holder:
        signs += [folder.metrics, *folder.logs.glob("rank-*.pulse")]
    silent = min(map(age_s, signs))
    return f"no sign of life for {silent / 60:.0f} min" if silent > GONE_AFTER_S else ""


def _touch(path: Path, over: threading.Event) -> None:
    while not over.wait(TOUCH_EVERY_S):
        with suppress(OSError):
            os.utime(path)


def _read(path: Path) -> RunLock | None:
    try:
        found = RunLock(**json.loads(path.read_text(encoding="utf-8")))
        return replace(found, pid=int(found.pid), since=float(found.since))
    except (OSError, ValueError, TypeError):
        return None


def age_s(path: Path) -> float:
    """Seconds since a file was written; by the clock of its disk, which is not that of each node.

    Infinite: there is no such file.
    """
    try:
        written = path.stat().st_mtime
    except OSError:
        return float("inf")
    return disk_time(path.parent) - written


def disk_time(folder: Path) -> float:
    """Now, by the clock of a folder's disk: the mtime of a file that is written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as now:
            return os.fstat(now.fileno()).st_mtime
    except OSError:  # this user may only read there
        return time.time()


def _machine() -> str:
    """This host, boot and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()
