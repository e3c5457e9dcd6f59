"""A wall for ranks that must reach each other and nothing else: a network of their own.

The seccomp filter (`offline.close_network`) refuses every internet socket, so two ranks could not
meet behind it. In a new network namespace they meet over its loopback, and no route leads out, for
C++ and Rust code too. It needs no privilege where the kernel allows user namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # linux/sched.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h
_REQUEST = struct.Struct("16sh22x")  # struct ifreq
_LOOPBACK = b"lo"


def leave_network() -> str | None:
    """From now on this process and its children have a network of their own: loopback alone.

    Call it before the first thread is started.

    Returns:
        None; or the reason why this kernel or machine has no such wall.
    """
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces"
    # Tried in another process first: there is no way back from half of it.
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _enter_namespace()
        except OSError as error:
            os.write(sender, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, encoding="utf-8") as answer:
        refused = answer.read()
    os.waitpid(child, 0)
    if refused:
        return f"the kernel refused a network namespace: {refused}"
    _enter_namespace()
    return None


def _enter_namespace() -> None:
    """Enters a new network namespace, and starts its loopback.

    Raises:
        OSError: this user may not.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if user != 0 or libc.unshare(_NEW_NET):
        if libc.unshare(_NEW_USER | _NEW_NET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{user} {user} 1")
        (own / "gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _GET_FLAGS, _REQUEST.pack(_LOOPBACK, 0))
        _, flags = _REQUEST.unpack(answer)
        fcntl.ioctl(asking, _SET_FLAGS, _REQUEST.pack(_LOOPBACK, flags | _UP))
