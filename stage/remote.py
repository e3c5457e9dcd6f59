"""Where a push goes: a folder on another host, reached by ssh, or one here. Runs shell scripts there.

One connection serves everything, so that a password or a second factor is asked for once.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stage.errors import IncompleteError, UsageError


@dataclass(frozen=True)
class Target:
    """Where a bundle goes: a folder here (`host` None), or there by ssh."""

    host: str | None
    folder: str

    def __str__(self) -> str:
        return f"{self.host}:{self.folder}" if self.host else self.folder

    @staticmethod
    def parse(text: str) -> Target:
        """Reads `HOST:DIR`, `user@host:DIR`, `[::1]:DIR` or a path without a colon before its first slash.

        Raises:
            UsageError: an rsync daemon, an option in disguise, or no folder.
        """
        match = re.fullmatch(r"((?:[^/:\[\]]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[^/:\[\]]+)):(.*)", text, re.DOTALL)
        host, folder = (match[1], match[2]) if match else (None, text)
        if folder.startswith(":") or text.startswith("rsync://"):
            raise UsageError(f"{text}: an rsync daemon cannot be asked to verify.", "Give HOST:DIR, by ssh.")
        if (host or folder).startswith("-") or any(ord(c) < 32 for c in text):
            raise UsageError(f"{text!r}: no place for a bundle.", "Give HOST:DIR, or a folder.")
        if host is None and "@" in folder and "/" not in folder:
            raise UsageError(
                f"{text}: a folder here, or did you mean another machine?",
                f"There: {text}:bundle. Here: ./{text}",
            )
        if host is not None:
            folder = folder.removeprefix("~/")  # ssh and rsync begin in the home folder anyway
        if not folder or folder.startswith("~"):
            raise UsageError(
                f"{text}: which folder there?", "Give one: HOST:bundle (in your home) or HOST:/path/bundle"
            )
        return Target(host, folder.rstrip("/") or "/")


@dataclass(frozen=True)
class Place:
    """Runs shell scripts at the target. `shell` is the command whose standard input is the script."""

    target: Target
    shell: tuple[str, ...]
    ssh: str

    @property
    def folder(self) -> str:
        folder = self.target.folder
        return f"./{folder}" if not folder.startswith(("/", "./", "../")) else folder

    @property
    def rsync_target(self) -> str:
        return f"{self.target.host}:{self.folder}/" if self.target.host else f"{self.folder}/"

    def inside(self, name: str) -> str:
        """A file in the folder, quoted for the shell."""
        return shlex.quote(f"{self.folder}/{name}")

    def ask(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a script with `sh`, whatever the login shell is; what it says on stderr is for the person."""
        return subprocess.run(
            self.shell, input=script, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )

    def run(self, script: str, otherwise: str) -> str:
        """Runs a script that has to succeed; returns its stdout.

        Raises:
            IncompleteError: it did not there, or there is no connection.
            UsageError: it did not on this machine.
        """
        done = self.ask(script)
        if done.returncode == 255 and self.target.host:
            raise IncompleteError(
                f"{self.target.host}: no connection by `{without_sharing(self.ssh)}`.",
                f"Try it: {without_sharing(self.ssh)} {self.target.host} true   (port or key: --ssh 'ssh -p 2222 -i "
                "KEY')",
            )
        if done.returncode != 0 and self.target.host is None:
            raise UsageError(f"{otherwise} (exit code {done.returncode}).", "Give a folder that you may write.")
        if done.returncode != 0:
            raise IncompleteError(f"{otherwise} (exit code {done.returncode}).", "Mend that there, then run it again.")
        return done.stdout


def without_sharing(ssh: str) -> str:
    """The command as a person may repeat it: our shared connection is gone by then."""
    words, kept = shlex.split(ssh), list[str]()
    while words:
        word = words.pop(0)
        if word == "-o" and words and words[0].startswith(("ControlMaster=", "ControlPath=", "ControlPersist=")):
            words.pop(0)
        else:
            kept.append(word)
    return shlex.join(kept)


@contextmanager
def connected(target: Target, ssh: str) -> Iterator[Place]:
    """One connection for everything, so that a password or a second factor is asked for once."""
    if target.host is None:
        yield Place(target, ("sh", "-s"), "")
        return
    words = shlex.split(ssh)
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--ssh: there is no `{words[0] if words else ''}` on PATH.", "Install OpenSSH's client.")
    with tempfile.TemporaryDirectory(prefix="stage-", dir="/tmp") as folder:  # short: sockets' names end at 104 bytes
        shared = ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]
        if Path(words[0]).name == "ssh" and "ControlPath" not in ssh and "ControlMaster" not in ssh:
            words += shared
        host = target.host.replace("[", "").replace("]", "")
        try:
            yield Place(target, (*words, host, "sh -s"), shlex.join(words))
        finally:
            if shared[1] in words:
                subprocess.run([*words, "-O", "exit", host], capture_output=True)
