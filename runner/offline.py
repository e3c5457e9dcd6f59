"""Keeps a process away from the network.

There are three fences, from soft to hard. Variables make libraries work offline; they are set
before the libraries are imported. A tripwire refuses connections of Python code, except to hosts of
the job. A sandbox, a seccomp filter (`close_network`), refuses internet sockets to the whole
process and its children, C and Rust code too; it is for work without other ranks. None needs a
privilege.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from collections.abc import MutableMapping, Sequence

from runner.from_stage import close_network

__all__ = ["VARIABLES", "close_network", "is_allowed", "set_variables", "tripwire"]

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    # Unset, tokenizers turns its threads off in a process that was forked, and prints a warning.
    "TOKENIZERS_PARALLELISM": "true",
}


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of offline libraries. Call it before their import: most read them once."""
    environ.update(VARIABLES)


def tripwire(peers: Sequence[str]) -> None:
    """From now on Python code in this process can look up and connect to the job's hosts only.

    It is an audit hook (PEP 578), which cannot be removed. It does not see sockets of C++ or Rust
    code, so gloo and NCCL still work.

    Args:
        peers: host names and addresses of the job. Loopback is always allowed.
    """
    allowed = {"localhost", "", socket.gethostname(), *peers}
    for host in peers:
        try:
            allowed |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError:  # a name without an address: connecting to it will fail with a message
            continue

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            connection, address = arguments[0], arguments[1]
            internet = isinstance(connection, socket.socket) and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            )
            if internet and isinstance(address, tuple) and not is_allowed(address[0], allowed):
                raise PermissionError(
                    errno.EACCES, f"airlift keeps this process offline: {event} {address}"
                )
        elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not is_allowed(
            arguments[0], allowed
        ):
            raise PermissionError(
                errno.EACCES, f"airlift keeps this process offline: {event} {arguments[0]!r}"
            )

    sys.addaudithook(hook)


def is_allowed(host: object, allowed: set[str]) -> bool:
    """Whether a host is loopback, unspecified, or one of the allowed names and addresses."""
    if host is None:
        return True
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    if text in allowed:
        return True
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified) or str(mapped) in allowed
