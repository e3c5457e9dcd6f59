"""Waits until rank 0 listens, and explains connections that failed.

The ranks start at different times, so a refused connection alone is no error. The other ranks watch
rank 0's heartbeat (`runner.run_folder.heartbeat`) while they try to connect.
"""

from __future__ import annotations

import errno
import platform
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from runner.errors import NeverMetError
from runner.from_stage import IncompleteError, StageError
from runner.launch.network import addresses_of, is_loopback, plain, with_port
from runner.run_folder.heartbeat import JOIN, read_failure, read_pulse

TRY_EVERY_S = 1.0
"""A rank that waits costs rank 0's node one refused connection per second."""
ANSWER_S = 10.0
"""A host that does not answer for this long drops incoming packets."""

LISTENS_S = 60.0
"""If rank 0 reports that it listens and refuses for this long, it listens elsewhere."""
NO_WAY_S = 60.0
"""How long other errors than a refusal may last: a network may come up after its node."""
SILENT_S = 1800.0
"""Rank 0 may need this long to import torch from a busy disk."""
CLOCKS_DIFFER_S = 30.0
"""How much the clocks of two nodes may differ."""

HOW_TO_CHOOSE = (
    "`ip -br address` on a compute node lists its networks; set GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME to the interface of the one that the nodes share, and MASTER_ADDR to the "
    "first node's address on it (slurm.setup). Running it again unchanged will not help."
)
# Words of gloo, in small letters, about a peer that was reached and then ended.
_GONE = ("connection closed", "connection reset", "broken pipe", "got 0 bytes")
# Words of gloo and NCCL, in small letters, about a peer that is gone or does not answer.
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "got 0 bytes",
    "ncclremoteerror",
    "remote process exit",
    "communicator was aborted",
)
_WATCHDOG = ("watchdog", "processgroupnccl")
_STUCK = "watchdog got stuck"
_IN_USE = ("eaddrinuse", "address already in use")
_REMOTE = (
    re.compile(r"remote=\[(?P<host>[^\]]+)\]:(?P<port>\d+)"),  # gloo
    re.compile(r"failed to connect to \[?(?P<host>[^\s\]]+?)\]?:(?P<port>\d+) "),  # torch's store
    re.compile(r"[Cc]onnect to (?P<host>[^\s<]+)<(?P<port>\d+)>"),  # NCCL
    re.compile(r"network address of \((?P<host>[^,]+), (?P<port>\d+)\)"),  # NCCL
)


def wait_for_rank_0(
    rank: int,
    address: str,
    port: int,
    logs: Path,
    *,
    started: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns as soon as a process listens at rank 0's address.

    Args:
        rank: the number of this rank.
        address: the address of rank 0, with its TCP port `port`.
        logs: the folder of the heartbeat files.
        started: when this rank was started, in seconds since 1970.
        clock: returns monotonic seconds.

    Raises:
        NeverMetError: the address cannot be reached from this node.
        StageError: rank 0 failed; with its exit code.
    """
    pulse, alive = read_pulse(logs, 0), clock()
    refused_since: float | None = None
    trouble, since = "", clock()
    while True:
        failure = read_failure(logs, 0)
        if failure is not None and failure.time > started - CLOCKS_DIFFER_S:
            raise StageError(
                f"rank 0 on {failure.host} failed before the ranks met.",
                f"See rank 0's output, or its log: {logs / 'rank-0.log'}",
                exit_code=failure.code,
            )
        met = try_to_connect(address, port)
        if not met:
            return
        now = clock()
        if met != trouble:
            trouble, since = met, now
        seen = read_pulse(logs, 0)
        if seen != pulse:
            pulse, alive = seen, now
            listens = pulse is not None and pulse.get("phase") == JOIN
            refused_since = (refused_since or now) if listens else None
        patience = SILENT_S if met == "it refuses" else NO_WAY_S
        waited = now - (alive if met == "it refuses" else since)
        if refused_since is not None and met == "it refuses":
            waited, patience = now - refused_since, LISTENS_S
        if waited > patience:
            raise never_met(rank, address, port, met, waited)
        time.sleep(TRY_EVERY_S)


def try_to_connect(address: str, port: int, timeout_s: float = ANSWER_S) -> str:
    """Tries to connect. Returns the error as text; empty: connected."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except socket.gaierror:
        return "the name has no address there"
    except ConnectionRefusedError:
        return "it refuses"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "no route"
        return str(error.strerror or error)
    return ""


def never_met(rank: int, host: str, port: int, why: str, waited_s: float = 0) -> NeverMetError:
    """The error of a connection that was never made: from where to where, and why.

    Args:
        rank: the number of this rank.
        why: the result of `try_to_connect`, or a library's message.
        waited_s: how long it was tried, in seconds.
    """
    own = [address for address in addresses_of(host) if is_loopback(address)]
    if own or is_loopback(host):
        name = "" if is_loopback(host) else f"{host} is {own[0]} there, "
        why = f"{name}a loopback address, which leads back to {platform.node()} itself ({why})"
    after = f", for {waited_s:.0f} s" if waited_s else ""
    return NeverMetError(
        f"rank {rank} on {platform.node()} cannot reach {with_port(host, port)}: {why}{after}. "
        "The ranks never met.",
        HOW_TO_CHOOSE,
    )


def explain_joining(error: RuntimeError, rank: int, address: str, port: int) -> StageError | None:
    """Explains a library's error while the ranks connect; None if it is not about the network.

    A peer that was reached and then ended is not meant: gloo reports a closed connection.
    """
    message = str(error).lower()
    if any(text in message for text in _IN_USE) and rank == 0:
        return IncompleteError(
            f"port {port} is in use on {platform.node()}, where rank 0 wants to listen.",
            "Run it again, or set MASTER_PORT to another port for all ranks.",
        )
    if any(text in message for text in _GONE):
        return None
    reasons = {
        "connection refused": "it refuses: no process listens there, or a firewall",
        "no route": "no route",
        "unreachable": "no route",
        "timed out": "no answer: a firewall, or another network",
        "timeout": "no answer: a firewall, or another network",
        "failed to connect": "it cannot be connected to",
    }
    why = next((reason for text, reason in reasons.items() if text in message), "")
    if not why:
        return None
    if came := re.search(r"(\d+)/(\d+) clients joined", str(error)):
        return NeverMetError(
            f"only {came[1]} of {came[2]} ranks connected to {with_port(address, port)}, "
            "where rank 0 listens.",
            HOW_TO_CHOOSE,
        )
    match = next((found for pattern in _REMOTE if (found := pattern.search(str(error)))), None)
    return never_met(
        rank, plain(match["host"]) if match else address, int(match["port"]) if match else port, why
    )


def says_lost_peer(message: str) -> bool:
    """Whether an error of a collective means that another rank is gone.

    gloo and NCCL say so only in the message. NCCL has one error class for this (`ncclRemoteError`
    in nccl.h; its detail names the socket) and for faults of this rank, which must be reported as
    they are.
    """
    lowered = message.lower()
    return any(part in lowered for part in _LOST)


def lost_by_watchdog(output: str) -> str:
    """The line in which NCCL's watchdog says that another rank is gone or hangs; empty: none.

    The watchdog is a thread of torch's ProcessGroupNCCL. It ends the process with SIGABRT, so no
    Python code can report the cause. It ends it for faults of this rank's own GPU too.

    Args:
        output: the end of what the rank wrote to stderr.
    """
    for line in output.splitlines():
        lowered = line.lower()
        if not any(name in lowered for name in _WATCHDOG):
            continue
        if "cuda error" in lowered:
            return ""
        if says_lost_peer(lowered) or _STUCK in lowered:
            return line.strip()
    return ""
