"""Runs a command for which the disk refuses large writes, as at the end of a quota.

    python refuse_writes.py ERRNO BYTES COMMAND...

A seccomp filter (seccomp(2)) gives ERRNO for each write of more than BYTES, in the command and in
all that it starts. No disk is needed for it, and no privilege.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x25, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _THIRD_ARGUMENT = 0, 4, 32
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
# machine -> AUDIT_ARCH, the numbers of write and pwrite64
CALLS = {"x86_64": (0xC000003E, 1, 18), "aarch64": (0xC00000B7, 64, 68)}


def refuse(number: int, above: int) -> None:
    """Refuses large writes of this process, and of those that it starts, from now on."""
    arch, write, pwrite = CALLS[os.uname().machine]
    steps = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 0, 5, arch),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 1, 0, write),
        (_EQUAL, 0, 2, pwrite),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_ABOVE, 1, 0, above),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | number),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HxxxxxxP", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SECCOMP, _FILTER, ctypes.c_char_p(program), 0, 0
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
