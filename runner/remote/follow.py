"""`runner status --to` and `runner logs --to`: the `runner` of the far end, and its log files."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

from runner.errors import IncompleteError, UsageError, as_shown, print_line, quoted, suggest
from runner.inputs.far import Cluster, RemoteShell, connected
from runner.remote.road import OUTPUT, find_run
from runner.remote.there import go, understood
from runner.run_folder.logs import READ_BACK, newest, readable

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
        size = remote.ask(f"wc -c <{remote.inside(path)}").text
        start = max(0, int(size) - READ_BACK)
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
