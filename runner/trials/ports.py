"""The way between each two nodes: every node listens, and every other one connects.

The nodes find each other by files in the rehearsal's folder, so this also shows that all of them
see it. The names and addresses are those that a run's ranks would use.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.errors import write_atomically
from runner.job.findings import Finding
from runner.launch.network import with_port
from runner.launch.reach import HOW_TO_CHOOSE, try_to_connect

WAIT_S = 60.0
"""How long a node waits for the others: Slurm starts them one after the other."""
LOOK_EVERY_S = 0.2
ADDRESS, DONE = "address.json", "done"


def try_ports(
    folder: Path, host: str, address: str, hosts: Sequence[str]
) -> tuple[list[Finding], str]:
    """Listens on this node, and connects to all other nodes.

    Args:
        folder: on the shared disk.
        host: the scheduler's name of this node.
        address: the address on which it listens.
        hosts: all nodes.

    Returns:
        What was found; and a line on what works.
    """
    with socket.create_server((address, 0), family=_family(address)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        own = {"host": host, "address": address, "port": server.getsockname()[1]}
        write_atomically(folder / f"{host}.{ADDRESS}", json.dumps(own).encode())
        found = [
            finding for other in hosts if other != host for finding in _try(folder, host, other)
        ]
        leave(folder, host)
        wait_for_all(folder, DONE, hosts)  # the others may still connect to this node
    line = f"{host} reaches {len(hosts) - 1 - len(found)} of {len(hosts) - 1} nodes"
    return found, line


def leave(folder: Path, host: str) -> None:
    """Notes that a node has tried all ways."""
    (folder / f"{host}.{DONE}").touch()


def wait_for_all(
    folder: Path,
    suffix: str,
    hosts: Sequence[str],
    wait_s: float = WAIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Waits for a file of each node, a minute at most; returns the nodes without one."""
    deadline = clock() + wait_s
    while True:
        # Listing the folder makes a network disk ask its server again.
        there = {path.name for path in folder.iterdir()}
        missing = [host for host in hosts if f"{host}.{suffix}" not in there]
        if not missing or clock() > deadline:
            return missing
        time.sleep(LOOK_EVERY_S)


def _try(folder: Path, host: str, other: str) -> list[Finding]:
    if wait_for_all(folder, ADDRESS, [other]):
        return [
            Finding(
                "error",
                f"{other} wrote nothing into {folder} that {host} sees.",
                "Choose an --output on a disk that all nodes share; see the job's log for "
                f"{other}'s own error.",
                1,
            )
        ]
    entry: dict[str, Any] = json.loads((folder / f"{other}.{ADDRESS}").read_bytes())
    why = try_to_connect(entry["address"], entry["port"])
    if not why:
        return []
    place = with_port(entry["address"], entry["port"])
    message = f"{host} cannot connect to {other} at {place}: {why}."
    return [Finding("error", message, HOW_TO_CHOOSE, 1)]


def _accept(server: socket.socket) -> None:
    with suppress(OSError):  # it is closed when all is done
        while True:
            server.accept()[0].close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
