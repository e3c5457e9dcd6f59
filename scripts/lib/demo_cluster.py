"""Where the bundle of `scripts/demo --environment` arrives: a site of scripts/slurm-site, or this machine offline."""

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
from pathlib import Path

from scripts.lib.demo import ROOT, DemoError, Shell, network_wall, say

USER = "alice"
SITE = ROOT / "scripts" / "slurm-site"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv", "pgrep")
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
JOB_S = 1800.0


@dataclass(frozen=True)
class Cluster:
    """Where the bundle arrives.

    Attributes:
        home: the user's folder there.
        user: prefix of a command that this user runs.
        isolated: the same, where there is no network, not even loopback.
        has_slurm: whether `sbatch` is there.
    """

    home: Path
    user: tuple[str, ...]
    isolated: tuple[str, ...]
    has_slurm: bool

    def run(self, shell: Shell, *command: str, output: Path | None = None) -> None:
        """Runs a command as the user, in their home."""
        name = f"{USER}@login:" if self.has_slurm else "offline"
        shell.run(*command, cwd=self.home, wall=self.user, wall_name=name, output=output)

    def run_inside(self, shell: Shell, text: str, output: Path | None = None) -> None:
        """Runs a line of shell as the user, in the environment."""
        name, line = f"{USER}@login:" if self.has_slurm else "offline", f". envs/train/activate && {text}"
        command = ("sh", "-c", line)
        shell.run(*command, cwd=self.home, wall=self.user, wall_name=name, shown=line, output=output)

    def run_bare(self, shell: Shell, text: str) -> None:
        """Runs a line of shell as the user, without network and with nothing in the environment, not even a PATH."""
        command = ("/usr/bin/env", "-i", "PATH=", "/bin/sh", "-c", text)
        shell.run(*command, cwd=self.home, wall=self.isolated, wall_name="isolated", shown=f"'{text}'")

    @property
    def prefix(self) -> Path:
        """Where the environment is made."""
        return self.home / "envs" / "train"


@contextmanager
def cluster_of(folder: Path, shell: Shell) -> Iterator[Cluster]:
    """A Slurm site, or why there is none and this machine without its network."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if os.geteuid() != 0 or missing:
        why = f"{', '.join(missing)} not found" if missing else "only root can make one"
        say(f"No cluster ({why}): SKIPPED are Slurm, several nodes and their own disks; the rest goes on here")
        yield _this_machine(folder)
        return
    say("A cluster on this machine: real Slurm, a login node, two compute nodes, no way out")
    site = Path(tempfile.mkdtemp(prefix="airlift-site-", dir="/tmp"))  # short: it holds sockets
    shell.settings["SLURM_SITE"] = str(site)
    print(f"$ export SLURM_SITE={site}")
    # Nothing of this machine's Python is exposed: all that the user runs there is what the bundle brought.
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
    wall = network_wall()
    alone = ("unshare", "-n" if os.geteuid() == 0 else "-rn") if wall else ()
    return Cluster(home=folder / "cluster", user=wall, isolated=alone, has_slurm=False)


def follow_job(cluster: Cluster, shell: Shell, number: str, logs: Path) -> str:
    """Prints a job's log as it grows, until the job has ended; returns the log.

    Raises:
        DemoError: the job did not complete.
    """
    began, said = time.monotonic(), 0
    print(f"\n$ tail -f {logs.relative_to(cluster.home)}/slurm-{number}.out", flush=True)
    while True:
        state = _job_state(cluster, shell, number)
        text = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("slurm-*.out")))
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
    done = subprocess.run(command, cwd=cluster.home, env=environment, capture_output=True, text=True)
    match = re.search(r"\bJobState=(\w+)", done.stdout)
    if match is None:
        raise DemoError(f"Slurm does not know job {number}: {done.stderr.strip()}")
    return match[1]
