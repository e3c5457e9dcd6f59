"""Where rank 0 listens: an address that each node can reach, and a port that is probably free.

With several nodes nothing falls back to localhost: each node would silently train on its own.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import IncompleteError, UsageError
from runner.launch import network
from runner.slurm.commands import ask
from runner.slurm.environment import EPHEMERAL_PORTS

UNSET = (
    "Unset MASTER_ADDR (see ~/.bashrc, your job script and slurm.setup): the address is found "
    "without it."
)


@dataclass(frozen=True)
class Master:
    """Where rank 0 listens.

    Attributes:
        reason: why this address.
        ignored: a given MASTER_ADDR that is not used, with the reason; empty if there is none.
    """

    address: str
    reason: str
    ignored: str = ""


def locate(
    given: str,
    hosts: Sequence[str],
    num_nodes: int,
    *,
    is_first: bool,
    address_in_scheduler: Callable[[str], str | None] = lambda _host: None,
) -> Master:
    """Finds where rank 0 listens, as seen from this node.

    On one node that is the loopback address. On several nodes it is MASTER_ADDR if the user set it
    (some sites want an InfiniBand name), else rank 0's address on the network that the nodes share.
    On rank 0's node this is the address of the route to another node: the node's own name may map
    to a loopback address or to another network. On the other nodes it is the address of the name of
    rank 0's node. If names give nothing, it is the address that the scheduler uses.

    Args:
        given: MASTER_ADDR; empty: not set.
        hosts: the hosts of the job; rank 0 is on the first. Empty: not known.
        num_nodes: how many nodes the job has.
        is_first: whether this is the node of rank 0.
        address_in_scheduler: host -> the scheduler's address of it; None: it has none.

    Raises:
        UsageError: MASTER_ADDR is a loopback address or not an address of rank 0; or no address was
            found.
    """
    if num_nodes == 1:
        unusual = given and not network.is_loopback(given)
        ignored = f"MASTER_ADDR={given} is ignored on one node" if unusual else ""
        return Master("127.0.0.1", "one node", ignored)
    if network.is_loopback(given):
        raise UsageError(
            f"MASTER_ADDR={given} would make each of the {num_nodes} nodes a world of its own",
            UNSET,
        )
    means_first = bool(given and hosts) and network.same_host(given, hosts[0])
    if given and not means_first:
        if is_first:
            _check_is_own(given, hosts)
        elif hosts and any(map(network.is_own, network.addresses_of(given))):
            raise UsageError(
                f"MASTER_ADDR={given} is an address of {platform.node()}, and rank 0 runs on "
                f"{hosts[0]}; was it set for another job?",
                UNSET,
            )
        return Master(given, "MASTER_ADDR, as you set it")
    found = _on_shared_network(hosts, address_in_scheduler) if is_first else None
    for name in (given, *hosts[:1]) if found is None else ():
        found = found or _by_name(name, address_in_scheduler)
    if found is None:
        raise UsageError(
            f"the first node {hosts[0] if hosts else ''!r} has no address: its name gives none on "
            f"{platform.node()} that other nodes could reach, and the scheduler knows no other",
            "Ask the site for a name or address that other nodes reach, and "
            "`export MASTER_ADDR=...` in slurm.setup.",
        )
    if not given:
        return Master(*found)
    addresses = network.addresses_of(given)
    if found[0] in addresses:
        return Master(given, "MASTER_ADDR, as you set it")
    what = f"is {addresses[0]}" if addresses else "has no address"
    return Master(*found, f"MASTER_ADDR={given} is not used: it {what} here")


def _check_is_own(given: str, hosts: Sequence[str]) -> None:
    """Checks that MASTER_ADDR is an address of this node, where rank 0 runs.

    Raises:
        UsageError: it is another node's, or a loopback address.
    """
    found = network.addresses_of(given)
    usable = [address for address in found if not network.is_loopback(address)]
    if any(network.is_own(address) for address in usable):
        return
    what = "a loopback address" if found and not usable else "not an address"
    where = f"{hosts[0] if hosts else platform.node()}, where rank 0 runs"
    raise UsageError(
        f"MASTER_ADDR={given} is {what} on {where}; was it set for another job?", UNSET
    )


def _on_shared_network(
    hosts: Sequence[str], address_in_scheduler: Callable[[str], str | None]
) -> tuple[str, str] | None:
    """On the first node: its address on the route to the others, and the reason.

    The others are found by their names, else by their addresses in the scheduler.
    """
    others = [host for host in hosts[1:] if host != hosts[0]][: network.PEERS_ASKED]
    return network.own_address_towards(others) or network.own_address_towards(
        [address for host in others if (address := address_in_scheduler(host))]
    )


def _by_name(
    host: str, address_in_scheduler: Callable[[str], str | None]
) -> tuple[str, str] | None:
    if not host:
        return None
    for address in network.addresses_of(host):
        if not network.is_loopback(address) and network.source_towards(address):
            return address, f"the address of {host}"
    known = address_in_scheduler(host)
    for address in network.addresses_of(known) if known else []:
        if not network.is_loopback(address):
            return address, f"the address that the scheduler uses for {host}"
    return None


def address_in_slurm(host: str) -> str | None:
    """The address that Slurm itself uses for a node (NodeAddr of scontrol(1)); None: unknown."""
    try:
        shown = ask("scontrol", "show", "node", host, "--oneliner", timeout_s=60)
    except (OSError, IncompleteError):
        return None
    fields = dict(field.partition("=")[::2] for field in shown.stdout.split()) if shown else {}
    return fields.get("NodeAddr") or None


def free_port(port: int, environ: Mapping[str, str]) -> int:
    """`port`, or the next free one. Only the node of rank 0 can know; elsewhere `port` itself.

    Raises:
        UsageError: a hundred ports are in use.
    """
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
    raise UsageError(
        f"no free port between {port} and {port + 99} on {socket.gethostname()}", "Submit it again."
    )


def read_ephemeral_ports(
    path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range"),
) -> tuple[int, int]:
    """This machine's range of ports for outgoing connections, else Linux's default."""
    try:
        low, high = path.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return EPHEMERAL_PORTS
