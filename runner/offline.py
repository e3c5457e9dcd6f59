"""What keeps a process from the network.

Three fences, from soft to hard. Variables tell well-behaved libraries to stay home (set before any of them is
imported). A tripwire refuses what Python code asks of the socket module, except for peers of the job. A wall, a
seccomp filter, refuses internet sockets to everything in the process and its children, C and Rust too; it is for work
that needs no rendezvous. None needs a privilege.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

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


# linux/audit.h, asm/unistd.h: the architecture's number and its socket(2).
_SOCKET_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32_BIT = 0x40000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data


def wall() -> str | None:
    """From now on neither this process nor its children can open an internet socket; `socket()` says EACCES.

    Returns:
        None if the wall stands; else why it could not be built (this kernel, this machine).
    """
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no seccomp"
    if os.uname().machine not in _SOCKET_CALLS:
        return f"no filter for {os.uname().machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    program = _filter(*_SOCKET_CALLS[os.uname().machine])
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    fprog = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    refused = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(fprog), 0, 0
    )
    return f"the kernel refused: {os.strerror(ctypes.get_errno())}" if refused else None


def _filter(arch: int, socket_call: int) -> list[tuple[int, int, int, int]]:
    """BPF steps (code, jump if true, jump if false, value): refuse AF_INET, AF_INET6 and every foreign ABI."""
    return [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_IF_EQUAL, 0, 7, arch),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_IF_AT_LEAST, 5, 0, _X32_BIT),
        (_IF_EQUAL, 0, 3, socket_call),
        (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_IF_EQUAL, 2, 0, int(socket.AF_INET)),
        (_IF_EQUAL, 1, 0, int(socket.AF_INET6)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
