"""How ranks ended -> the exit code of the run, whether its job is requeued, and what is said.

The rows of outcome.json are data: a later judge can be asked with the same ones. The launcher is
asked in a fork of this process, with real processes that end as the row says and leave the files
that it names. An evaluation and a trial start their ranks in the same way.

A row has `by`, which says who started the ranks and waits for them:

- `here`: the launcher on one machine; `srun`: the one in a job.

And of `given`:

- `codes`: the exit code of each rank (negative: the signal that ended it; null: it was still at
  work when the first one ended). `srun`: its own exit code.
- `lines`: rank or `srun` -> the last lines that it wrote.
- `failures`: what ranks recorded. `files`: what else was left in the run folder. `earlier`: what
  was there before.
- `stop`: signals to the launcher. `hang`: the ranks made no progress.
- `slurm`: what Slurm says of the job.

Of these follow the exit `code`, whether Slurm is asked to `requeue` the job, and key words of what
is said, `says`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from runner.from_stage import StageError
from runner.launch import supervise, watch
from runner.launch.ranks import Start
from runner.launch.supervise import start_ranks
from runner.run_folder.layout import RunFolder
from tests.golden.record import path_of

Row = dict[str, Any]
JOB = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1",
    "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
}  # fmt: skip
PULSE = '{"count": 1, "phase": "step", "pid": 1, "host": "n1"}'


# ---- processes that end as a row says


def _lay_out(folder: Path, given: Mapping[str, Any]) -> None:
    """Writes the files that the processes leave to `left`, and their last lines to `lines`."""
    left, lines, run = folder / "left", folder / "lines", folder / "run"
    for path in (left / "logs", lines, run / "logs", folder / "bin"):
        path.mkdir(parents=True)
    files = dict(given.get("files", {}))
    for failure in given.get("failures", []):
        whole = {"host": "n1", "time": 1.0, "consequence": False, **failure}
        files[f"logs/rank-{failure['rank']}.failure"] = json.dumps(whole)
    if given.get("hang"):
        files |= {f"logs/rank-{rank}.pulse": PULSE for rank in range(2)}
    for name, text in files.items():
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text(text)
    for name, text in given.get("earlier", {}).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    for name, texts in given.get("lines", {}).items():
        (lines / name).write_text("".join(f"{text}\n" for text in texts))


def _end(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"kill -{-code} $$; sleep 9"


def _says(folder: Path, given: Mapping[str, Any], rank: int) -> str:
    """What a rank writes to its log before it ends."""
    if str(rank) not in given.get("lines", {}):
        return ":"
    return f"cat {folder}/lines/{rank} >>{folder}/run/logs/rank-{rank}.log"


def _rank_script(folder: Path, given: Mapping[str, Any]) -> str:
    """A shell script that is any of the ranks."""
    codes: list[int | None] = given.get("codes", [])
    stops: list[str] = given.get("stop", [])
    first = next((rank for rank, code in enumerate(codes) if code is not None), 0)
    cases = []
    for rank, code in enumerate(codes):
        leaves = f"cp -r {folder}/left/. {folder}/run/" if rank == first else ":"
        says = _says(folder, given, rank)
        waits = "while :; do sleep 0.02; done"
        if given.get("hang"):
            does = f"trap '' USR2; {leaves}; {waits}"
        elif stops:
            ends = "trap '' TERM;" if code is None else ""
            if code is not None and code >= 0:
                ends = f"trap '{leaves}; {says}; exit {code}' TERM USR1;"
            sends = "; ".join(f"kill -{name} $PPID; sleep 0.1" for name in stops)
            ready = " && ".join(f"[ -e {folder}/ready-{n} ]" for n in range(len(codes)))
            sends = f"until {ready}; do sleep 0.02; done; {sends}" if rank == 0 else ":"
            does = f"{ends} : >{folder}/ready-{rank}; {sends}; {waits}"
        elif code is None:
            does = waits
        else:
            does = f"{leaves}; {says}; {_end(code)}"
        cases.append(f"{rank}) {does} ;;")
    return "case $RANK in\n" + "\n".join(cases) + "\nesac\n"


def _programs(folder: Path, given: Mapping[str, Any]) -> None:
    """Slurm's programs, on the PATH of the fork."""
    slurm = {"BatchFlag": "1", "JobState": "RUNNING", "JobId": "17", **given.get("slurm", {})}
    shown = " ".join(f"{name}={value}" for name, value in slurm.items())
    leaves = f"cp -r {folder}/left/. {folder}/run/"
    says = f"cat {folder}/lines/srun >&2" if "srun" in given.get("lines", {}) else ":"
    says = "; ".join([*(_says(folder, given, rank) for rank in range(2)), says])
    ends = f"{leaves}; {says}; {_end(given.get('srun', 0))}"
    if given.get("stop"):
        ends = f"trap '{ends}' USR1; kill -{given['stop'][0]} $PPID; while :; do sleep 0.02; done"
    if given.get("hang"):
        ends = f"trap '' USR2; {leaves}; while :; do sleep 0.02; done"
    answers = (
        f"echo '{shown}'" if slurm["JobState"] else "echo 'Unable to contact slurm' >&2; exit 1"
    )
    requeues = "echo 'Job is not allowed' >&2; exit 1" if slurm.get("refuses") else ":"
    over = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    for name, body in {
        "srun": ends,
        "scontrol": f"case $1 in show) {answers} ;; *) : >{folder}/requeued; {requeues} ;; esac",
        # A requeued job waits a minute for its end, and Slurm is asked again after seconds.
        "sleep": 'case $1 in 5 | 60) ;; *) exec /bin/sleep "$1" ;; esac',
        "squeue": over if slurm.get("over") else "echo RUNNING",
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)


# ---- the judges


def _started(argv: list[str], ranks: Start, folder: Path) -> int:
    run = RunFolder(folder / "run")
    return start_ranks(argv, ranks, run, os.environ, hang_after_s=0.1).exit_code


def _here(folder: Path, given: Mapping[str, Any]) -> int:
    argv = ["sh", "-c", _rank_script(folder, given)]
    return _started(argv, Start(len(given["codes"])), folder)


def _srun(folder: Path, given: Mapping[str, Any]) -> int:
    restarts = str(given.get("slurm", {}).get("restarts", 0))
    os.environ.update(JOB, SLURM_RESTART_COUNT=restarts)
    return _started(["rank"], Start.in_job(os.environ), folder)


JUDGES: dict[str, Callable[[Path, Mapping[str, Any]], int]] = {"here": _here, "srun": _srun}


# ---- a row

AT_ONCE = 8


def _wait_less() -> None:
    """Ranks that end, and those that srun left, are looked at less often."""
    real = time.sleep
    mock.patch.object(time, "sleep", lambda seconds: real(min(seconds, 0.02))).start()
    supervise.KILL_AFTER_S = 1.0
    for name in ("LOOK_EVERY_S", "STACKS_WAIT_S", "COLLECTIVES_WAIT_S"):
        setattr(watch, name, 0.05)


def _in_fork(row: Row, folder: Path) -> NoReturn:
    """Judges a row: prints to `said`, and ends with the exit code."""
    code = 99
    try:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1)
        os.environ.clear()
        os.environ.update(PATH=f"{folder}/bin:/usr/bin:/bin", TMPDIR=str(folder), USER="ada")
        _wait_less()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        try:
            code = JUDGES[row["by"]](folder, row["given"])
        except StageError as error:
            print(f"error: {error}")
            code = error.exit_code
    except BaseException:  # noqa: BLE001 - the end of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def begun(row: Row, folder: Path) -> int:
    """Judges the row in a process of its own."""
    folder.mkdir()
    _lay_out(folder, row["given"])
    _programs(folder, row["given"])
    child = os.fork()
    if child == 0:
        _in_fork(row, folder)
    return child


def judged(row: Row, folder: Path, child: int) -> Row:
    """The row with what is so now: exit code, requeue, and those of its words that are said."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (folder / "said").read_text(errors="replace")
    if code == 99 or code < 0:
        raise AssertionError(f"{row['name']}: no judge ended with {code}:\n{said}")
    missing = [word for word in row["says"] if word not in re.sub(r"\s+", " ", said)]
    for word in missing:
        print(f"{row['name']}: {word!r} is not in:\n{said}", file=sys.stderr)
    return {
        "name": row["name"], "by": row["by"], "code": code,
        "requeue": (folder / "requeued").exists(),
        "says": [word for word in row["says"] if word not in missing], "given": row["given"],
    }  # fmt: skip


def rows() -> list[Row]:
    found: list[Row] = json.loads(path_of("outcome").read_text(encoding="utf-8"))
    return found


def as_text(found: list[Row]) -> str:
    """Two lines for a row: its name and what follows; what is given."""
    blocks = []
    for row in found:
        first = {name: value for name, value in row.items() if name != "given"}
        both = [
            json.dumps(part, ensure_ascii=False)[1:-1] for part in (first, {"given": row["given"]})
        ]
        blocks.append("{" + ",\n ".join(both) + "}")
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def record(folder: Path) -> str:
    """The rows of the file, judged again. A new row is written by hand, without what follows."""
    asked, begins, found = rows(), list[int](), list[Row]()
    for number in range(len(asked) + AT_ONCE):  # most of them mostly wait
        if number < len(asked):
            begins.append(begun(asked[number], folder / str(number)))
        if (done := number - AT_ONCE) >= 0:
            found.append(judged(asked[done], folder / str(done), begins[done]))
    return as_text(found)
