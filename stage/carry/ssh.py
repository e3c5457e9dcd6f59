"""A folder on another host, reached by ssh, or a folder here; and shell scripts that run there.

All shell scripts and rsync use one ssh connection, so ssh asks for a password once.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stage.errors import IncompleteError, UsageError, as_shown


@dataclass(frozen=True)
class PushTarget:
    """The folder a bundle goes to: on this machine (`host` is None), or on a host, by ssh."""

    host: str | None
    folder: str

    def __str__(self) -> str:
        return f"{self.host}:{self.folder}" if self.host else self.folder

    @property
    def bare_host(self) -> str:
        """The host as ssh takes it: an IPv6 address without brackets."""
        return re.sub(r"[][]", "", self.host or "")

    @staticmethod
    def parse(text: str) -> PushTarget:
        """Reads `HOST:DIR`, `user@host:DIR`, `[::1]:DIR`, or a path.

        A path has no colon before its first slash.

        Raises:
            UsageError: an rsync daemon, an option in disguise, or no folder.
        """
        match = re.fullmatch(
            r"((?:[^/:\[\]]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[^/:\[\]]+)):(.*)", text, re.DOTALL
        )
        host, folder = (match[1], match[2]) if match else (None, text)
        if folder.startswith(":") or text.startswith("rsync://"):
            raise UsageError(
                f"{text}: an rsync daemon cannot verify a bundle.", "Give HOST:DIR, by ssh."
            )
        if (host or folder).startswith("-") or any(ord(c) < 32 for c in text):
            raise UsageError(f"{text!r}: not a target for a bundle.", "Give HOST:DIR, or a folder.")
        if host is None and "@" in folder and "/" not in folder:
            raise UsageError(
                f"{text}: it can be a folder here, or another machine.",
                f"There: {text}:bundle. Here: ./{text}",
            )
        if host is not None:
            folder = folder.removeprefix("~/")  # ssh and rsync begin in the home folder anyway
        if not folder or folder.startswith("~"):
            raise UsageError(
                f"{text}: which folder there?",
                "Give one: HOST:bundle (in your home) or HOST:/path/bundle",
            )
        return PushTarget(host, folder.rstrip("/") or "/")


@dataclass(frozen=True)
class RemoteShell:
    """Runs shell scripts at the target.

    Attributes:
        shell: the command that reads a script from its standard input.
        ssh: the ssh command as the user gave it; empty for a folder here.
        options: of ssh, added to the user's.
    """

    target: PushTarget
    shell: tuple[str, ...]
    ssh: str
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        folder = self.target.folder
        return f"./{folder}" if not folder.startswith(("/", "./", "../")) else folder

    @property
    def rsync_target(self) -> str:
        return f"{self.target.host}:{self.folder}/" if self.target.host else f"{self.folder}/"

    @property
    def by_hand(self) -> str:
        """What a user writes before a command to run it at the target; empty for a folder here."""
        if not self.target.host:
            return ""
        return f"{self.ssh} {shlex.quote(self.target.bare_host)} "

    def inside(self, name: str) -> str:
        """The path of a file in the folder, quoted for the shell."""
        return shlex.quote(f"{self.folder}/{name}")

    def ask(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a script with `sh`, whatever the login shell is. The user sees its stderr."""
        return subprocess.run(
            self.shell,
            input=script,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    def run(self, script: str, problem: str) -> str:
        """Runs a script that must succeed; returns its stdout.

        Args:
            problem: the message if it fails.

        Raises:
            IncompleteError: it failed on the host, or there is no connection.
            UsageError: it failed on this machine.
        """
        done = self.ask(script)
        if done.returncode == 0:
            return done.stdout
        if self.target.host is None:
            raise UsageError(
                f"{problem} (exit code {done.returncode}).", "Give a folder that you may write."
            )
        if done.returncode == 255:
            raise IncompleteError(
                f"{self.target.host}: no connection by `{self.ssh}`, or it broke: see above.",
                f"Try it: {self.by_hand}true   (port or key: --ssh 'ssh -p 2222 -i KEY')",
            )
        said = f": {as_shown(done.stdout.strip()[-200:])}" if done.stdout.strip() else ""
        raise IncompleteError(
            f"{problem} (exit code {done.returncode}){said}.",
            "Fix that there, then run the same command again.",
        )


@contextmanager
def connected(target: PushTarget, ssh: str) -> Iterator[RemoteShell]:
    """A shell at the target. Its ssh connection is shared with rsync and closed at the end.

    Raises:
        UsageError: `ssh` is no command on PATH.
    """
    if target.host is None:
        yield RemoteShell(target, ("sh", "-s"), "")
        return
    command = shlex.split(ssh)
    if not command or shutil.which(command[0]) is None:
        raise UsageError(
            f"--ssh: there is no `{command[0] if command else ''}` on PATH.",
            "Install OpenSSH's client.",
        )
    is_openssh = Path(command[0]).name == "ssh"
    is_shared = is_openssh and "ControlPath" not in ssh and "ControlMaster" not in ssh
    # A short folder: the name of a Unix socket has at most 104 bytes.
    with tempfile.TemporaryDirectory(prefix="stage-", dir="/tmp") as folder:
        settings = _plain(command) if is_openssh else ()
        if is_shared:
            settings += ("ControlMaster=auto", f"ControlPath={folder}/%C", "ControlPersist=60")
        options = tuple(part for setting in settings for part in ("-o", setting))
        host = target.bare_host
        try:
            yield RemoteShell(target, (*command, *options, host, "sh -s"), ssh, options)
        finally:
            if is_shared:
                subprocess.run([*command, *options, "-O", "exit", host], capture_output=True)


def _plain(ssh: Sequence[str]) -> tuple[str, ...]:
    """Settings that undo what ~/.ssh/config does for a person at a terminal, as scp(1) has them.

    A command or a terminal of the user's own would be in the way of ours, and a forwarded port that
    another connection uses would end it. OpenSSH before 7.6 does not know `RemoteCommand`.
    """
    settings = ("ClearAllForwardings=yes", "PermitLocalCommand=no", "RequestTTY=no")
    newer = "RemoteCommand=none"
    is_known = subprocess.run([*ssh, "-o", newer, "-V"], capture_output=True).returncode == 0
    return (*settings, newer) if is_known else settings
