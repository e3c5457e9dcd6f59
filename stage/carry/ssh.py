"""A folder on another host, reached by ssh, or a folder here; and shell scripts that run there.

All commands of an afternoon use one login: a shared connection of OpenSSH (ssh_config(5),
`ControlMaster`). It is that of the person, where one is open, or one that is started here and stays
for 4 hours. Whatever runs there afterwards only reuses it, so that no password and no second factor
is asked for twice (docs/adr/0018).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stage.carry.faults import AGAIN, fault, is_full, is_worth_a_second_try, lost
from stage.errors import IncompleteError, UsageError, as_shown, quoted

STAYS = "4h"  # how long our login stays after its last use
_MAX_SOCKET = 86  # bytes of a socket's path: macOS has 104, and ssh adds up to 17
_NAME = 40  # bytes of ssh's %C
# A person's own connection may have no ServerAliveInterval, so it is asked as ours is, which ends
# after 45 s without an answer (`_login_command`).
QUIET_S = 20.0  # without a byte, before the far end is asked whether it lives
_PATIENCE_S = 40.0  # for its answer
_LOGIN_S = 60.0  # for a login without a terminal; sshd itself gives 120 s (LoginGraceTime)
_LOCAL_S = 10.0  # for an answer of the ssh here: it asks a socket; a frozen one answers never
_PAUSE_S = 10.0  # before a busy host is tried once more: MaxStartups is about logins at one moment
_NO_CONNECTION = 255  # ssh's exit code
_RSYNC_SHELL = Path(__file__).with_name("rsync_shell.py")


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
class ScriptResult:
    """What a script there ended with, and what it printed."""

    code: int
    text: str


@dataclass
class RemoteShell:
    """Runs shell scripts at the target. At most two of its calls may run at the same time.

    Attributes:
        shell: the command here that reads a script from its standard input, and runs it there.
        ssh: the ssh command as the user gave it; empty for a folder here.
        over: ssh and the options that reuse the open connection, and never open one; empty for a
            folder here, and for a command that is not OpenSSH's.
        log: the file with ssh's own messages.
        is_theirs: the connection is the person's own. Ours ends by itself where the far end is
            frozen; the person's may wait without end.
        greeting: what the login shell there printed before the last script, by an `echo` in
            ~/.bashrc or by the site.
        ended: the exit code of the last command here: 255 is ssh's own.
    """

    target: PushTarget
    shell: tuple[str, ...]
    ssh: str
    over: tuple[str, ...] = ()
    log: Path | None = None
    is_theirs: bool = False
    greeting: str = ""
    ended: int = 0

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
        return _by_hand(self.ssh, self.target) if self.target.host else ""

    def inside(self, name: str) -> str:
        """The path of a file in the folder, quoted for the shell; an absolute path stays as is."""
        return quoted(name if name.startswith("/") else f"{self.folder}/{name}")

    def rsync_options(self) -> list[str]:
        """Options with which rsync goes over this connection, past a greeting if there is one."""
        if not self.target.host:
            return []
        words = list(self.over or shlex.split(self.ssh))
        if self.greeting:
            words = [sys.executable, "-I", str(_RSYNC_SHELL), secrets.token_hex(16), *words]
        return ["-e", shlex.join(words)]

    def ask(self, script: str, timeout_s: float | None = None) -> ScriptResult:
        """Runs a script with `sh`, whatever the login shell is. The user then sees its stderr.

        The script may use `exit`; its children read nothing from it.

        Args:
            timeout_s: how long it may take; None: as long as the far end lives.

        Raises:
            IncompleteError: no connection, or it broke; no `sh` there; or the time is over.
        """
        text = bytearray()
        code, said = self._run(script, text.extend, timeout_s)
        print(said, end="", file=sys.stderr)
        return ScriptResult(code, text.decode("utf-8", "replace"))

    def run(self, script: str, problem: str, timeout_s: float | None = None) -> str:
        """Runs a script that must succeed; returns its stdout.

        Args:
            problem: the message if it fails.

        Raises:
            IncompleteError: it failed on the host, or there is no connection.
            UsageError: it failed on this machine.
        """
        text = bytearray()
        code, said = self._run(script, text.extend, timeout_s)
        answer = text.decode("utf-8", "replace")
        if code == 0:
            print(said, end="", file=sys.stderr)
            return answer
        said = (said.strip() or as_shown(answer.strip()))[-200:]
        problem += f" (exit code {code}){f': {said}' if said else ''}."
        if self.target.host is None:
            raise UsageError(problem, "Give a folder that you may write.")
        remedy = "Free space or quota there" if is_full(said) else "Fix that there"
        raise IncompleteError(problem, f"{remedy}, then run the same command again.")

    def read(self, path: str, offset: int = 0) -> bytes:
        """What a file there has from an offset on; nothing if it is not there.

        Args:
            path: there; a relative one is in the folder.
            offset: in bytes.

        Raises:
            IncompleteError: no connection, or it broke, or the file cannot be read.
        """
        content = bytearray()
        self.stream(path, offset, content.extend, f"[ -e {self.inside(path)} ] || exit 0")
        return bytes(content)

    def stream(
        self, path: str, offset: int, sink: Callable[[bytes], object], before: str = ":"
    ) -> int:
        """Reads a large file there from an offset on.

        Args:
            path, offset: as for `read`.
            sink: gets the bytes as they come. Those it got before an error are right: go on there.
            before: a line of shell that runs first.

        Returns:
            How many bytes came.

        Raises:
            IncompleteError: no connection, or it broke, or the file cannot be read.
        """
        came = 0

        def take(part: bytes) -> None:
            nonlocal came
            sink(part)
            came += len(part)

        file = self.inside(path)  # a pipe would be waited for without end
        is_file = f"[ ! -e {file} ] || [ -f {file} ] || {{ echo {file}: not a file >&2; exit 1; }}"
        code, said = self._run(f"{before}\n{is_file}\ntail -c +{offset + 1} {file}", take)
        print(said, end="", file=sys.stderr)
        if code != 0:
            raise IncompleteError(
                f"{self.target.host}:{path}: cannot be read there (exit code {code}): see above.",
                f"Look at it: {self.by_hand}ls -l {quoted(self.inside(path))}",
            )
        return came

    def fault(self) -> IncompleteError:
        """The error for a connection that is not there, or broke, by what ssh wrote."""
        host = self.target.bare_host
        if self.log is None:
            return fault("", host, self.ssh, self.by_hand)
        return lost("\n".join(self.log.read_text("utf-8", "replace").splitlines()[-4:]), host)

    def check_alive(self) -> None:
        """Asks the far end of a person's connection for a sign of life, in a session of its own.

        ssh's own check asks the local process only, which answers for a far end that is frozen.

        Raises:
            IncompleteError: none came.
        """
        if not self.is_theirs:
            return
        host = self.target.bare_host
        nothing = subprocess.DEVNULL
        command = [*self.over, host, "true"]
        try:
            subprocess.run(
                command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            raise IncompleteError(
                f"{host}: no sign of life for {QUIET_S + _PATIENCE_S:.0f} s. The command may "
                "still run there.",
                f"Close your connection: {self.ssh} -O exit {quoted(host)}   {AGAIN}",
            ) from None

    def _run(
        self,
        script: str,
        sink: Callable[[bytes], object],
        timeout_s: float | None = None,
    ) -> tuple[int, str]:
        """Runs a script; `sink` gets what it prints. Returns its exit code, and its stderr to show.

        What the login shell prints before is not part of the answer: that stands between two random
        marks. Nothing runs before the whole script has come: it is one function, and one group.
        """
        begin, end = secrets.token_hex(16), secrets.token_hex(16)
        text = (
            f"main() {{ :\n{script}\n}}\n"
            f"{{ printf '%s%s\\n' {_halves(begin)}; ( main ) </dev/null; "
            f"printf '%s%s %03d\\n' {_halves(end)} $?; exit 0; }}\n"
        )
        opening, length = f"{begin}\n".encode(), len(end) + 5
        greeting, held, is_open = bytearray(), bytearray(), False
        with tempfile.TemporaryFile() as complaints:
            for part in self._output(text.encode(), timeout_s, complaints):
                held += part
                if not is_open:
                    before, mark, after = held.partition(opening)
                    if mark:
                        is_open, greeting, held = True, before, after
                if is_open and len(held) > length:
                    sink(bytes(held[:-length]))
                    del held[:-length]
            complaints.seek(0)
            said = as_shown(complaints.read().decode("utf-8", "replace"))
        code = re.fullmatch(f"{end} ([0-9]{{3}})\n".encode(), held)
        if not is_open or code is None:
            print(said, end="", file=sys.stderr)
            raise self._no_answer(held.decode("utf-8", "replace") if not is_open else "")
        self.greeting = greeting.decode("utf-8", "replace").strip()
        return int(code[1]), said

    def _output(self, script: bytes, timeout_s: float | None, stderr: IO[bytes]) -> Iterator[bytes]:
        """What comes back while a script runs there, as it comes."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        with tempfile.TemporaryFile() as source:
            source.write(script)
            source.seek(0)
            running = subprocess.Popen(
                self.shell, stdin=source, stdout=subprocess.PIPE, stderr=stderr
            )
            assert running.stdout is not None
            try:
                while True:
                    left = QUIET_S if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        raise IncompleteError(
                            f"{self.target}: no answer within {timeout_s:.0f} s.", AGAIN
                        )
                    if not select.select([running.stdout], [], [], min(left, QUIET_S))[0]:
                        self.check_alive()
                    elif part := os.read(running.stdout.fileno(), 2**18):
                        yield part
                    else:
                        break
            finally:
                running.stdout.close()
                if running.poll() is None:  # its output ended, or this was given up
                    with suppress(subprocess.TimeoutExpired):
                        running.wait(1)
                    running.kill()
                self.ended = running.wait()

    def _no_answer(self, said: str) -> IncompleteError:
        if said.strip() or self.ended != _NO_CONNECTION:
            said = f" It said: {as_shown(' '.join(said.split()))[:200]}" if said.strip() else ""
            return IncompleteError(
                f"{self.target}: its shell does not answer as `sh` does.{said}",
                f"Give a login node, where `{self.by_hand}'echo a; echo b'` prints two lines.",
            )
        return self.fault()


def _halves(mark: str) -> str:
    """A mark in two words: a shell that shows its script does not show the mark."""
    return f"{mark[:8]} {mark[8:]}"


def _by_hand(ssh: str, target: PushTarget) -> str:
    return f"{ssh} {quoted(target.bare_host)} "


@contextmanager
def connected(
    target: PushTarget, ssh: str = "ssh", *, log_in: bool = True
) -> Iterator[RemoteShell]:
    """A shell at the target, over one login that stays open for the commands that follow.

    A connection that the person has open is used, and never closed. Else there is one of ours; if
    it is not open yet, it is opened in the terminal. Where there is no terminal, ssh asks for
    nothing.

    Args:
        ssh: the command of the user, with their options.
        log_in: False: only a connection that is open already.

    Raises:
        UsageError: `ssh` is not a command on PATH.
        IncompleteError: no connection, with the cause and the command that helps.
    """
    if target.host is None:
        yield RemoteShell(target, ("sh", "-s"), "")
        return
    command = _command(ssh)
    host = target.bare_host
    if Path(command[0]).name != "ssh":  # not OpenSSH: it may know none of these options
        yield RemoteShell(target, (*command, host, "sh -s"), ssh)
        return
    folder = socket_folder()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="log.") as log:
        # Ours wins over the user's: ssh takes the first value of an option.
        ours = [command[0], *_options(f"ControlPath={folder}/%C"), *command[1:]]
        path = _open_socket(command, host)
        is_theirs = path is not None
        if path is None:
            with open(folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two commands at once make one login
                path = _open_socket(ours, host)
                if path is None:
                    if not log_in:
                        raise _not_open(target, ssh, ours)
                    _log_in(target, ssh, ours, Path(log.name))
                    path = _open_socket(ours, host)
        if path is None:
            raise fault(
                Path(log.name).read_text("utf-8", "replace"), host, ssh, _by_hand(ssh, target)
            )
        # Nothing of the user's configuration: none of its commands, forwarding, terminal or locale,
        # no jump. `false`: where the connection is gone, this fails, and no new login begins.
        reuse = _options(
            f"ControlPath={path.replace('%', '%%')}", "ControlMaster=no", "ProxyCommand=false"
        )
        over = (command[0], "-F", "/dev/null", "-E", log.name, *reuse)
        yield RemoteShell(target, (*over, host, "sh -s"), ssh, over, Path(log.name), is_theirs)


def log_out(target: PushTarget) -> bool:
    """Ends our login, if it is open; one of the person's stays.

    Returns:
        Whether there was one.

    Raises:
        UsageError: as for `connected`.
    """
    ours = _command("ssh") + _options(f"ControlPath={socket_folder()}/%C")
    done = _quietly([*ours, "-O", "exit", target.bare_host])
    return done is not None and done.returncode == 0


def socket_folder() -> Path:
    """The folder of our connections: short, and only this user's.

    Raises:
        UsageError: others may enter it; or it belongs to another user, and so does the other one.
    """
    # Not set in cron, which may use what a terminal opened.
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    folder = Path(runtime, "airlift")
    if not _fits(folder) or not os.access(runtime, os.W_OK):
        folder = Path(f"/tmp/airlift-{os.getuid()}")
    own = Path(os.environ.get("HOME", ""), ".ssh/airlift")
    if not _make_ours(folder) and folder.lstat().st_uid != os.getuid() and _fits(own):
        folder = own  # in /tmp, a name that another user took cannot be removed
    if not _make_ours(folder):
        raise UsageError(
            f"{folder}: not a folder that only you can enter. Another user who can enter it could "
            "use your logins.",
            f"Look whose it is, then remove it: rm -r {quoted(folder)}",
        )
    return folder


def _fits(folder: Path) -> bool:
    """Whether it can be the folder of a socket for ssh."""
    is_short = len(os.fsencode(folder)) + 1 + _NAME <= _MAX_SOCKET
    return is_short and folder.is_absolute() and not re.search(r"\s|%", str(folder))


def _make_ours(folder: Path) -> bool:
    """Makes a folder, unless it is there; whether it is ours alone."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & 0o077


def _command(ssh: str) -> list[str]:
    """The user's command as words."""
    command = shlex.split(ssh)
    if not command or shutil.which(command[0]) is None:
        raise UsageError(
            f"--ssh: there is no `{command[0] if command else ''}` on PATH.",
            "Install OpenSSH's client.",
        )
    return command


def _options(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("-o", setting)]


def _quietly(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """A command that asks the local ssh only; None: it hangs."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LOCAL_S
        )
    except subprocess.TimeoutExpired:
        return None


def _open_socket(command: Sequence[str], host: str) -> str | None:
    """The socket of the shared connection that this command would use; None: none answers.

    ssh resolves its name itself, from the user's configuration with its jumps.
    """
    check = _quietly([*command, "-O", "check", host])
    if check is None or check.returncode != 0:
        return None
    settings = _quietly([*command, "-G", host])
    found = re.search(r"^controlpath (.+)$", settings.stdout if settings else "", re.MULTILINE)
    return found[1] if found else None


def _login_command(ours: Sequence[str], host: str) -> list[str]:
    """What opens our connection, for hours."""
    stays = ("ControlMaster=auto", f"ControlPersist={STAYS}")
    lives = ("ServerAliveInterval=15", "ServerAliveCountMax=3")
    return [ours[0], *_options(*stays, *lives), *ours[1:], "-f", "-N", host]


def _not_open(target: PushTarget, ssh: str, ours: Sequence[str]) -> IncompleteError:
    return IncompleteError(
        f"{target.bare_host}: no connection is open, and this command does not log in.",
        f"Log in, once for {STAYS}: {shlex.join(_login_command(ours, target.bare_host))}",
    )


def _log_in(target: PushTarget, ssh: str, ours: Sequence[str], log: Path) -> None:
    """Opens our connection. Nothing of it is captured, for it stays; ssh asks at the terminal.

    Raises:
        IncompleteError: it failed: why, and what helps.
    """
    host = target.bare_host
    never = ("ClearAllForwardings=yes", "PermitLocalCommand=no", "RequestTTY=no")
    for is_last in (False, True):
        log.write_bytes(b"")
        with open(log, "ab") as messages, _foreground() as in_front:
            is_typed = in_front is not None
            words = _options("ConnectTimeout=30", *never, *([] if is_typed else ["BatchMode=yes"]))
            login = _login_command([ours[0], *words, "-E", str(log), *ours[1:]], host)
            try:
                done = subprocess.run(
                    login,
                    stdin=None if is_typed else subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if sys.stderr.isatty() else messages,
                    timeout=None if is_typed else _LOGIN_S,
                    preexec_fn=in_front or os.setsid,
                )
            except subprocess.TimeoutExpired:
                messages.write(b"the login timed out\n")
            else:
                if done.returncode == -signal.SIGINT:
                    raise KeyboardInterrupt
                if done.returncode == 0:
                    return
        said = log.read_text("utf-8", "replace")
        if is_last or not is_worth_a_second_try(said):
            break
        print(f"{host}: too busy; one more try in {_PAUSE_S:.0f} s", file=sys.stderr)
        time.sleep(_PAUSE_S)
    if said.count("\n") > 1:
        print(as_shown(said), end="", file=sys.stderr)
    raise _why_no_login(said, target, ssh, ours, is_typed)


def _why_no_login(
    said: str, target: PushTarget, ssh: str, ours: Sequence[str], is_typed: bool
) -> IncompleteError:
    host = target.bare_host
    found = fault(said, host, ssh, _by_hand(ssh, target))
    if "Permission denied" not in said:
        return found
    if over := _certificate_over(ours, host):
        return IncompleteError(
            f"{host}: it refused the login, and the certificate {over[0]} ended at {over[1]}.",
            f"Get a new one, by your site's own command. {AGAIN}",
        )
    if not is_typed and re.search(r"\((.*,)?(password|keyboard-interactive)", said):
        return IncompleteError(
            f"{host}: it asks for a password or a second factor, and here is no terminal to type "
            "it.",
            f"Log in once in a terminal, for {STAYS}: {shlex.join(_login_command(ours, host))}   "
            "Then the same command again.",
        )
    return found


@contextmanager
def _foreground() -> Iterator[Callable[[], None] | None]:
    """A `preexec_fn` that puts a program in front at the terminal, in a process group of its own.

    None: there is no terminal. ssh asks the person at /dev/tty, whatever stdin is.

    So Ctrl-C, or a terminal that is closed, later does not end what the login leaves running: a
    jump (ProxyJump) or ProxyCommand is not part of the program that ssh becomes with `-f`.
    """
    ours = os.getpgrp()
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        yield None
        return
    is_in_front = os.tcgetpgrp(terminal) == ours

    def begin() -> None:
        os.setpgrp()
        if is_in_front:
            os.tcsetpgrp(terminal, os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # nothing would wake it

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield begin
    finally:
        if is_in_front:
            os.tcsetpgrp(terminal, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(terminal)


def _certificate_over(command: Sequence[str], host: str) -> tuple[str, str] | None:
    """The certificate that ssh would offer and whose time is over: (which, until when)."""
    settings = _quietly([*command, "-G", host])
    named = re.findall(
        r"^(identityfile|certificatefile) (.+)$", settings.stdout if settings else "", re.MULTILINE
    )
    files = [Path(name).expanduser() for _, name in named]
    files = [*files, *(Path(f"{file}-cert.pub") for file in files)]
    for file in files:
        if file.name.endswith("-cert.pub") and file.is_file():
            shown = _quietly(["ssh-keygen", "-L", "-f", str(file)])
            until = re.search(r"Valid: from \S+ to (\S+)", shown.stdout if shown else "")
            if until and until[1] < time.strftime("%Y-%m-%dT%H:%M:%S"):
                return str(file), until[1]
    return None
