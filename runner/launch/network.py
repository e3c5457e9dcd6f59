"""Where rank 0 listens, and which of this node's addresses and interfaces leads there.

It resolves names and reads the kernel's routes; it sends nothing. A node's own name is never
trusted: Debian maps it to 127.0.1.1 in /etc/hosts, other sites to a management network. With
several nodes nothing falls back to localhost: each node would silently train on its own.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.from_stage import IncompleteError, UsageError
from runner.slurm.environment import EPHEMERAL_PORTS
from runner.slurm.jobs import details

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PEERS_ASKED = 3
"""At most this many other hosts are looked up: an unknown name may take DNS 10 s or more."""
SCHEDULER_S = 60.0
"""How long scontrol may take: all nodes of a job ask a busy controller at the same time."""
PORTS_TRIED = 100
"""Consecutive jobs get consecutive ports, so several of them may be on one node."""

_UNANSWERED = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849), which only the default route reaches."""

UNSET = (
    "Unset MASTER_ADDR (see ~/.bashrc, your job script and slurm.setup): the address is found "
    "without it."
)

_DISCARD = 9  # a port; connect() of a datagram socket sends nothing


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address or the name `localhost`."""
    parsed = _parsed(plain(address))
    return address == "localhost" or (parsed is not None and parsed.is_loopback)


def plain(address: str) -> str:
    """Turns an IPv4 address in IPv6 notation (`::ffff:10.0.0.1`) into IPv4 notation."""
    mapped = getattr(_parsed(address.partition("%")[0]), "ipv4_mapped", None)
    return str(mapped) if mapped else address


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address; None: the text is a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def addresses_of(host: str) -> list[str]:
    """The addresses of a name on this node, in the resolver's order, with loopback ones."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(plain(str(info[4][0])) for info in found))


def is_own(address: str) -> bool:
    """Whether this node has the address."""
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def source_towards(address: str) -> str | None:
    """This node's source address on the route to `address`; None: no route. Sends nothing."""
    try:
        with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address_towards(peers: Sequence[str]) -> tuple[str, str] | None:
    """This node's address on the route to the first of `peers` that has one, and the reason.

    Args:
        peers: names or addresses of other nodes.

    Returns:
        None if no peer has a route.
    """
    for peer in peers:
        for address in addresses_of(peer):
            if is_loopback(address) or is_own(address):
                continue
            source = source_towards(address)
            if source and not is_loopback(source):
                return source, f"the route to {peer}" + (f" ({address})" if address != peer else "")
    return None


def interface_of(address: str) -> str:
    """The name of the interface that has an address; empty if unknown.

    psutil comes with deepspeed and accelerate; a user's script may run without both.
    """
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(plain(entry.address.partition("%")[0]) == address for entry in entries):
            return str(name)
    return ""


def own_address_among(master_addr: str, peers: Sequence[str]) -> tuple[str, str] | None:
    """This node's address on the route to rank 0; on rank 0's own node, to the others.

    Args:
        master_addr: where rank 0 listens, a name or an address.
        peers: the known other hosts of the job.

    Returns:
        The address, and why this one; None if no route leads to another node.
    """
    # This node's own name is not trusted: other nodes may know another address for it.
    own_name = same_host(master_addr, platform.node())
    for address in [] if own_name else addresses_of(master_addr):
        source = None if is_loopback(address) else source_towards(address)
        if source and not is_loopback(source):
            why = f"the route to {master_addr}, where rank 0 listens"
            if is_own(address):
                why = "rank 0 listens there"
            return source, why
    if found := own_address_towards(peers[:PEERS_ASKED]):
        return found
    for address in [*addresses_of(master_addr), *_UNANSWERED]:
        source = None if is_loopback(address) else source_towards(address)
        if source:
            default = address in _UNANSWERED
            why = "the default route" if default else f"the address of {master_addr}"
            return source, why
    return None


def interface_variables(
    environ: Mapping[str, str], master_addr: str, peers: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The variables that select gloo's and NCCL's interface, and lines with the reasons.

    Without them gloo offers its peers the address of this node's own name, and NCCL uses the first
    interface that is up.

    Args:
        environ: variables that the user set in it win.
        master_addr: where rank 0 listens.
        peers: the known other hosts of the job.
    """
    theirs = _given(environ)
    lines = [f"{name}={value}: as you set it" for name, value in theirs.items()]
    if len(theirs) == 2:
        return {}, lines
    address, reason = own_address_among(master_addr, peers) or ("", "")
    name = interface_of(address) if address else ""
    if not name:
        why = "no route leads to another node"
        if address:
            why = f"the interface of {address} has no name"
        line = f"{why} on {platform.node()}; if ranks do not meet, set {GLOO} and {NCCL}"
        return {}, [*lines, line]
    # Without the equals sign NCCL takes a name as a prefix: eth1 would match eth10.
    both = {GLOO: name, NCCL: f"={name}"}
    ours = {key: value for key, value in both.items() if key not in theirs}
    libraries = " and ".join(key.partition("_")[0].replace("GLOO", "gloo") for key in ours)
    line = f"{libraries} between nodes over {name} ({address}): {reason}"
    return ours, [*lines, line]


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """What the user set of the variables that select gloo's and NCCL's interface."""
    return {name: environ[name] for name in (GLOO, NCCL) if environ.get(name)}


def missing_interfaces(value: str, names: Sequence[str], *, of_nccl: bool) -> list[str]:
    """The entries of a list of interfaces that name none of this node. Pure.

    NCCL takes a name as a prefix, `=name` exactly, and a list after `^` as excluded; one interface
    is enough. gloo takes exact names, and needs each. Source: NCCL's "Environment Variables";
    torch's ProcessGroupGloo.

    Args:
        value: of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME.
        names: the interfaces of this node.
    """
    without = of_nccl and value.startswith("^")
    text = value.lstrip("^=") if of_nccl else value
    exact = not of_nccl or value.lstrip("^").startswith("=")
    entries = [entry for entry in text.split(",") if entry]
    named = {
        entry: {name for name in names if name == entry or (not exact and name.startswith(entry))}
        for entry in entries
    }
    if without:
        return [] if set(names) - set().union(*named.values()) else [value]
    lacking = [entry for entry in entries if not named[entry]]
    return [] if of_nccl and len(lacking) < len(entries) else lacking


def wrong_interfaces(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables of gloo and NCCL that this node cannot follow -> the interfaces it lacks.

    Args:
        names: the interfaces of this node.
    """
    return {
        name: ", ".join(lacking)
        for name, value in _given(environ).items()
        if (lacking := missing_interfaces(value, names, of_nccl=name == NCCL))
    }


def loopback_variables(
    environ: Mapping[str, str], names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The variables of gloo and NCCL for ranks of one machine, and lines with the reasons. Pure.

    An interface that the user named stays, if this machine has it: the ranks of a rehearsal have
    loopback alone, and a login node lacks those of the compute nodes.

    Args:
        names: the interfaces of this machine.
    """
    wrong = wrong_interfaces(environ, names)
    # Without a name, gloo takes the address of this machine's own name.
    ours = [*wrong] if environ.get(GLOO) else [GLOO, *wrong]
    lines = [
        f"{name}={LOOPBACK}, not {environ[name]}: there is no {lacking} here, and these "
        "ranks are on one machine"
        for name, lacking in wrong.items()
    ]
    return dict.fromkeys(ours, LOOPBACK), lines


def with_port(host: str, port: int) -> str:
    """Such as `n1:29500` or `[fd00::1]:29500`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host, with or without a domain (`n1`, `n1.cluster.local`)."""
    if _parsed(one) or _parsed(other):
        return one == other
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or (
        ("." in one) != ("." in other) and one.partition(".")[0] == other.partition(".")[0]
    )


def this_host(environ: Mapping[str, str]) -> str:
    """The scheduler's name of this node."""
    return environ.get("SLURMD_NODENAME") or platform.node()


def other_hosts(hosts: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The hosts of a job without this one."""
    return [host for host in hosts if not same_host(host, this_host(environ))]


def family(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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


def address_in_slurm(host: str) -> str | None:
    """The address that Slurm itself uses for a node (NodeAddr of scontrol(1)); None: unknown."""
    try:
        return details(host, "node", SCHEDULER_S).get("NodeAddr") or None
    except (OSError, IncompleteError):
        return None


def locate(
    given: str,
    hosts: Sequence[str],
    num_nodes: int,
    *,
    is_first: bool,
    address_in_scheduler: Callable[[str], str | None] = address_in_slurm,
    remedy: str = UNSET,
) -> Master:
    """Finds where rank 0 listens, as seen from this node.

    On one node that is the loopback address. On several nodes it is MASTER_ADDR if the user set it
    (some sites want an InfiniBand name), else rank 0's address on the network that the nodes share.
    On rank 0's node this is the address of the route to another node: the node's own name may map
    to a loopback address or to another network. On the other nodes it is that of the name of
    rank 0's node. If names give nothing, it is the address that the scheduler uses.

    Args:
        given: MASTER_ADDR; empty: not set.
        hosts: the hosts of the job; rank 0 is on the first. Empty: not known.
        num_nodes: how many nodes the job has.
        is_first: whether this is the node of rank 0.
        address_in_scheduler: host -> the scheduler's address of it; None: it has none.
        remedy: of a MASTER_ADDR that cannot be; where no hosts are known, unsetting it is none.

    Raises:
        UsageError: MASTER_ADDR is a loopback address or not an address of rank 0; or no address was
            found.
    """
    if num_nodes == 1:
        unusual = given and not is_loopback(given)
        ignored = f"MASTER_ADDR={given} is ignored on one node" if unusual else ""
        return Master("127.0.0.1", "one node", ignored)
    if is_loopback(given):
        raise UsageError(
            f"MASTER_ADDR={given} is this node itself on each of the {num_nodes} nodes: then each "
            "node would train alone, without the others",
            remedy,
        )
    means_first = bool(given and hosts) and same_host(given, hosts[0])
    if given and not means_first:
        if is_first:
            _check_is_own(given, hosts, remedy)
        elif hosts and any(map(is_own, addresses_of(given))):
            raise UsageError(
                f"MASTER_ADDR={given} is an address of {platform.node()}, and rank 0 runs on "
                f"{hosts[0]}; was it set for another job?",
                UNSET,
            )
        return Master(given, "MASTER_ADDR, as you set it")
    others = [host for host in hosts[1:] if host != hosts[0]]
    found = own_address_on_shared_network(others, address_in_scheduler) if is_first else None
    if found is None:
        found = _by_name(filter(None, (given, *hosts[:1])), address_in_scheduler)
    if found is None:
        raise UsageError(
            f"the first node {hosts[0] if hosts else ''!r} has no address: its name gives none on "
            f"{platform.node()} that other nodes could reach, and the scheduler knows no other",
            "Ask the site for a name or address that other nodes reach, and "
            "`export MASTER_ADDR=...` in slurm.setup.",
        )
    if not given:
        return Master(*found)
    addresses = addresses_of(given)
    if found[0] in addresses:
        return Master(given, "MASTER_ADDR, as you set it")
    what = f"is {addresses[0]}" if addresses else "has no address"
    return Master(*found, f"MASTER_ADDR={given} is not used: it {what} here")


def _check_is_own(given: str, hosts: Sequence[str], remedy: str) -> None:
    """Checks that MASTER_ADDR is an address of this node, where rank 0 runs.

    Raises:
        UsageError: it is another node's, or a loopback address.
    """
    found = addresses_of(given)
    usable = [address for address in found if not is_loopback(address)]
    if any(is_own(address) for address in usable):
        return
    what = "a loopback address" if found and not usable else "not an address"
    where = f"{hosts[0] if hosts else platform.node()}, where rank 0 runs"
    raise UsageError(
        f"MASTER_ADDR={given} is {what} on {where}; was it set for another job?", remedy
    )


def own_address_on_shared_network(
    others: Sequence[str], address_in_scheduler: Callable[[str], str | None] = address_in_slurm
) -> tuple[str, str] | None:
    """This node's address on the route to other nodes of the job, and the reason.

    The others are found by their names, else by their addresses in the scheduler.
    """
    asked = others[:PEERS_ASKED]
    return own_address_towards(asked) or own_address_towards(
        [address for host in asked if (address := address_in_scheduler(host))]
    )


def _by_name(
    hosts: Iterable[str], address_in_scheduler: Callable[[str], str | None]
) -> tuple[str, str] | None:
    """The address of the first of these names that has one, and the reason; None: none has."""
    for host in hosts:
        for address in addresses_of(host):
            if not is_loopback(address) and source_towards(address):
                return address, f"the address of {host}"
        known = address_in_scheduler(host)
        for address in addresses_of(known) if known else []:
            if not is_loopback(address):
                return address, f"the address that the scheduler uses for {host}"
    return None


def free_port_here() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_port(port: int, environ: Mapping[str, str]) -> int:
    """`port`, or the next free one. Only the node of rank 0 can know; elsewhere `port` itself.

    Raises:
        UsageError: a hundred ports are in use.
    """
    if environ.get("SLURM_NODEID") != "0":
        return port
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            # As torch's store does: a port that an earlier job has just left is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            return candidate
    raise UsageError(
        f"no free port between {port} and {port + PORTS_TRIED - 1} on {socket.gethostname()}",
        "Submit it again.",
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
