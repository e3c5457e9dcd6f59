"""What keeps a process from the network.

Three fences, from soft to hard. Variables tell well-behaved libraries to stay home (set before any of them is
imported). A tripwire refuses what Python code asks of the socket module, except for peers of the job. A wall, a
seccomp filter, refuses internet sockets to everything in the process and its children, C and Rust too; it is for work
that needs no rendezvous. None needs a privilege.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from runner.errors import wall

__all__ = ["VARIABLES", "is_allowed", "set_cache_folders", "set_variables", "tripwire", "wall"]

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "true",
}


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Tells libraries that there is no network. Must come before their import: most read this once."""
    environ.update(VARIABLES)


def set_cache_folders(environ: MutableMapping[str, str]) -> Path:
    """Points compiler caches at a folder of this job on local disk: on NFS and Lustre their file locks break.

    A variable that is set already is left alone. Returns the folder.
    """
    base = Path(environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    folder = base / f"airlift-{os.getuid()}-{environ.get('SLURM_JOB_ID', 'local')}"
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        environ.setdefault(name, str(folder / name.lower().removesuffix("_dir")))
    return folder


def tripwire(peers: Sequence[str]) -> None:
    """From now on Python code in this process may look up and connect to the job's own hosts only.

    An audit hook (PEP 578): it cannot be taken off, and it does not see sockets opened in C++ or Rust, so gloo and
    NCCL go on working.

    Args:
        peers: host names and addresses of the job; loopback is always allowed.
    """
    allowed = {"localhost", "", socket.gethostname(), *peers}
    for host in peers:
        try:
            allowed |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError:  # a name without address: connecting to it will say so
            continue

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            connection, address = arguments[0], arguments[1]
            internet = isinstance(connection, socket.socket) and connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and isinstance(address, tuple) and not is_allowed(address[0], allowed):
                raise PermissionError(errno.EACCES, f"airlift keeps this process offline: {event} {address}")
        elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not is_allowed(arguments[0], allowed):
            raise PermissionError(errno.EACCES, f"airlift keeps this process offline: {event} {arguments[0]!r}")

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
