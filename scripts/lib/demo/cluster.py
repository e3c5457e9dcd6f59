"""The cluster of `scripts/demo --environment`: scripts/slurm-site, or this machine offline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.lib.demo.demo import ROOT, DemoError, Shell, network_sandbox, say

USER = "alice"
SITE = ROOT / "scripts" / "slurm-site"
_SLURM = ("slurmctld", "slurmd", "sbatch", "munged")
PROGRAMS = (*_SLURM, "ip", "unshare", "nsenter", "setpriv", "pgrep")
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
JOB_S = 1800.0


@dataclass(frozen=True)
class Cluster:
    """The cluster that the bundle travels to.

    Attributes:
        home: the user's folder there.
        user: prefix of a command that this user runs.
        isolated: the same without any network, not even loopback.
        has_slurm: whether `sbatch` exists.
    """

    home: Path
    user: tuple[str, ...]
    isolated: tuple[str, ...]
    has_slurm: bool

    def run(
        self, shell: Shell, *command: str, output: Path | None = None, shown: str | None = None
    ) -> None:
        """Runs a command as the user, in their home; see `Shell.run`."""
        name = f"{USER}@login:" if self.has_slurm else "offline"
        run = partial(shell.run, cwd=self.home, sandbox=self.user, sandbox_name=name)
        run(*command, output=output, shown=shown)

    def run_inside(self, shell: Shell, text: str, output: Path | None = None) -> None:
        """Runs a line of shell as the user, in the environment."""
        line = f". envs/train/activate && {text}"
        self.run(shell, "sh", "-c", line, output=output, shown=line)

    def run_bare(self, shell: Shell, text: str) -> None:
        """Runs a line of shell as the user, without network and without variables, even PATH."""
        command = ("/usr/bin/env", "-i", "PATH=", "/bin/sh", "-c", text)
        run = partial(shell.run, cwd=self.home, sandbox=self.isolated, sandbox_name="isolated")
        run(*command, shown=f"'{text}'")

    @property
    def prefix(self) -> Path:
        """The folder of the environment."""
        return self.home / "envs" / "train"


@contextmanager
def cluster_of(folder: Path, shell: Shell) -> Iterator[Cluster]:
    """A Slurm site; where that is not possible, the reason is printed: this machine, offline."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if os.geteuid() != 0 or missing:
        why = f"{', '.join(missing)} not found" if missing else "only root can make one"
        say(f"No cluster ({why}): SKIPPED are Slurm, several nodes and their local disks")
        yield _this_machine(folder)
        return
    say("A cluster on this machine: real Slurm, a login node, two compute nodes, no way out")
    site = Path(tempfile.mkdtemp(prefix="airlift-site-", dir="/tmp"))  # short: it holds sockets
    shell.settings["SLURM_SITE"] = str(site)
    print(f"$ export SLURM_SITE={site}")
    # This machine's Python is not exposed: the user runs only programs of the bundle there.
    try:
        shell.run(str(SITE), "up", "--nodes", "2", "--cpus", "2", "--user", USER, cwd=folder)
        yield _on_site(site)
    finally:
        shell.run(str(SITE), "down", cwd=folder)
        shutil.rmtree(site, ignore_errors=True)


def _on_site(site: Path) -> Cluster:
    home = site / "home" / USER
    owner = home.stat()
    as_user = ("setpriv", f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups")
    return Cluster(
        home=home,
        user=(str(SITE), "exec", "-u", USER),
        isolated=(str(SITE), "exec", "unshare", "-n", *as_user),
        has_slurm=True,
    )


def _this_machine(folder: Path) -> Cluster:
    sandbox = network_sandbox()
    alone = ("unshare", "-n" if os.geteuid() == 0 else "-rn") if sandbox else ()
    return Cluster(home=folder / "cluster", user=sandbox, isolated=alone, has_slurm=False)


def follow_job(cluster: Cluster, shell: Shell, number: str, logs: Path) -> str:
    """Prints a job's log as it grows, until the job has ended; returns the log.

    Raises:
        DemoError: the job did not complete.
    """
    began, said = time.monotonic(), 0
    print(f"\n$ tail -f {logs.relative_to(cluster.home)}/slurm-{number}.out", flush=True)
    while True:
        state = _job_state(cluster, shell, number)
        files = sorted(logs.glob("slurm-*.out"))
        text = "".join(path.read_text(errors="replace") for path in files)
        print(text[said:], end="", flush=True)
        said = len(text)
        if state not in UNDER_WAY:
            break
        if time.monotonic() - began > JOB_S:
            raise DemoError(f"job {number} is still {state} after {JOB_S:.0f} s")
        time.sleep(1)
    shell.times.append((f"job {number}", time.monotonic() - began))
    if state != "COMPLETED":
        raise DemoError(f"job {number} ended as {state}")
    return text


def _job_state(cluster: Cluster, shell: Shell, number: str) -> str:
    command = [*cluster.user, "scontrol", "show", "job", number, "--oneliner"]
    environment = {**os.environ, **shell.settings}
    done = subprocess.run(
        command, cwd=cluster.home, env=environment, capture_output=True, text=True
    )
    match = re.search(r"\bJobState=(\w+)", done.stdout)
    if match is None:
        raise DemoError(f"Slurm does not know job {number}: {done.stderr.strip()}")
    return match[1]
