"""A cluster on this machine, and a real sshd on its login node: for scripts/demo and the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm-site"
USER = "alice"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacking(*more: str) -> str:
    """What this machine lacks for a site, in words; empty: nothing.

    Args:
        more: programs that are needed besides.
    """
    if os.geteuid() != 0:
        return "root"
    return ", ".join(name for name in (*_PROGRAMS, *more) if not shutil.which(name, path=_PATH))


def control(
    site: Path, *arguments: str, check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """scripts/slurm-site itself, for the site in that folder."""
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=os.environ | {"SLURM_SITE": str(site)},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=check,
        timeout=300,
    )


def home_of(site: Path) -> Path:
    """The home of the ordinary user, on the shared disk."""
    return site / "home" / USER


@contextmanager
def running_site(*options: str, expose: Path = ROOT) -> Iterator[Path]:
    """The folder of a site with two nodes, from its start to its end.

    Args:
        options: of `scripts/slurm-site up`.
        expose: a folder that its user must see, wherever it is.

    Raises:
        CalledProcessError: it did not start; `stderr` says why.
    """
    site = Path(tempfile.mkdtemp(prefix="slurm-site-", dir="/tmp"))  # short: it holds sockets
    # The user must be able to read this Python and this checkout, wherever root keeps them.
    readable = {str(ROOT), sys.prefix, sys.base_prefix, str(expose)}
    exposed = [word for path in sorted(readable) for word in ("--expose", path)]
    try:
        ours = ("--nodes", "2", "--cpus", "4", "--user", USER, "--with", str(os.getpid()))
        control(site, "up", *ours, *options, *exposed)
        yield site
    finally:
        control(site, "down")
        shutil.rmtree(site, ignore_errors=True)


@contextmanager
def ssh_to(site: Path) -> Iterator[Path]:
    """A folder of keys, with a `bin/ssh` that knows the site's login node, as `cluster` and `dtn`.

    sshd is a real one: each connection starts it on the login node (`sshd -i`), as root, and it
    lets the ordinary user in. Its `log` counts the authentications.
    """
    keys = Path(tempfile.mkdtemp(prefix="road-", dir="/tmp"))  # short: it holds a socket
    keys.chmod(0o755)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(command, check=True)
    shutil.copy(keys / "user.pub", keys / "authorized_keys")
    (keys / "known_hosts").write_text(f"cluster,dtn {(keys / 'host.pub').read_text()}")
    (keys / "sshd_config").write_text(
        f"HostKey {keys}/host\nPidFile none\nAuthorizedKeysFile {keys}/authorized_keys\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\n"
        f"SetEnv SLURM_CONF={site}/etc/slurm.conf\n"
    )
    (keys / "config").write_text(
        f"Host cluster dtn\n  User {USER}\n  IdentityFile {keys}/user\n"
        f"  UserKnownHostsFile {keys}/known_hosts\n"
        f"  ProxyCommand env SLURM_SITE={site} {SCRIPT} exec "
        f"{shutil.which('sshd', path=_PATH)} -i -E {keys}/log -f {keys}/sshd_config\n"
    )
    (keys / "bin").mkdir()
    ssh = keys / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/config "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    try:
        yield keys
    finally:
        options = ["-o", f"ControlPath={keys}/airlift/%C", "-O", "exit", "cluster"]
        subprocess.run([str(ssh), *options], capture_output=True)
        shutil.rmtree(keys)
