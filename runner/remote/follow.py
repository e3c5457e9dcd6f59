"""`runner status --to` and `runner logs --to`: the `runner` of the far end, and its log files."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

from runner.errors import IncompleteError, UsageError, as_shown, print_line, quoted
from runner.inputs.far import Cluster, RemoteShell, connected
from runner.remote.plan import OUTPUT, find_run
from runner.remote.there import go, understood
from runner.run_folder.logs import READ_BACK, readable

_ASK_EVERY_S = 20.0
_LONGEST_PAUSE_S = 60.0  # between two tries to connect again


def _find(to: str, run: str | None) -> tuple[Cluster, str]:
    """The cluster, and RUN as it is known there: a run file of this machine is `output/NAME`."""
    cluster, name = find_run(to, run or "")
    if cluster.target.host is None:
        raise UsageError(
            f"--to {to}: a folder on this machine has no queue to ask.",
            "On the cluster: runner status. Results that were carried back: runner pull.",
        )
    is_name = name and "/" not in name and not name.isdigit() and name != OUTPUT
    return cluster, f"{OUTPUT}/{name}" if is_name else name


def _runner(remote: RemoteShell, to: str, *words: str) -> tuple[int, str]:
    """Runs `runner WORDS` in the cluster's folder, in the environment that was made there."""
    answer = go(remote, to, f"--runner {shlex.join(words)}")
    if answer.code in (126, 127):
        step = go(remote, to, "--state && tail -n 1 .airlift/steps").text
        state, _, last = as_shown(step).strip().partition("\n")
        is_at_work = state not in ("", "none") and last
        now = f" go.sh is at work there: {last.split()[1]}." if is_at_work else ""
        raise IncompleteError(
            f"{remote.target}: `runner` is not there yet: its environment is not made.{now}",
            f"runner submit RUN --to {quoted(to)} makes it, or joins what is at work there.",
        )
    return answer.code, answer.text


def status(to: str, run: str | None, *, as_json: bool) -> int:
    """Prints what `runner status` says there, and returns its exit code."""
    cluster, there = _find(to, run)
    words = ["status", *[there] * bool(there), *["--json"] * as_json]
    with connected(cluster.target) as remote:
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
            with connected(cluster.target) as remote:
                with understood(remote):
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
    """A log there, and how far it was shown.

    Attributes:
        to: the cluster, as the user named it.
        run: `output/NAME`, or a job's number.
    """

    def __init__(self, to: str, run: str, rank: int | None, lines: int) -> None:
        self.to, self.run, self.rank, self.lines = to, run, rank, lines
        self.path, self.offset = "", 0

    def begin(self, remote: RemoteShell) -> None:
        """Shows the last lines, once."""
        if self.path:
            return
        path = self._find(remote)
        print_line(f"{remote.target}/{path}:", err=True)
        size = remote.ask(f"wc -c <{remote.inside(path)}").text
        start = max(0, int(size) - READ_BACK)
        data = remote.read(path, start)
        whole = data.rfind(b"\n") + 1
        self.path, self.offset = path, start + whole
        self._print(b"".join(data[:whole].splitlines(True)[-self.lines :][: self.lines]))

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
        """The path of the log, as `runner logs` chooses it: the newest job's, or a rank's."""
        is_job = self.run.isdigit()
        folder = f"{OUTPUT}/*" if is_job else shlex.quote(self.run)
        script = f"cd {shlex.quote(remote.folder)} 2>/dev/null && ls -d {folder}/logs/*"
        names = remote.ask(f"{script} 2>/dev/null").text.splitlines()
        job = self.run if is_job else r"\d+"
        wanted = (
            rf"slurm-({job})(?:_\d+)?\.out" if self.rank is None else rf"rank-({self.rank})\.log"
        )
        found = [(int(m[1]), name) for name in names if (m := re.fullmatch(f".*/{wanted}", name))]
        if not found:
            have = as_shown(", ".join(Path(name).name for name in names[:8]))
            raise UsageError(
                f"{remote.target}: no such log of {self.run}.",
                f"There are: {have}."
                if have
                else f"The job waits, or never began: runner status --to {quoted(self.to)}",
            )
        return max(found)[1]
