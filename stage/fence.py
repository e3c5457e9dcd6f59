"""A wall round a process: from then on it and its children have no network, whatever runs in them.

For work on bytes from somewhere else that must not be able to send anything home: load tests, pickles, preparation.
It needs no privilege, and cannot be taken down.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

# What keeps well-behaved libraries at home; set before they are imported.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",  # nothing is imported from the folder somebody happens to be in
}


def child(module: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run a module of this package in a process meant to be walled."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", module], {**os.environ, **OFFLINE, "PYTHONPATH": path}


# linux/audit.h, asm/unistd.h: the architecture's number and its socket(2).
_SOCKET_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_AF_INET, _AF_INET6 = 2, 10  # bits/socket.h; the socket module stays out of this room
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
        (_IF_EQUAL, 2, 0, _AF_INET),
        (_IF_EQUAL, 1, 0, _AF_INET6),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
