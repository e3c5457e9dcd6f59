"""Where rank 0 listens: an address every node can reach, a port no one else is likely to hold.

Nothing falls back to localhost when there are several nodes: each node would quietly train a world of its own.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from runner.errors import UsageError
from runner.slurm import EPHEMERAL_PORTS, first_host


def master_address(environ: Mapping[str, str], nodes: str, num_nodes: int) -> str:
    """Where rank 0 listens, as every node can reach it.

    On one node that is the loopback address. On several it is MASTER_ADDR if the user set it (some sites want
    an InfiniBand name), else the first host if its name resolves, else the address Slurm itself uses for it.

    Raises:
        UsageError: MASTER_ADDR is a loopback address although there are several nodes, or nothing resolves.
    """
    given = environ.get("MASTER_ADDR")
    if num_nodes == 1:
        return given or "127.0.0.1"
    if given:
        if given == "localhost" or given.startswith("127.") or given == "::1":
            raise UsageError(
                f"MASTER_ADDR={given} would make each of the {num_nodes} nodes a world of its own",
                "Unset MASTER_ADDR (see ~/.bashrc and slurm.setup), or set it to the first node's address.",
            )
        return given
    host = first_host(nodes)
    address = host if _resolves(host) else _address_in_slurm(host)
    if address is None:
        raise UsageError(
            f"the first node {host!r} has no address: its name does not resolve on {socket.gethostname()} and "
            "Slurm knows no other for it",
            "Ask the site for a name that resolves on compute nodes and `export MASTER_ADDR=...` in slurm.setup.",
        )
    return address


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _address_in_slurm(host: str) -> str | None:
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", host, "--oneliner"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    address = next((word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr=")), "")
    return address if address and _resolves(address) else None


def free_port(port: int, environ: Mapping[str, str]) -> int:
    """`port`, or the next one nobody listens on, where we can know that: on the node of rank 0."""
    if environ.get("SLURM_NODEID") != "0":
        return port
    for candidate in range(port, min(port + 100, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            return candidate
    raise UsageError(f"no free port between {port} and {port + 99} on {socket.gethostname()}", "Submit it again.")


def read_ephemeral_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """This machine's range of ports for outgoing connections; Linux's default where it cannot be read."""
    try:
        low, high = path.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return EPHEMERAL_PORTS
