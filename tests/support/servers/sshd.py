"""A real sshd on loopback, with its own host key, one user's key and its own configuration."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.waiting import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def link_programs(folder: Path, names: str) -> Path:
    """Makes a folder for PATH with programs of this machine."""
    folder.mkdir(exist_ok=True)
    for name in names.split():
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Iterator[Sshd]:
    """One for the tests of a file, which have `programs`."""
    server = Sshd(tmp_path_factory.mktemp("ssh") / "d", programs)
    yield server
    server.close()


class Sshd:
    """An sshd like a login node's, for the user who runs the tests. `ssh`: command to reach it.

    Its alias is `cluster` for the command `ssh` in the folder `laptop`: put that first on PATH.

    Args:
        folder: for keys, configuration and log.
        bin: the only folder on PATH of the remote commands.
        more: lines of sshd_config, before ours.
        environment: further variables of the remote commands.
    """

    def __init__(self, folder: Path, bin: Path, more: str = "", **environment: object) -> None:
        folder.mkdir(mode=0o700)
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        self.port = int(free_port())
        (folder / "known_hosts").write_text(
            f"[127.0.0.1]:{self.port} {(folder / 'host.pub').read_text()}"
        )
        variables = " ".join(f"{k}={v}" for k, v in {"PATH": bin, **environment}.items())
        config = folder / "sshd_config"
        config.write_text(
            f"{more}\nPort {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
            "PidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\nUsePAM no\n"
            f"PermitRootLogin yes\nStrictModes no\nSetEnv {variables}\n"
        )
        if os.geteuid() == 0:
            # The empty home of sshd; its service makes it where there is one.
            Path("/run/sshd").mkdir(exist_ok=True)
        self._log = folder / "log"
        self._process = subprocess.Popen([SSHD, "-D", "-E", self._log, "-f", config])
        self.host = f"{getpass.getuser()}@127.0.0.1"
        self.ssh = (
            f"ssh -F none -p {self.port} -i {folder}/user"
            f" -o UserKnownHostsFile={folder}/known_hosts -o BatchMode=yes"
        )
        self.laptop = folder / "laptop"
        self.laptop.mkdir()
        self.config = folder / "ssh_config"
        self.config.write_text(
            f"Host cluster\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/user\n  UserKnownHostsFile {folder}/known_hosts\n"
        )
        (self.laptop / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n'
        )
        (self.laptop / "ssh").chmod(0o755)
        self._await()

    @property
    def logins(self) -> int:
        """How many authentications it has accepted."""
        return self._log.read_text().count("Accepted publickey")

    def sessions(self) -> list[int]:
        """The processes of the connections that are open now, and what runs in them."""
        found, parents = [self._process.pid], dict[int, int]()
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                words = status.read_text().rpartition(") ")[2].split()
                parents[int(status.parent.name)] = int(words[1])
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def _await(self) -> None:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"sshd did not start: {self._log.read_text()}")

    def cut(self) -> None:
        """Ends all connections, as a line that breaks."""
        for pid in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.cut()  # the connection of a command stays open after it
        self._process.terminate()
        self._process.wait(10)
