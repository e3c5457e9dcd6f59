"""What is in a cluster's folder; and the walk of `go.sh` there, which is begun and followed.

Nothing is remembered on this machine: locks, plan, log and result are files of that folder.

`runner status --to` and `runner logs --to` ask the `runner` of the far end, and read its log files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.errors import say
from runner.from_stage import (
    IncompleteError,
    UsageError,
    as_shown,
    print_line,
    quoted,
    suggest,
)
from runner.processes import is_alive
from runner.remote.road import OUTPUT, Road, find_run, plan_text, sha256_of
from runner.run_folder.logs import READ_BACK, newest, readable
from stage.carry.clusters import Cluster
from stage.carry.ssh import RemoteShell, ScriptResult, connected

_BEAT_S, _DEAD_AFTER_S = 15, 60  # of who sends; by the clock of that disk
_LIVES_S = 60  # a go.sh that was seen within this time is at work
_BEGINS_WITHIN_S = 20.0  # a shell of a loaded login node takes seconds to start
_MOST = 60_000  # bytes of a log in one answer
_LOOK = Path(__file__).with_name("look.sh")
# `--state` prints WALK HOST PID SECONDS, or `none`.
_IS_ALIVE = (
    f'is_alive() {{ s=$(sh go.sh --state) && [ "${{s##* }}" -lt {_LIVES_S} ]; }} 2>/dev/null'
)


@contextmanager
def understood(remote: RemoteShell) -> Iterator[None]:
    """Around what reads an answer: one that is none of ours ends with words."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IncompleteError(
            f"{remote.target}: what it answers is not understood: {as_shown(str(error))[:200]}.",
            f"Look at what is there: {remote.by_hand}ls -la {remote.inside('.airlift')}",
        ) from None


def go(remote: RemoteShell, to: str, words: str) -> ScriptResult:
    """Runs `sh go.sh WORDS` in the cluster's folder; UsageError if nothing was submitted there."""
    enter = f"cd {shlex.quote(remote.folder)} 2>/dev/null && [ -f go.sh ] || exit 99"
    answer = remote.ask(f"{enter}\nAIRLIFT_TO={quoted(to)} sh go.sh {words}")
    if answer.code == 99:
        again = f"runner submit RUN --to {quoted(to)}"
        raise UsageError(f"{remote.target}: nothing was submitted there yet.", again)
    return answer


@dataclass(frozen=True)
class There:
    """What is in the cluster's folder.

    Attributes:
        folder: its absolute path; empty: it is not there yet.
        bundle_id: of the finished bundle in it; empty: none. `kib`: of what is in `bundle/`.
        lock_id, name: of the bundle in it, finished or not; empty: none.
        made: `yes`: the newest script in the run's folder is of this very plan.
        intact: `yes`: the run file of this plan is there, and what it names.
        airlift: its version in the environment there; empty: that is not there. `slurm`: `yes`.
        code: `yes`: the project of the command is there. `near`: the one that was sent last.
        jobs: (number, state, script) of those in the queue.
    """

    jobs: tuple[tuple[int, str, str], ...]
    folder: str = ""
    bundle_id: str = ""
    lock_id: str = ""
    name: str = ""
    kib: str = ""
    made: str = ""
    intact: str = ""
    airlift: str = ""
    slurm: str = ""
    code: str = ""
    near: str = ""

    @staticmethod
    def look(remote: RemoteShell, road: Road) -> There:
        """Asks all of it in one session; writes nothing."""
        words = [remote.folder, road.env_folder, road.output, road.runs, road.inputs]
        words.append(road.code.folder if road.code else "")
        script = f"set -- {shlex.join(words)}\n{_LOOK.read_text('utf-8')}"
        text = as_shown(remote.run(script, f"{remote.target}: cannot look there"))
        lines = [line.partition("=") for line in text.splitlines()]
        found = {key: value for key, _, value in lines if key != "job"}
        if "slurm" in found and "noqueue" in found:
            raise IncompleteError(
                f"{remote.target}: Slurm's squeue does not answer there.",
                "Run the same command again: nothing was sent, and no second job is made.",
            )
        with understood(remote):
            jobs = [value.split("|", 2) for key, _, value in lines if key == "job"]
            return There(
                jobs=tuple((int(job[0]), job[1], job[2]) for job in jobs if len(job) == 3),
                **{key: found[key] for key in found.keys() & There.__annotations__},
            )

    def job_of(self, road: Road) -> tuple[int, str] | None:
        """The job in the queue that writes the run's folder: its number and state."""
        script = f"{self.folder}/{road.output}/submit.sbatch"
        return next(((job, state) for job, state, its in self.jobs if its == script), None)


def plan_digest(plan: Mapping[str, str]) -> str:
    """Of a plan without its walk, which is the first line of the file there."""
    return sha256_of(plan_text(plan))


_TAKE = f"""
(umask 022 && mkdir -p "$1/.airlift") && cd "$1" || exit 1
lock=.airlift/sending dead=.airlift/dead-sending.$$
: >.airlift/now
holder=$(cat $lock/holder 2>/dev/null)
if beat=$(stat -c %Y $lock/beat 2>/dev/null || stat -c %Y $lock 2>/dev/null); then
  age=$(($(stat -c %Y .airlift/now) - beat))  # far below 0: that disk's clock was put back
  if [ $age -lt {_DEAD_AFTER_S} ] && [ $age -gt -{_DEAD_AFTER_S} ] && [ "$holder" != "$3" ]
  then echo "$holder"; exit 0; fi
  mv $lock $dead 2>/dev/null
  if [ "$(cat $dead/holder 2>/dev/null)" = "$holder" ]; then rm -rf $dead
  else mv $dead $lock; fi # another took it over since we looked
fi
mkdir $lock 2>/dev/null || {{ echo another; exit 0; }}
: >$lock/beat && echo "$2" >$lock/holder && echo taken
"""


@contextmanager
def sending(remote: RemoteShell) -> Iterator[None]:
    """Lets one machine at a time send into the folder; waits for another.

    The lock is a folder there whose `beat` is touched while it is held. One that a process of this
    machine left is taken over at once, another's when it was not touched for 60 s.
    """
    me, dead, told = f"{socket.gethostname()} {os.getpid()}", "", False
    problem = f"{remote.target}: cannot be written"
    while True:
        words = shlex.join([remote.folder, me, dead])
        if (holder := remote.run(f"set -- {words}{_TAKE}", problem).strip()) == "taken":
            break
        host, _, process = holder.rpartition(" ")
        is_ours = host == socket.gethostname() and process.isdigit()
        dead = holder if is_ours and not is_alive(int(process)) else ""
        if not dead:
            if not told:
                print_line(f"waiting: {as_shown(holder)} (host, process) sends there", err=True)
            told = True
            time.sleep(3)  # each look is a command over the open ssh connection
    over, lock = threading.Event(), remote.inside(".airlift/sending")
    is_mine = f'[ "$(cat {lock}/holder 2>/dev/null)" = {shlex.quote(me)} ]'  # not taken over

    def beat() -> None:
        while not over.wait(_BEAT_S):
            with suppress(IncompleteError):  # rsync says it better
                remote.ask(f"{is_mine} && touch {lock}/beat")

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        with suppress(IncompleteError):
            remote.ask(f"{is_mine} && rm -rf {lock}")


def begin(remote: RemoteShell, road: Road, plan: Mapping[str, str]) -> str | None:
    """Sends run file, `go.sh` and plan, and starts `go.sh`, detached."""
    walk = secrets.token_hex(8)
    files = road.sent({"WALK": walk, **plan})
    # `cat` names a full disk; the printf of some shells does not.
    put = 'mkdir -p "${1%/*}" && printf %s "$2" | cat >"$1.new" && mv "$1.new" "$1" || exit 1'
    lines = [
        _IS_ALIVE,
        f"put() {{ {put}; }}",
        f"cd {shlex.quote(remote.folder)} || exit 1",
        "is_alive && exit 0",
        "mask=$(umask) && umask 022",  # a shell obeys them: they are written by their owner alone
        *(f"put {shlex.quote(f'./{name}')} {shlex.quote(text)}" for name, text in files.items()),
        "umask $mask",
        "(setsid nohup sh go.sh </dev/null >/dev/null 2>&1 &)",
        "echo begun",
    ]
    said = remote.run("\n".join(lines), f"{remote.target}: cannot write there, or start go.sh")
    return walk if "begun" in said else None


@dataclass(frozen=True)
class End:
    """How a walk of `go.sh` ended. `plan`: its digest; empty: it was replaced meanwhile."""

    walk: str
    code: int
    job: int
    plan: str


_POLL = f"""
{_IS_ALIVE}
cd "$1" || exit 1
is_alive && echo yes || echo no
echo $(cat .airlift/result 2>/dev/null)
sed 1q .airlift/plan 2>/dev/null || echo
sed 1d .airlift/plan 2>/dev/null | sha256sum | cut -c1-64
cat .airlift/log 2>/dev/null | wc -c
tail -c +$(($2 + 1)) .airlift/log 2>/dev/null | head -c {_MOST}
"""


def _poll(remote: RemoteShell, offset: int) -> list[str]:
    """Whether go.sh lives, result, walk and digest of the plan, the log's size, and its text."""
    words = shlex.join([remote.folder, str(offset)])
    return remote.run(f"set -- {words}{_POLL}", f"{remote.target}: cannot be read").split("\n", 5)


def walk(
    remote: RemoteShell, road: Road, plan: Mapping[str, str], show: Callable[[str], None]
) -> tuple[str | None, End | None]:
    """Begins or joins a walk, shows its log; its name (None: joined), its end (None: no result)."""
    try:
        _, before, _, _, size, _ = _poll(remote, 2**62)
        begun, offset = begin(remote, road, plan), int(size)
    except KeyboardInterrupt:
        problem = f"{remote.target}: interrupted before go.sh was seen to begin there."
        raise IncompleteError(problem, "The same command again goes on.") from None
    who = "go.sh" if begun else "a go.sh that is at work there already"
    say(f"{who} does this in {remote.target}, and goes on if this line breaks")
    began, pause = time.monotonic(), 0.5
    while True:
        lives, result, planned, digest, size, log = _poll(remote, offset)
        if new := max(0, min(int(size) - offset, _MOST)):
            show(log)
            offset, pause = offset + new, 0.5
        is_new = result != before and len(result.split()) == 3
        waits = begun and not is_new and time.monotonic() - began < _BEGINS_WITHIN_S
        if lives == "no" and not waits and offset >= int(size):
            if not is_new:
                return begun, None
            its, code, job = result.split()
            of = digest if planned == f"WALK={its}" else ""
            return begun, End(its, int(code), int(job), of)
        if not new:
            time.sleep(pause)
            pause = min(5.0, pause * 1.5)  # a verification of hours prints little


_ASK_EVERY_S = 20.0  # for the run's state, which costs a question to Slurm's controller
_LONGEST_PAUSE_S = 60.0  # between two tries to connect again


def _find(to: str, run: str | None) -> tuple[Cluster, str]:
    """The cluster, and RUN as it is known there: a run file of this machine is `output/NAME`."""
    cluster, name = find_run(to, run or "")
    if cluster.target.host is None:
        raise UsageError(
            f"--to {to}: a folder on this machine has no queue to ask.",
            f"On the cluster: runner status. Its results: runner pull RUN --to {quoted(to)}",
        )
    is_name = name and not re.fullmatch(rf"\d+(_\d+)?|({OUTPUT})?(/.*)?", name)
    return cluster, f"{OUTPUT}/{name}" if is_name else name


def _runner(remote: RemoteShell, to: str, *words: str, more: str = "") -> tuple[int, str]:
    """Runs `runner WORDS` in the cluster's folder, in the environment that was made there."""
    answer = go(remote, to, f"--runner {shlex.join(words)}{more}")
    if answer.code in (126, 127):
        raise IncompleteError(
            f"{remote.target}: `runner` is not there yet: its environment is not made.",
            f"runner submit RUN --to {quoted(to)} makes it, or joins what is at work there.",
        )
    return answer.code, answer.text


def _look(remote: RemoteShell, to: str, run: str) -> None:
    """Says which step go.sh does there; refuses a run that is not there, with those that are."""
    its = f'echo "$(tail -n 1 .airlift/steps)"; ls {OUTPUT}; [ -d {shlex.quote(run)} ]'
    answer, to = go(remote, to, f"--state; {{ {its}; }} 2>/dev/null"), quoted(to)
    state, last, *runs = [*as_shown(answer.text).split("\n"), ""]
    is_alive = re.search(r" [0-5]?\d$", state)  # seconds of its silence
    now = f"go.sh is at work there: {last.split()[1]}." if is_alive and last else ""
    if any(runs) and (answer.code == 0 or run == "" or run[0].isdigit()):
        return print_line(now, err=True) if now else None
    what = f"{remote.target}: {f'there is no {run}' if any(runs) else 'no run is there yet'}. {now}"
    next_ = f"runner {'status' if now or any(runs) else 'submit RUN'} --to {to}"
    remedy = suggest(Path(run).name, runs, next_)
    raise IncompleteError(what, remedy) if now else UsageError(what.strip(), remedy)


def status(to: str, run: str | None, *, as_json: bool) -> int:
    """Prints what `runner status` says there, and returns its exit code."""
    cluster, there = _find(to, run)
    with connected(cluster.target) as remote, understood(remote):
        _look(remote, to, there)
        words = filter(None, ("status", there, "--json" if as_json else ""))
        code, text = _runner(remote, to, *words)
    sys.stdout.write(as_shown(text[text.find("\n{") + 1 :] if as_json else text))
    return code


def states_in(text: str) -> set[str]:
    """The states of the runs in what `runner status --json` answers; an error if it is not that."""
    document = json.loads(text[text.find("\n{") + 1 :])  # a login shell there may greet first
    return {run["state"] for run in document.get("runs", [document])}


def logs(to: str, run: str, *, rank: int | None, lines: int, follow: bool) -> None:
    """Prints the last lines of a run's log there; with `follow`, new ones until the run is over.

    A line that breaks is opened again; nothing is shown twice.
    """
    cluster, there = _find(to, run)
    log, pause = _Log(to, there, rank, lines), 1.0
    while True:
        try:
            with connected(cluster.target) as remote, understood(remote):
                if not log.path:
                    log.begin(remote)
                if follow:
                    log.follow(remote)
                return
        except IncompleteError as error:
            if not (follow and log.path):
                raise
            print_line(f"{error.message} Trying again in {pause:.0f} s.", err=True)
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_S, pause * 2)


class _Log:
    """A log there, and how far it was shown; `run`: `output/NAME`, or a job's number."""

    def __init__(self, to: str, run: str, rank: int | None, lines: int) -> None:
        self.to, self.run, self.rank, self.lines = to, run, rank, lines
        self.path, self.offset = "", 0

    def begin(self, remote: RemoteShell) -> None:
        """Shows the last lines."""
        path = self._find(remote)
        print_line(f"{remote.target}/{path}:", err=True)
        start = max(0, int(remote.ask(f"wc -c <{remote.inside(path)}").text) - READ_BACK)
        data = remote.read(path, start)
        whole = data.rfind(b"\n") + 1
        self.path, self.offset = path, start + whole
        self._print(b"".join(newest(data[:whole].splitlines(True), self.lines)))

    def follow(self, remote: RemoteShell) -> None:
        """Shows what is written, until the run is over."""
        asked, pause, over, states = -_ASK_EVERY_S, 1.0, False, set[str]()
        while True:
            data = remote.read(self.path, self.offset)
            whole = len(data) if over else data.rfind(b"\n") + 1
            self._print(data[:whole])
            self.offset += whole
            if over:
                if states == {"finished"}:
                    name = self.path.split("/")[1]
                    print_line(f"next: runner pull {quoted(name)} --to {quoted(self.to)}", err=True)
                return
            pause = 1.0 if whole else min(5.0, pause * 1.5)
            if time.monotonic() - asked > _ASK_EVERY_S:
                asked = time.monotonic()
                code, text = _runner(remote, self.to, "status", self.run, "--json")
                states = states_in(text) if code == 0 else set()
                over = states != set() and not states & {"running", "waiting"}
                continue
            time.sleep(pause)

    def _print(self, data: bytes) -> None:
        for line in data.decode("utf-8", "replace").splitlines():
            print_line(readable(line))
        sys.stdout.flush()

    def _find(self, remote: RemoteShell) -> str:
        """The path of the log, as `runner logs` there chooses it."""
        _look(remote, self.to, self.run)
        rank = [] if self.rank is None else ["--rank", str(self.rank)]
        words = ("logs", self.run, "--lines", "0", *rank)
        code, text = _runner(remote, self.to, *words, more=" 2>&1")
        if code:
            said, _, remedy = as_shown(text[max(0, text.find("error: ")) :]).partition("\n  -> ")
            raise UsageError(f"{remote.target}: {said.removeprefix('error: ')}", remedy.strip())
        return f"{OUTPUT}/{text.rpartition(f'/{OUTPUT}/')[2].strip().removesuffix(':')}"
