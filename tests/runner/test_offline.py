"""The fences around a run: network access is refused; the ranks get all that they need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.offline import VARIABLES, is_allowed, set_variables

Run = Callable[[str], "subprocess.CompletedProcess[str]"]

# The results in the sandbox: one per kind of socket, for a process and for its child.
ASK = """
import json, socket, sys
def ask(family, kind):
    try:
        socket.socket(family, kind).close()
        return "open"
    except OSError as error:
        return error.strerror
kinds = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
families = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6, "unix": socket.AF_UNIX}
print(json.dumps({
    f"{f} {k}": ask(family, kind) for f, family in families.items() for k, kind in kinds.items()
}))
"""
WALL = f"""
import subprocess, sys
from runner import offline
why_not = offline.close_network()
if why_not:
    sys.exit(why_not)
question = {ASK!r}
exec(question)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", question], check=True)
"""


@pytest.fixture(scope="module")
def behind_wall(run_python: Run) -> list[dict[str, str]]:
    """Answers in the process, and in its child."""
    done = run_python(WALL)
    if (
        "the kernel refused" in done.stderr
        or "no filter for" in done.stderr
        or "has no seccomp" in done.stderr
    ):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("who", [0, 1], ids=["the process", "its child"])
def test_behind_the_wall_there_is_no_socket_but_local_ones(
    behind_wall: list[dict[str, str]], who: int
) -> None:
    internet = ("ipv4 tcp", "ipv4 udp", "ipv6 tcp", "ipv6 udp")
    closed = dict.fromkeys(internet, "Permission denied")
    assert behind_wall[who] == {**closed, "unix tcp": "open", "unix udp": "open"}


def test_the_sandbox_holds_in_threads_started_later_and_data_still_flows(run_python: Run) -> None:
    code = """
import multiprocessing, socket, threading
from runner import offline
assert offline.close_network() is None
def ask():
    try:
        socket.socket()
    except PermissionError:
        print("refused")
thread = threading.Thread(target=ask); thread.start(); thread.join()
one, other = multiprocessing.Pipe(); one.send("through"); print(other.recv())
"""
    assert run_python(code).stdout.split() == ["refused", "through"]


# Evaluates the expression of each line behind the tripwire and prints the results.
TRIPWIRE = """
import json, socket, sys
from runner import offline
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
offline.tripwire(["192.0.2.7", "head.cluster.invalid"])
tcp, udp = (lambda: socket.socket()), (lambda: socket.socket(type=socket.SOCK_DGRAM))
def attempt(expression):
    try:
        eval(expression)
        return "done"
    except PermissionError as error:
        return "tripped" if "keeps this process offline" in str(error) else str(error)
    except OSError as error:
        return type(error).__name__
print(json.dumps({line: attempt(line) for line in sys.stdin.read().splitlines()}))
"""


def attempts(*expressions: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", TRIPWIRE],
        input="\n".join(expressions),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def test_the_tripwire_refuses_everybody_else() -> None:
    answers = attempts(
        'udp().connect(("192.0.2.1", 9))',
        'tcp().connect(("192.0.2.1", 443))',
        'udp().sendto(b"x", ("192.0.2.1", 9))',
        'udp().sendmsg([b"x"], [], 0, ("192.0.2.1", 9))',
        'socket.socket(socket.AF_INET6).connect(("2001:db8::1", 443))',
        'socket.socket(socket.AF_INET6).connect(("::ffff:192.0.2.1", 443))',
        'socket.create_connection(("huggingface.co", 443))',
        'socket.getaddrinfo("huggingface.co", 443)',
        'socket.getaddrinfo(b"huggingface.co", 443)',
        'socket.gethostbyname("huggingface.co")',
    )
    assert answers == dict.fromkeys(answers, "tripped")


def test_the_tripwire_lets_peers_and_this_machine_through() -> None:
    answers = attempts(
        'tcp().connect(("127.0.0.1", port))',
        'socket.create_connection(("localhost", port))',
        'udp().connect(("192.0.2.7", 9))',
        'socket.getaddrinfo("127.0.0.1", port)',
        "socket.getaddrinfo(socket.gethostname(), None)",
        "socket.getaddrinfo(None, port)",
        "socket.socketpair()",
    )
    assert "tripped" not in answers.values()
    assert (
        answers['tcp().connect(("127.0.0.1", port))']
        == answers['udp().connect(("192.0.2.7", 9))']
        == "done"
    )
    # The ranks may ask for a name of the job, although it has no address here.
    assert attempts('socket.getaddrinfo("head.cluster.invalid", 1)').popitem()[1] == "gaierror"


@pytest.mark.parametrize(
    ("hosts", "allowed"),
    [
        (["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"], True),
        ([None, b"localhost", "node7"], True),
        # Names that only look like this machine.
        (["huggingface.co", "127.0.0.1.evil.example", "localhost.evil.example"], False),
        (["2130706433x", "node77", b"node"], False),
    ],
)
def test_this_machine_and_peers_are_allowed(hosts: list[Any], *, allowed: bool) -> None:
    assert {is_allowed(host, {"localhost", "node7"}) for host in hosts} == {allowed}


@given(
    st.ip_addresses().filter(
        lambda a: not (a.is_loopback or a.is_unspecified or getattr(a, "ipv4_mapped", None))
    )
)
def test_no_other_address_is_allowed_unless_it_is_a_peers(address: Any) -> None:
    assert not is_allowed(str(address), {"localhost"})
    assert is_allowed(str(address), {str(address)})


def test_a_user_who_said_online_is_overruled() -> None:
    environ = {"HF_HUB_OFFLINE": "0", "PATH": "/bin"}
    set_variables(environ)
    assert environ == {**VARIABLES, "PATH": "/bin"}


def test_rust_and_c_meet_the_wall_too(run_python: Run, behind_wall: list[dict[str, str]]) -> None:
    """`ctypes` asks libc, without any call that Python could watch."""
    code = """
import ctypes, os
from runner import offline
libc = ctypes.CDLL(None, use_errno=True)
assert libc.socket(2, 1, 0) >= 0
assert offline.close_network() is None
assert libc.socket(2, 1, 0) == -1
print(os.strerror(ctypes.get_errno()))
"""
    done = run_python(code)
    assert done.stdout == "Permission denied\n", done.stderr
