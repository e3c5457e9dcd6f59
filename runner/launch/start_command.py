"""Starts the command of a run file, watches it, and puts its job back in the queue.

The project is unpacked into the working folder; checkpoints that the end before cut off are set
aside; then srun starts the command's tasks, or the batch script's own node does, where it is one
process. What each task becomes is in `task.json` (`runner.exec.user_script.become`).

Slurm's signal before the time limit comes to this process alone (`--signal=B:USR1`). The command
would save at its own times, so this process waits until nothing is being written, and ends it then.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from runner.child import runner_command
from runner.errors import say
from runner.from_stage import UsageError, human_count, print_line, quoted, write_atomically
from runner.job.command_run import CommandRun
from runner.job.launchers import Places
from runner.launch.network import free_port, read_ephemeral_ports
from runner.launch.outcome import Outcome, RanksExit, outcome_of_command
from runner.launch.ranks import TORCH_VARIABLES, Start
from runner.launch.supervise import environment_for_ranks, run_step
from runner.launch.watch import Waited, recorded_signals
from runner.processes import die_with_parent
from runner.run_folder.layout import RunFolder, environment_record, write_json
from runner.run_folder.logs import last_words, log_of
from runner.run_folder.project import (
    Packed,
    description_of,
    read_description,
    set_earlier_work_aside,
    unpack,
)
from runner.run_folder.results import (
    ResultFile,
    half_written,
    is_asked,
    is_log,
    is_quiet,
    progress,
    results,
    set_aside,
)
from runner.run_folder.run_lock import age_s, disk_time, hold_run_folder
from runner.slurm.environment import (
    BINDS_GPUS,
    WITHOUT_RANKS,
    SlurmJobEnvironment,
    cpus_per_task,
    master_port,
    srun_command,
    tasks_per_node,
)
from runner.slurm.jobs import is_preempted, step_name
from runner.slurm.requeue import STOPPED, requeue
from runner.slurm.script import save_before_end_s

LOOK_EVERY_S = 1.0
QUIET_S = ((60.0, 10.0), (120.0, 3.0), (float("inf"), 1.0))
"""Until so many seconds after the signal -> nothing was written for so long: a save has ended.

Between two files of one save it is a second, and a network disk shows a change seconds later. A
command that saves each few seconds is never quiet for long.
"""
TO_END_S = 60.0
"""Before the time limit the command is ended in any case: srun kills 30 s after SIGTERM
(KillWait, slurm.conf), and the job must still ask Slurm to requeue it."""
BY_FORCE_S = 20.0
"""After SIGTERM from outside, Slurm kills the job in 30 s (KillWait)."""
_SETTINGS = (".json", ".yaml", ".yml")
MOST_LOG = 64 * 2**20  # bytes of a log in which lines are counted


def on_machine(run: CommandRun, start: Start, processes: int | None) -> CommandRun:
    """The run on this machine, where its command starts here and in no job.

    Args:
        processes: of a launcher in it, as `--processes` asks for.
    """
    if start.job is not None:
        return run
    return run.given(CommandRun.places, Places(nodes=1, gpus=processes or 0, tasks=None))


def start_command(
    run: CommandRun, start: Start, environ: Mapping[str, str], *, by_script: bool = False
) -> int:
    """Starts what `CommandRun.write_for_job` left in the run folder, and waits for its end.

    Args:
        run: as the job reads it, of `CommandRun.of_folder`.
        start: where the command starts.
        by_script: the job's script runs srun for this process, as `slurm.srun` asks for.

    Returns:
        The exit code: of the command; 5: it was stopped.

    Raises:
        StageError: it cannot be started.
    """
    run.folder.logs.mkdir(parents=True, exist_ok=True)
    with hold_run_folder(run.folder, environ):
        return _Begun.of(run, by_script=by_script).start(start, environ).exit_code


class _Begun:
    """One start of a command.

    Attributes:
        packed: what travelled.
        before: the results that were there.
        by_script: whether the job's script runs srun, as this process is in a container.
    """

    def __init__(
        self, run: CommandRun, packed: Packed, before: list[ResultFile], *, by_script: bool
    ) -> None:
        self.run, self.packed, self.before, self.by_script = run, packed, before, by_script
        self.number = len(run.earlier) + 1

    @staticmethod
    def of(run: CommandRun, *, by_script: bool) -> _Begun:
        """Makes the working folder ready."""
        folder, config = run.folder, run.config
        description = description_of(folder)
        archive = description.with_name(folder.project.name)
        packed = read_description(description)
        if packed is None:
            raise UsageError(
                f"{description}: the project of this run is not there.",
                "Submit the run again from its project: that packs it anew.",
            )
        if folder.work.is_dir() and not config.resumes:
            there = results(folder.work, packed.files)
            if any(not is_log(result.path) for result in there):
                kept = set_earlier_work_aside(folder.work)
                say(f"an earlier start left {human_count(len(there), 'file')}: now in {kept}")
        for line in unpack(archive, description, folder.work, goes_on=config.resumes):
            say(line)
        before = results(folder.work, packed.files)
        if broken := half_written(folder.work, before):
            aside = folder.root / "half-written" / str(len(run.earlier) + 1)
            for line in set_aside(folder.work, broken, aside):
                say(line)
            before = results(folder.work, packed.files)
        made = run.given(CommandRun.root, folder.work)
        return _Begun(made, packed, before, by_script=by_script)

    def start(self, start: Start, environ: Mapping[str, str]) -> Outcome:
        """Starts the command and waits for its end."""
        run, folder = self.run, self.run.folder
        folder.limit.unlink(missing_ok=True)
        if environ.get("SLURM_RESTART_COUNT", "0") == "0":  # else an earlier start of this job
            folder.missing.unlink(missing_ok=True)
        # Before its first checkpoint a command has often written its settings; Trainer ends where
        # it is to go on and has no checkpoint.
        saved = (one for one in self.before if not one.path.endswith(_SETTINGS))
        goes_on = run.config.resumes and any(not is_log(one.path) for one in saved)
        words = (*run.words, *(run.config.on_resume if goes_on else ()))
        launch = run.launch
        for line in launch.notes:
            say(line)
        task = {"words": words, "folder": run.start_folder, "bundle": str(run.inputs.bundle)}
        write_json(folder.task, {**task, "launch": asdict(launch)})
        self._note_start(words, environ)
        prefix = environment_for_ranks(run, start, environ)
        argv = runner_command("rank", str(folder.root), "command", prefix=prefix)
        say(f"start {self.number}: {' '.join(map(quoted, words))}  (in {folder.work})")
        begun = _size(_log(folder))
        on_first_node = environ.get("SLURM_NODEID", "0") == "0"
        # A step of its own for `slurm.srun`: what srun passes on reaches all processes of a step.
        is_here = launch.mode == "once" and on_first_node and not run.config.slurm.srun
        if start.job is None or is_here:
            ended = self._here(argv, environ)
        else:
            ended = self._by_srun(argv, start.job, environ)
        config = run.config
        may_be = ended.code or config.on_limit or config.resumes  # what saves on it may exit with 0
        if start.job is not None and not ended.signals and may_be:
            # Before a preemption the step alone gets SIGTERM: that is no failure of the command.
            by = frozenset({signal.SIGTERM}) if is_preempted(start.job.job_id) else frozenset()
            ended = replace(ended, signals=by)
        return self._end(ended, start, environ, begun)

    def _here(self, argv: Sequence[str], environ: Mapping[str, str]) -> RanksExit:
        """Runs one task on this machine. A step of srun would leave no room for those in it."""
        in_job = "SLURM_JOB_ID" in environ  # else nothing but us writes a log
        if in_job:
            argv = [*self.run.config.slurm.container, *argv]
        with recorded_signals() as received:
            # In a session of its own, as a rank is: Ctrl-C comes once, from us.
            process = subprocess.Popen(
                list(argv),
                env=_without_ranks(environ),
                stdin=subprocess.DEVNULL,
                stdout=None if in_job else subprocess.PIPE,
                stderr=None if in_job else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            # What the command leaves behind may hold the pipe open for hours.
            copying = threading.Thread(
                target=_copy, args=(process.stdout, self._own_log), daemon=True
            )
            copying.start()
            waited = self._wait(process, received)
            if process.poll() is None:
                _end_group(process)
        code = process.wait()
        copying.join(timeout=5)
        words = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return RanksExit(
            in_job=in_job, code=code, words=words, hung=waited.hung, signals=waited.signals
        )

    def _by_srun(
        self, argv: Sequence[str], job: SlurmJobEnvironment, environ: Mapping[str, str]
    ) -> RanksExit:
        launch = self.run.launch
        port = free_port(master_port(job.job_id, 0, read_ephemeral_ports()), environ)
        # A launcher that finds the run folder locked asks Slurm by this name.
        options = [f"--job-name={step_name(platform.node(), os.getpid())}"]
        if job.num_nodes * launch.tasks_per_node > 1:
            options += ["--kill-on-bad-exit=1", "--label"]
        slurm = self.run.config.slurm
        if slurm.srun:
            options += [*slurm.srun, *WITHOUT_RANKS]
        options += slurm.container
        command = srun_command(job, environ, launch.tasks_per_node, (*options, *argv))
        if launch.mode == "once":  # an salloc shell, which is on no node of the job
            cpus = f"--cpus-per-task={cpus_per_task(job, environ) * tasks_per_node(job)}"
            one = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", cpus)
            command = ["srun", *one, "--mpi=none", "--export=ALL", *options, *argv]
        say(" ".join(command))
        variables = {**_without_ranks(environ), "MASTER_PORT": str(port)}
        if self.by_script:
            return self._by_script(command, variables)
        ended = run_step(job, command, variables, self._wait, environ)
        return replace(ended, signals=self._signals)

    def _by_script(self, command: Sequence[str], variables: Mapping[str, str]) -> RanksExit:
        """Lets the job's script run a command of srun, which is not in this container."""
        step = self.run.folder.step
        stale = [f"-u {name}" for name in _STALE if name not in variables]
        port = f"MASTER_PORT={variables['MASTER_PORT']} PYTHONUNBUFFERED=1"
        words = f"exec env {' '.join(stale)} {port} {' '.join(map(quoted, command))}\n"
        with recorded_signals() as received:
            write_atomically(step / "start", words.encode())
            process = _OfScript(step / "code")
            waited = self._wait(process, received)
            if process.poll() is None:
                (step / "stop").touch()
            while (code := process.poll()) is None:
                time.sleep(LOOK_EVERY_S)
        words = f"srun exit code {code}"
        code = code if code <= 128 else 128 - code  # as a shell says it: ended by a signal
        return RanksExit(
            in_job=True, code=code, words=words, hung=waited.hung, signals=waited.signals
        )

    _signals: frozenset[int] = frozenset()

    @property
    def _own_log(self) -> Path:
        return self.run.folder.logs / "rank-0.log"

    def _wait(self, process: subprocess.Popen[bytes] | _OfScript, received: deque[int]) -> Waited:
        """Waits for the end; after a stop signal, until it may be ended."""
        hang_after = self.run.config.hang_after
        looked = time.monotonic()
        # Slurm's signal to all of a job ends the command before we look: that is no failure of it.
        while process.poll() is None or received:
            if received:
                number = received.popleft()
                self._signals = frozenset({number})
                if number != signal.SIGINT:  # Ctrl-C: a person waits for the end
                    self._until_quiet(process, received, number)
                if (
                    number == signal.SIGUSR1
                    and not self.run.config.on_limit
                    and process.poll() == 0
                ):
                    self._signals = frozenset()  # nothing but this process got it: it is done
                return Waited(None, self._signals)
            if isinstance(hang_after, float) and time.monotonic() - looked > hang_after / 10:
                looked = time.monotonic()
                if self._is_silent(hang_after):
                    say(f"nothing was written for {hang_after:.0f} s (hang_after): it is ended")
                    return Waited(None, frozenset(), hung=True)
            time.sleep(0.05)  # as for ranks: a command that has ended ends its job at once
        return Waited(None, self._signals)

    def _until_quiet(
        self, process: subprocess.Popen[bytes] | _OfScript, received: deque[int], number: int
    ) -> None:
        """Returns when the command has ended, when nothing is being written, or in time."""
        config, work = self.run.config, self.run.folder.work
        is_limit = number == signal.SIGUSR1
        left = _seconds_left(config.slurm.time)
        most = left - min(TO_END_S, left / 2) if is_limit else BY_FORCE_S  # of short jobs, half
        begun = time.monotonic()
        name = signal.Signals(number).name
        if config.on_limit:
            say(f"{name} received: the ranks get SIG{config.on_limit}, and are waited for")
            self.run.folder.limit.write_text(config.on_limit, encoding="ascii")
        else:
            say(f"{name} received: the command is ended when nothing is being written")
        while process.poll() is None and not received:
            waited = time.monotonic() - begun
            if waited > most:
                break
            quiet = next(quiet for until, quiet in QUIET_S if waited < until)
            if not config.on_limit and is_quiet(work, quiet, disk_time(self.run.folder.root)):
                return
            time.sleep(LOOK_EVERY_S)
        if process.poll() is None and not received:
            say(
                "it still writes, and its time is over: it is ended now. The next start sets aside "
                "what is half-written."
            )

    def _is_silent(self, seconds: float) -> bool:
        """Whether neither the log nor the working folder has changed for so long."""
        work, log = self.run.folder.work, _log(self.run.folder)
        if log is not None and age_s(log) < seconds:
            return False
        after = results(work, self.packed.files)
        now = disk_time(self.run.folder.root)
        return not any(now - result.changed < seconds for result in after)

    def _end(
        self, ended: RanksExit, start: Start, environ: Mapping[str, str], begun: int
    ) -> Outcome:
        """Records how the start ended, prints it, and requeues the job."""
        run, folder = self.run, self.run.folder
        every = results(folder.work, self.packed.files)
        after = [one for one in every if is_asked(one.path, run.config.results)]
        made = progress(self.before, every)
        log = _log(folder)
        said = last_words(_written_since(log, begun)) if log else last_words("")
        place = f"{log}:{said.line + _lines_before(log, begun)}" if log and said.line else ""
        outcome = outcome_of_command(ended, said, place, resumes=run.config.resumes, made=len(made))
        for line in outcome.messages:
            print_line(line, err=True)
        try:
            self._note_end(outcome, after)
        except OSError as error:  # the command may have filled the disk; its own words count
            say(f"{folder.environment}: the end is not recorded: {error.strerror}")
        if outcome.kind == "stopped" and start.job is not None and run.config.resumes and made:
            if self.by_script:
                (folder.step / STOPPED).touch()  # its script asks Slurm
            else:
                requeue(environ)
        return outcome

    def _note_start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        run = self.run
        environment = run.inputs.environment
        job, restart = environ.get("SLURM_JOB_ID"), environ.get("SLURM_RESTART_COUNT", "0")
        started = {"job": job, "restart": restart, "began": time.time(), "words": words}
        started["bundle_id"] = run.inputs.bundle_id
        facts = {
            "bundle_id": run.inputs.bundle_id,
            "environment_tree": environment.tree if environment else None,
            "code": {
                "commit": self.packed.commit,
                "dirty": self.packed.is_dirty,
                "digest": self.packed.digest,
                "from": self.packed.root,
            },
            "launch": asdict(run.launch),
            "starts": [*run.earlier, started],
        }
        record = environment_record(facts, environ)
        record["git_commit"] = self.packed.commit
        write_json(run.folder.environment, record)
        self._record = record

    def _note_end(self, outcome: Outcome, found: Sequence[ResultFile]) -> None:
        ended: dict[str, Any] = {
            "ended": time.time(),
            "kind": outcome.kind,
            "code": outcome.exit_code,
            "cause": outcome.cause,
            "place": outcome.place,
            "remedy": outcome.remedy,
            "results": len(found),
            "newest": found[-1].path if found else None,
        }
        self._record["starts"][-1] |= ended
        write_json(self.run.folder.environment, self._record)


class _OfScript:
    """What the job's script runs, as a process: it has ended when its exit code is in a file."""

    def __init__(self, code: Path) -> None:
        self.code = code

    def poll(self) -> int | None:
        """Its exit code; None: it still runs."""
        try:
            return int(self.code.read_text("ascii"))
        except OSError:
            return None


_STALE = (*TORCH_VARIABLES, "LOCAL_WORLD_SIZE", "SLURM_EXPORT_ENV", *BINDS_GPUS)


def _without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a task: ours, without those of another launcher's ranks."""
    kept = {name: value for name, value in environ.items() if name not in _STALE}
    return {"PYTHONUNBUFFERED": "1", **kept}  # else the last lines of a killed rank are lost


def _copy(output: IO[bytes] | None, log: Path) -> None:
    """Copies what a program writes to the terminal and to a log."""
    if output is None:
        return
    with log.open("ab") as file:
        while data := os.read(output.fileno(), 2**16):
            file.write(data)
            file.flush()
            with suppress(OSError):  # our terminal is gone: the command must not end because of it
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=30)  # as KillWait of Slurm
        except subprocess.TimeoutExpired:
            continue
        return


def _seconds_left(time_limit: str | None) -> float:
    """Until Slurm ends the job; where it does not say when, as the signal came before the end."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdecimal() else save_before_end_s(time_limit)


def _log(folder: RunFolder) -> Path | None:
    """The log of this job, or of this start; None: there is none yet."""
    try:
        log = log_of(folder.root, None)
    except UsageError:
        return None
    return log if log.is_file() else None


def _size(path: Path | None) -> int:
    return path.stat().st_size if path else 0


def _written_since(log: Path, size: int) -> str:
    with log.open("rb") as file:
        file.seek(max(size, file.seek(0, os.SEEK_END) - 2**18))
        return file.read().decode("utf-8", "replace")


def _lines_before(log: Path, size: int) -> int:
    """The lines of a log before what `_written_since` reads."""
    end = log.stat().st_size
    if end > MOST_LOG:
        return 0
    return log.read_bytes()[: max(size, end - 2**18)].count(b"\n")
