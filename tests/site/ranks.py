"""A job without training: the launcher and its ranks, as `runner train` uses them.

ranks.py submit FOLDER PROGRAM [KEY=VALUE...]    the request's fields; prints the job's number
ranks.py judge FOLDER PROGRAM JSON               what `runner check` says of each request
ranks.py sweep FOLDER PROGRAM KEY=A,B...         the same as a job array
ranks.py launch FOLDER PROGRAM                   in the batch script
ranks.py hold FOLDER PROGRAM                     the same, and it holds the folder as `runner train`
ranks.py rank FOLDER PROGRAM                     in each task
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from runner.from_stage import StageError
from runner.job import submit as submission
from runner.job.partition import ask_partition
from runner.job.submit import submit
from runner.launch import watch
from runner.launch.ranks import RankInfo, Start
from runner.launch.supervise import start_ranks
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import hold_run_folder
from runner.slurm import requeue
from runner.slurm.script import SbatchRequest, members


def request(folder: Path, program: str, **changes: object) -> SbatchRequest:
    fields: dict[str, object] = {
        "name": folder.name,
        "run_folder": folder,
        "working_folder": folder.parent,
        "command": (sys.executable, __file__, "launch", str(folder), program),
        "bin_folder": Path(sys.executable).parent,
        "nodes": 2,
        "tasks_per_node": 2,
        "gpus_per_node": 0,
        "time": "00:10:00",
    }
    return SbatchRequest(**{**fields, **changes})  # type: ignore[arg-type]


def meet(folder: Path, place: RankInfo) -> None:
    """All ranks add up their numbers over gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(place.rank)])
    dist.all_reduce(total)
    report(folder, place, total=total.item())
    dist.barrier()
    dist.destroy_process_group()


def report(folder: Path, place: RankInfo, **more: float) -> None:
    """A rank says what it is, and has no need of torch for it."""
    facts = {"host": socket.gethostname(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), **more}
    (folder / f"rank-{place.rank}.json").write_text(json.dumps({**place.variables(), **facts}))


def fail(folder: Path, place: RankInfo) -> None:
    """One rank fails with the code of a damaged bundle; the others would wait for it forever."""
    vitals = Heartbeat(folder / "logs", place.rank)
    if place.rank == 3:
        vitals.fail("Traceback of the rank that failed", 3, consequence=False)
        sys.exit(1 if (folder / "crash").exists() else 3)
    time.sleep(600)


def hang(folder: Path, place: RankInfo) -> None:
    """One rank stops, the others wait for it."""
    Heartbeat(folder / "logs", place.rank).beat("train")
    if place.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def save_when_asked(folder: Path, place: RankInfo) -> None:
    """Works until a signal comes, saves and leaves; done when started again."""
    if os.environ.get("SLURM_RESTART_COUNT"):
        (folder / f"resumed-{place.rank}").touch()
        return

    def stop(number: int, _frame: object) -> None:
        (folder / f"saved-{place.rank}").write_text(signal.Signals(number).name)
        if place.rank == 0:
            while len(list(folder.glob("saved-*"))) < place.world_size:
                time.sleep(0.01)
            RunFolder(folder).stopped.write_text("signal")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    (folder / f"works-{place.rank}").touch()
    time.sleep(600)


def start_slowly(folder: Path, place: RankInfo) -> None:
    """Has no handler yet when the signal comes, in each of its lives."""
    (folder / f"works-{os.environ.get('SLURM_RESTART_COUNT', 0)}-{place.rank}").touch()
    time.sleep(600)


def train_on(folder: Path, place: RankInfo, for_s: float = 600) -> None:
    """Shows continuously that it works, and records other ranks that do."""
    step = os.environ["SLURM_STEP_ID"]
    mine = folder / f"alive-{step}-{place.rank}"
    began = time.time()
    mine.touch()
    while time.time() < began + for_s:
        mine.touch()
        for other in folder.glob("alive-*"):
            if other.name.split("-")[1] != step and other.stat().st_mtime > began:
                with open(folder / "together", "a") as together:
                    together.write(f"{mine.name} beside {other.name}\n")
        time.sleep(0.05)


def train_briefly(folder: Path, place: RankInfo) -> None:
    """The same, for a second."""
    train_on(folder, place, for_s=1)


PROGRAMS = {
    "start_slowly": start_slowly,
    "train_on": train_on,
    "train_briefly": train_briefly,
    "meet": meet,
    "report": report,
    "fail": fail,
    "hang": hang,
    "save_when_asked": save_when_asked,
}
BOUNDS = {"start_slowly": {"MAX_REQUEUES": 1}}  # requeues, where there is no time for all 32


def main(step: str, path: str, program: str, *changes: str) -> int:
    folder = Path(path)
    if step == "sweep":
        wanted = request(folder, program, members=members(changes), tasks_per_node=1)
        print(submit(wanted, ask_partition(wanted.partition)))
        return 0
    if step == "judge":
        for fields in json.loads(changes[0]):
            wanted = request(folder, program, **fields)
            errors, said = [], []
            try:
                said.append(submission.ask_slurm(wanted, ask_partition(wanted.partition)).line)
            except StageError as error:
                errors.append([error.message, error.remedy])
            print(json.dumps({"errors": errors, "lines": said}))
        return 0
    if step == "submit":
        pairs = (change.partition("=") for change in changes)
        wanted = request(folder, program, **{key: json.loads(value) for key, _, value in pairs})
        submission._SETTLED_AFTER_S = 3
        try:
            print(submit(wanted, ask_partition(wanted.partition)))
        except StageError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        return 0
    if "--output" in changes:  # a member of a sweep
        path = changes[changes.index("--output") + 1]
        folder = Path(path)
        folder.mkdir(exist_ok=True)
    if step == "hold":
        held = RunFolder(folder)
        held.make()
        try:
            with hold_run_folder(held, os.environ):
                argv = [sys.executable, __file__, "rank", path, program]
                return start_ranks(argv, Start.in_job(os.environ), held, os.environ).exit_code
        except StageError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    if step == "launch":
        start = Start.of(os.environ)
        assert start is not None and start.job is not None
        hang_after_s = None
        if program == "hang":
            hang_after_s = 5.0
            watch.STACKS_WAIT_S, watch.COLLECTIVES_WAIT_S = 4.0, 0.5
        vars(requeue).update(BOUNDS.get(program, {}))
        argv = [sys.executable, __file__, "rank", path, program]
        run = RunFolder(folder)
        return start_ranks(argv, start, run, os.environ, hang_after_s=hang_after_s).exit_code
    assert Start.of(os.environ) is None
    place = RankInfo.of(os.environ)
    os.environ.update(place.variables())
    PROGRAMS[program](folder, place)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
