"""The connection to a cluster, with a real sshd: one login for all commands, and words for faults.

Each test has a server of its own: a login that one test leaves open would serve the next one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from stage.carry import ssh as connection
from stage.carry.faults import fault, lost
from stage.carry.ssh import PushTarget, RemoteShell, ScriptResult, connected, log_out, socket_folder
from stage.errors import IncompleteError, StageError, UsageError
from tests.remedies.obeyed import in_it, obeys
from tests.support.servers.sshd import Sshd
from tests.support.terminal import in_terminal

SSH = "stage/carry/ssh.py"
CLUSTER = PushTarget("cluster", ".")
LOGIN_SHELLS = [shell for shell in ("bash", "tcsh", "fish", "zsh") if shutil.which(shell)]
START_FILES = {"bash": ".bashrc", "tcsh": ".cshrc", "fish": ".config/fish/config.fish"}

Start = Callable[..., Sshd]


@pytest.fixture
def start(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Sshd]]:
    """Starts a server with lines of its own in sshd_config; `ssh cluster` then reaches it."""
    servers: list[Sshd] = []

    def begin(more: str = "", **environment: object) -> Sshd:
        server = Sshd(tmp_path / f"d{len(servers)}", programs, more, **environment)
        servers.append(server)
        monkeypatch.setenv("PATH", f"{server.laptop}:{os.environ['PATH']}")
        return server

    yield begin
    for server in servers:
        server.close()


def hello() -> ScriptResult:
    with connected(CLUSTER) as remote:
        return remote.ask("echo hello")


def refused(*, log_in: bool = True) -> StageError:
    """The error of a command for which there is no connection."""
    with pytest.raises(StageError) as error, connected(CLUSTER, log_in=log_in) as remote:
        remote.ask("echo hello")
    return error.value


@obeys(SSH, "Look at it: {}ls -l {}")
def test_one_login_serves_all_commands_until_it_is_ended(start: Start) -> None:
    server = start()
    for _ in range(3):
        assert hello() == ScriptResult(0, "hello\n")
        with connected(CLUSTER) as remote, pytest.raises(IncompleteError) as missing:
            remote.stream("no such file", 0, lambda _: None)
    look = in_it(missing.value.remedy, "ssh cluster ls -l .*")
    looked = subprocess.run(["sh", "-c", look], capture_output=True, text=True, timeout=30)
    assert "no such file': No such file or directory" in looked.stderr
    assert server.logins == 2  # the second by hand
    assert log_out(CLUSTER) and not log_out(CLUSTER)
    error = refused(log_in=False)
    assert "no connection is open" in error.message and server.logins == 2
    assert hello().text == "hello\n" and server.logins == 3


def test_the_command_that_is_printed_logs_in_for_those_that_follow(start: Start) -> None:
    server = start()
    login = in_it(refused(log_in=False).remedy, r"(?<=: )ssh .*")
    subprocess.run(["sh", "-c", login], check=True, timeout=30, stderr=subprocess.DEVNULL)
    with connected(CLUSTER, log_in=False) as remote:
        assert remote.ask("exit 3").code == 3
    assert server.logins == 1


def open_ones_own(server: Sshd) -> None:
    """As a person does who has a ControlPath in ~/.ssh/config."""
    with open(server.config, "a") as config:
        config.write(f"  ControlPath /tmp/own-%C-{os.getpid()}\n")
    command = ["ssh", "-M", "-f", "-N", "cluster"]
    subprocess.run(command, check=True, timeout=30, stderr=subprocess.DEVNULL)


def test_a_line_that_breaks_ends_with_words_and_logs_nobody_in(start: Start) -> None:
    server = start()
    with connected(CLUSTER) as remote:
        assert "ProxyCommand=false" in remote.shell
        server.cut()
        with pytest.raises(IncompleteError, match="the connection ended"):
            for _ in range(2):  # the first may still find the master alive
                remote.ask("echo hello")
        assert server.logins == 1
    assert hello().text == "hello\n"


def freeze(server: Sshd) -> None:
    for pid in server.sessions():
        os.kill(pid, signal.SIGSTOP)


@obeys(SSH, "Close your connection: {} -O exit {} {}")
def test_a_frozen_far_end_of_a_persons_connection_ends_with_words(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.2)
    monkeypatch.setattr(connection, "_PATIENCE_S", 0.5)
    server = start()
    open_ones_own(server)
    with connected(CLUSTER) as remote:
        assert remote.ask("sleep 1; echo later").text == "later\n"  # silent, and alive
        freeze(server)
        with pytest.raises(IncompleteError, match="no sign of life") as error:
            remote.ask("echo hello")
    close = in_it(error.value.remedy, r"(?<=connection: )ssh .*? cluster")
    subprocess.run(["sh", "-c", close], check=True, capture_output=True, timeout=30)
    assert hello().text == "hello\n" and server.logins == 2


@pytest.mark.parametrize("greets", [True, False], ids=["greets", "silent"])
@pytest.mark.parametrize("shell", LOGIN_SHELLS)
def test_any_login_shell_will_do_and_may_greet(
    start: Start, bundle: Path, tmp_path: Path, tools: Path, shell: str, greets: bool
) -> None:
    """sshd runs each command by the login shell (bash) with -c; which here starts the others so."""
    home = tmp_path / "home"
    file = home / START_FILES.get(shell, ".zshenv")
    file.parent.mkdir(parents=True)
    file.write_text("echo Welcome to Gauss\n" if greets else "")
    forced = f'ForceCommand {shutil.which(shell)} -c "$SSH_ORIGINAL_COMMAND"'
    forced = "" if shell == "bash" else forced
    server = start(forced, HOME=home, XDG_CONFIG_HOME=home / ".config", LC_ALL="de_DE.nowhere")
    with connected(CLUSTER) as remote:
        assert remote.ask("cat; x=1; echo $x 'a  b'; exit 4") == ScriptResult(4, "1 a  b\n")
        assert remote.greeting == ("Welcome to Gauss" if greets else "")
    there = tmp_path / "there"
    done = subprocess.run(
        [sys.executable, "-m", "stage", "push", bundle, f"cluster:{there}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert verify(there).ok and server.logins == 1


def test_at_a_terminal_ssh_asks_and_the_command_is_in_front_again(start: Start) -> None:
    server = start()
    key = server.config.with_name("user")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True)
    script = f"""
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from {__name__} import hello
print(hello().text, os.tcgetpgrp(0) == os.getpgrp())
"""
    command = (sys.executable, "-c", script)
    said = in_terminal(200, *command, asked="passphrase", typed="secret\n")
    assert said.endswith("hello\n True\n"), said
    assert hello().text == "hello\n" and server.logins == 1


def test_a_script_that_is_cut_runs_no_line(tmp_path: Path) -> None:
    """The line may break at any byte, and a shell runs what has come."""
    ran = tmp_path / "ran"
    script = f"echo x >{ran}\nexit 7"
    answered = False
    for size in range(len(script), len(script) + 240):
        cut = RemoteShell(PushTarget(None, "."), ("sh", "-c", f"head -c {size} | sh -s 2>&1"), "")
        try:
            assert cut.ask(script) == ScriptResult(7, "")
            answered = True
            break
        except IncompleteError:
            assert not ran.exists(), size
    assert answered, "240 bytes were too few"


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("printf abc", ScriptResult(0, "abc")),
        ("", ScriptResult(0, "")),
        ("cat; exit 7", ScriptResult(7, "")),
        ("cat <<'E'\n$x\nE\n", ScriptResult(0, "$x\n")),
    ],
)
def test_a_result_is_what_the_script_printed_and_no_more(script: str, result: ScriptResult) -> None:
    assert RemoteShell(PushTarget(None, "."), ("sh", "-s"), "").ask(script) == result


def test_what_greets_is_no_answer_and_clears_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loud = RemoteShell(PushTarget(None, "."), ("sh", "-c", "echo hi; sh -v -s"), "")
    assert loud.ask("echo a") == ScriptResult(0, "a\n") and loud.greeting == "hi"
    loud.ask(r"printf 'a\033[2J\n' >&2")
    assert "a\\x1b[2J\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "script", "timeout_s", "message"),
    [
        ("sh -s", "sleep 5", 0.2, "no answer within"),
        ("cat", "true", 30, "does not answer as `sh` does"),
        ("false", "true", 30, "does not answer as `sh` does"),
        ("sh -s | sed 's/ 000$/ x$(/'", "", 30, "does not answer as `sh` does"),  # no exit code
        ("exit 255", "true", 30, "no connection by `ssh`, or it broke"),
    ],
)
def test_what_is_no_answer_is_said(
    program: str, script: str, timeout_s: float, message: str
) -> None:
    with pytest.raises(IncompleteError, match=message):
        RemoteShell(PushTarget("h", "."), ("sh", "-c", program), "ssh").ask(script, timeout_s)


def test_a_file_is_read_from_an_offset(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a b").write_bytes(content)
    here = RemoteShell(PushTarget(None, str(tmp_path)), ("sh", "-s"), "")
    assert here.read("a b") == content
    assert here.read(str(tmp_path / "a b"), len(content) - 3) == content[-3:]
    assert here.read("a b", len(content)) == here.read("none") == b""
    parts: list[bytes] = []
    assert here.stream("a b", 7, parts.append) == len(content) - 7
    assert b"".join(parts) == content[7:]
    with pytest.raises(IncompleteError, match="cannot be read there"):
        here.stream("none", 0, parts.append)


@obeys(SSH, "Look whose it is, then remove it: rm -r {}")
def test_sockets_lie_in_a_folder_that_is_short_and_only_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(f"/tmp/xdg-{os.getpid()}")
    short.mkdir(mode=0o700)
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        assert socket_folder() == short / "airlift"
        assert (short / "airlift").stat().st_mode & 0o777 == 0o700
        (short / "airlift").chmod(0o755)
        with pytest.raises(UsageError, match="only you can enter") as error:
            socket_folder()
        subprocess.run(in_it(error.value.remedy, "rm -r .*"), shell=True, check=True)
        assert socket_folder() == short / "airlift"
        (short / "airlift").rmdir()
        (short / "airlift").symlink_to(tmp_path)
        with pytest.raises(UsageError, match="only you can enter"):
            socket_folder()
    finally:
        shutil.rmtree(short)
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/tmp/{'long/' * 20}")
    assert socket_folder() == Path(f"/tmp/airlift-{os.getuid()}")
    assert len(str(socket_folder() / ("x" * 40))) <= 86


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder of another user")
def test_a_folder_in_tmp_that_another_user_took_first_locks_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uid = 54321
    home, taken = Path(tempfile.mkdtemp(dir="/tmp")), Path(f"/tmp/airlift-{uid}")
    own = home / ".ssh/airlift"
    own.mkdir(mode=0o700, parents=True)
    os.chown(own, uid, -1)
    taken.mkdir(mode=0o700)  # of root
    try:
        for name, value in (("XDG_RUNTIME_DIR", "/nowhere"), ("HOME", str(home))):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "getuid", lambda: uid)
        assert socket_folder() == own
        own.chmod(0o755)
        with pytest.raises(UsageError, match="only you can enter"):
            socket_folder()
    finally:
        shutil.rmtree(home)
        shutil.rmtree(taken, ignore_errors=True)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "first\nssh: Could not resolve hostname x: Name or service not known\n \n",
            "x: no host has that name (ssh: Could not resolve hostname x: Name or service not "
            "known).\n  -> Check the spelling, the VPN, and `Host` in ~/.ssh/config: ssh -G x",
        ),
        ("ssh: connect to host x port 22: Connection refused", "no connection by `ssh`"),
        ("what?", "x: no connection by `ssh`, or it broke (what?).\n  -> Try it: ssh x true"),
        ("", "x: no connection by `ssh`, or it broke."),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "ssh-keygen -R x"),
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED!\nOffending RSA key in /my home/known:3\n"
            "remove it\nHost key for [x]:22 has changed",
            "ssh-keygen -f '/my home/known' -R '[x]:22'",
        ),
        ("kex_exchange_identification: Connection closed by x", "Wait some minutes"),
        ("Cannot execute command-line and remote command.", "`RemoteCommand` in ~/.ssh/config"),
        ("Bad owner or permissions on ~/.ssh/config", "Correct that file: ssh -G x"),
        ("Host key verification failed.", "not known here"),
        ("Received disconnect from x: Too many authentication failures", "too many keys"),
        ("me@x: Permission denied (publickey).", "it refused the login"),
        ("Connection closed by x port 22", "came too late"),
        ("mux_client_request_session: session request failed", "MaxSessions"),
        ("mux_client_request_session: read from master failed", "x: the connection ended."),
    ],
)
def test_what_ssh_says_gets_words(said: str, words: str) -> None:
    error = lost(said, "x") if said[:3] == "mux" else fault(said, "x", "ssh", "ssh x ")
    assert words in str(error) and error.exit_code == 5 and error.remedy


def test_the_persons_own_master_is_used_and_never_closed(start: Start) -> None:
    server = start()
    open_ones_own(server)
    assert hello().text == "hello\n"
    assert not log_out(CLUSTER)
    assert subprocess.run(["ssh", "-O", "check", "cluster"], capture_output=True).returncode == 0
    assert hello().text == "hello\n" and server.logins == 1
    subprocess.run(["ssh", "-O", "exit", "cluster"], check=True, capture_output=True)
