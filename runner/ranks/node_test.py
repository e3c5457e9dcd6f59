"""Whether the nodes of a job can work together: tried in seconds, before the ranks start.

The launcher starts this module once per node with srun (`runner.launch.srun`). Each node looks at
the interfaces that the user named, at the run folder and the bundle, and at its own route to rank
0's node, to which it connects: at rank 0's port, and at a second one that the system chose. It
prints one line per fault, with its name. Without this the ranks would import torch, wait, and blame
each other.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.ranks import network
from runner.ranks.network import GLOO, NCCL
from runner.ranks.reach import try_to_connect

MARK = "airlift-node "
WAIT_S = 5.0
"""How long a node tries to connect; longer only while rank 0's node has not started."""
START_S = 30.0
"""The tasks of a step do not start at the same time."""


@dataclass(frozen=True)
class NodeFault:
    """What is wrong on a node, with its remedy."""

    node: str
    message: str
    remedy: str

    def __str__(self) -> str:
        """Returns one line for people."""
        return f"node {self.node}: {self.message}"


@dataclass(frozen=True)
class Meeting:
    """What the nodes have to reach.

    Attributes:
        address: where rank 0 listens; empty: not known yet.
        port: the TCP port of rank 0.
        others: the number of other nodes.
        folders: what it is -> a folder that each node must have.
    """

    address: str
    port: int
    others: int
    folders: Mapping[str, str]

    def to_json(self) -> str:
        """Returns it as the argument of this module."""
        return json.dumps(self.__dict__)


def look_here(meeting: Meeting, node: str, environ: Mapping[str, str]) -> list[NodeFault]:
    """Finds what is wrong on this node alone."""
    found = []
    names = [name for _, name in socket.if_nameindex()]
    for setting, lacking in network.wrong_interfaces(environ, names):
        found.append(
            NodeFault(
                node,
                f"{setting}: there is no interface {lacking}; it has {', '.join(names)}",
                f"Unset {setting.partition('=')[0]} (each node then takes the interface of its "
                "route to the others), or name one that all nodes have.",
            )
        )
    for what, folder in meeting.folders.items():
        if not Path(folder).is_dir():
            found.append(
                NodeFault(
                    node,
                    f"{what} {folder} is not there",
                    "Put it on a disk that all nodes share.",
                )
            )
    if not environ.get(GLOO) and (fault := _own_name(node, meeting)):
        found.append(fault)
    return found


def _own_name(node: str, meeting: Meeting) -> NodeFault | None:
    """A node whose name is a loopback address, and that has no route which replaces it."""
    own = network.addresses_of(socket.gethostname())
    if not own or not network.is_loopback(own[0]):
        return None
    interface = network.find_interface(meeting.address, []) if meeting.address else None
    if interface is not None and interface.name:
        return None
    return NodeFault(
        node,
        f"its own name is {own[0]} in /etc/hosts, a loopback address, and no route leads to the "
        "other nodes, so gloo would offer them that",
        f"`ip -br address` there shows its networks; export {GLOO} and {NCCL} in slurm.setup.",
    )


def listen(port: int, others: int) -> tuple[socket.socket, socket.socket]:
    """Opens rank 0's port and a second one, on all addresses of this node."""
    sockets = []
    for number in (port, 0):
        # As torch's store: a socket for IPv6 that takes IPv4, too.
        try:
            server = socket.create_server(
                ("", number), family=socket.AF_INET6, dualstack_ipv6=True, backlog=others + 8
            )
        except (OSError, ValueError):
            server = socket.create_server(("", number), backlog=others + 8)
        sockets.append(server)
    return sockets[0], sockets[1]


def serve(meeting: Meeting) -> None:
    """On rank 0's node: gives each other node the second port, until all have come."""
    first, second = listen(meeting.port, meeting.others)
    first.settimeout(1.0)
    until, come = time.monotonic() + START_S + 2 * WAIT_S, 0
    with first, second:
        while come < meeting.others and time.monotonic() < until:
            try:
                connection, _ = first.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(2 * WAIT_S)
                try:
                    connection.sendall(f"{second.getsockname()[1]}\n".encode())
                    come += bool(connection.recv(1))  # it has tried the second port
                except OSError:
                    continue


def reach(meeting: Meeting) -> str:
    """On another node: connects to both ports. Returns why that fails; empty: it works."""
    began = time.monotonic()
    while True:
        why = _reach_once(meeting)
        waited = time.monotonic() - began
        # "it refuses" is how a port looks on which nobody listens yet.
        if not why or waited > (START_S if "refuses" in why else WAIT_S):
            return why
        time.sleep(0.3)


def _reach_once(meeting: Meeting) -> str:
    place = network.with_port(meeting.address, meeting.port)
    try:
        with socket.create_connection((meeting.address, meeting.port), timeout=WAIT_S) as first:
            first.settimeout(WAIT_S)
            second = int(first.makefile().readline() or 0)
            why = try_to_connect(meeting.address, second, WAIT_S) if second else ""
            first.sendall(b".")
    except (OSError, ValueError):
        return f"cannot reach {place}: {try_to_connect(meeting.address, meeting.port, WAIT_S)}"
    if why:
        return (
            f"reaches {place}, but no other port there ({second}: {why}); ranks connect at many "
            "ports"
        )
    return ""


def faults_in(output: str) -> tuple[list[NodeFault], set[str]]:
    """Reads what the nodes printed: the faults, and the nodes that came to the end. Pure."""
    found: list[NodeFault] = []
    nodes: set[str] = set()
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if not mark:
            continue
        answer = json.loads(text)
        nodes.add(answer["node"])
        found += [NodeFault(**fault) for fault in answer["faults"]]
    return found, nodes


def main(argument: str, environ: Mapping[str, str]) -> None:
    """Looks at this node, and prints one line."""
    meeting = Meeting(**json.loads(argument))
    node = network.here(environ)
    found = look_here(meeting, node, environ)
    if not meeting.address:  # an salloc shell: the ranks find the address
        pass
    elif environ.get("SLURM_NODEID") == "0":
        try:
            serve(meeting)
        except OSError as error:
            found.append(
                NodeFault(
                    node, f"port {meeting.port} cannot be opened: {error}", "Submit it again."
                )
            )
    elif why := reach(meeting):
        found.append(
            NodeFault(
                node,
                why,
                "A firewall between the nodes, or an address of another network: ask the site which"
                " network and ports jobs may use, and set MASTER_ADDR, GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to it (slurm.setup).",
            )
        )
    print(f"{MARK}{json.dumps({'node': node, 'faults': [f.__dict__ for f in found]})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], os.environ)
