"""The folder of a cluster with `go.sh`, a real bundle, and a PATH of our choice.

`runner`, `squeue` and `sbatch` are stand-ins that note what they are asked: what they really do is
tested in tests/site. `sleep` is 20 times as fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

import runner.remote
from runner.remote.road import plan_text, sha256_of
from tests.stage.bundles import make_bundle

GO = Path(runner.remote.__file__).with_name("go.sh")
# busybox runs its own programs, not those on PATH: its `sleep` takes its time.
SHELLS = [
    pytest.param(command, marks=marks, id=command[0])
    for command, marks in ((["dash"], ()), (["bash"], ()), (["busybox", "sh"], pytest.mark.slow))
    if shutil.which(command[0])
]
each_shell = pytest.mark.parametrize("shell", SHELLS)
TOOLS = (
    "sh", "bash", "sed", "tr", "cut", "sort", "grep", "cat", "rm", "mkdir", "rmdir", "uname",
    "kill", "touch", "stat", "mv", "cp", "date", "head", "tail", "tee", "find", "cmp", "dirname",
    "nice", "sha256sum", "sync", "ls", "nohup", "setsid", "python3", "env", "id", "tar", "gzip",
)  # fmt: skip
PROGRAMS = {
    "sleep": 'exec /bin/sleep "$(echo "$1" | sed "s/.*/0.05/")"',
    "runner": """\
echo "runner $*" >>"$FAR/calls"
echo "runner $1 speaks"
case $1 in
  check) [ ! -f "$FAR/check" ] || exit "$(cat "$FAR/check")" ;;
  submit)  # as the real one: it finds the job that an earlier call made, or refuses
    mkdir -p output/my && : >>"$FAR/queue"
    echo "runner train $PWD/$3" >"$FAR/script"
    if [ ! -s "$FAR/queue" ]; then mv "$FAR/script" output/my/submit.sbatch && echo 17 >"$FAR/queue"
    else cmp "$FAR/script" output/my/submit.sbatch || exit 2; fi
    cp "$FAR/queue" output/my/submitted.new && mv output/my/submitted.new output/my/submitted ;;
esac
""",
    "squeue": """\
case $2 in
  -j) ! grep -qs "$3" "$FAR/queue" "$FAR/verifying" || echo PENDING ;;
  -u) ! [ -s "$FAR/queue" ] || echo "17 $PWD/output/my/submit.sbatch" ;;
esac
""",
    # The job that verifies: it waits for the file `node`, then runs what --wrap says.
    "sbatch": """\
echo "sbatch $*" >>"$FAR/calls"
for wrapped; do :; done
echo 21 >"$FAR/verifying"
(
  until [ -e "$FAR/node" ]; do sleep 1; done
  cd "$FAR/../work" && sh -c "$wrapped" >.airlift/verify-log 2>&1
  rm "$FAR/verifying"
) >/dev/null 2>&1 &
echo 21
""",
}


def plan_of(text: str, **changes: str) -> dict[str, str]:
    """A plan for a run file `my.yaml`."""
    job = {"RUN": "my.yaml", "OUTPUT": "output/my", "INPUTS": f"{sha256_of(text)}  my.yaml"}
    job |= {key: value for key, value in changes.items() if key != "WALK"}
    return {"WALK": "w1", **job, "RUNS": f"runs-{sha256_of(plan_text(job))[:16]}", **changes}


class Far:
    """A folder on a cluster.

    Args:
        folder: new; everything is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.notes = folder / "work", folder / "bin", folder / "notes"
        for made in (self.folder / ".airlift", self.bin, self.notes):
            made.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        for name, text in PROGRAMS.items():
            self.add(name, text)
        shutil.copy(GO, self.folder)
        self.id = make_bundle(self.folder / "bundle", big=False).id
        self.plan()

    def add(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def plan(self, text: str = "name: my\n", **changes: str) -> str:
        """Sends run file and plan, as a submit does; returns the folder of the run file."""
        plan = plan_of(text, **{"BUNDLE_ID": self.id, **changes})
        (self.folder / plan["RUNS"]).mkdir(exist_ok=True)
        (self.folder / plan["RUNS"] / "my.yaml").write_text(text)
        (self.folder / ".airlift/plan").write_text(plan_text(plan))
        return plan["RUNS"]

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "HOME": str(self.notes),
            "XDG_STATE_HOME": str(self.notes / "state"),
            "FAR": str(self.notes),
        }

    def start(self, shell: list[str], *words: str | Path, go: Path | None = None) -> Popen:
        """Starts go.sh in a session of its own."""
        command = [shutil.which(shell[0]) or "", *shell[1:], go or self.folder / "go.sh", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environ, cwd=self.notes, stdin=subprocess.DEVNULL, stdout=pipe,
            stderr=pipe, text=True, start_new_session=True,
        )  # fmt: skip

    def go(
        self, shell: list[str], *words: str | Path, go: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        running = self.start(shell, *words, go=go)
        said, complaints = running.communicate(timeout=60)
        return subprocess.CompletedProcess(running.args, running.returncode, said, complaints)

    def read(self, name: str) -> str:
        path = self.folder / ".airlift" / name
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[str]:
        """The lines of `steps`, without walk and seconds."""
        return [" ".join(line.split()[1:4]) for line in self.read("steps").splitlines()]

    @property
    def calls(self) -> list[str]:
        path = self.notes / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def age_lock(self, seconds: float) -> None:
        """As if its owner had been silent for some time."""
        then = time.time() - seconds
        lock = self.folder / ".airlift/lock"
        for path in (*lock.glob("beat"), lock):
            os.utime(path, (then, then))


Popen = subprocess.Popen[str]


def kill_all(running: Popen) -> None:
    """kill -9 of the whole session, as a node that dies."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
