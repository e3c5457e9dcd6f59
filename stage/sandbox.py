"""Child processes that import only our modules, and a sandbox without a network.

The sandbox is for work on files from somewhere else, which must not send anything: load tests,
pickles, data preparation. It holds for the process and its children, needs no privilege, and cannot
be left.

`python -m stage...` imports from the current folder first, and each Python from PYTHONPATH and
`~/.local`. There a `json.py` or a folder `stage/` would be imported in place of ours. `isolated`
prevents this, also before Python 3.11 (`PYTHONSAFEPATH`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from stage.errors import IncompleteError, says_no_memory

_ROOT = str(Path(__file__).resolve().parents[1])


def isolated(module: str, *arguments: str) -> list[str]:
    """The command that runs a module by this interpreter, in isolated mode (python(1), `-I`).

    It imports from the folders of this process, but never from the current folder, and from
    Python's own library first.
    """
    # `-I` ignores the user's PYTHONUTF8 and PYTHONDONTWRITEBYTECODE.
    options = []
    if sys.flags.utf8_mode:
        options += ["-X", "utf8"]
    if sys.dont_write_bytecode:
        options.append("-B")
    folders = _import_folders()
    start = (
        f"import sys; sys.path[:] = {folders!a}; "
        f"import runpy; runpy.run_module({module!a}, None, '__main__', True)"
    )
    return [sys.executable, "-I", *options, "-c", start, *arguments]


def _import_folders() -> list[str]:
    """The folders from which `isolated` imports, in order."""
    here = _current_folder()
    paths = sysconfig.get_paths()
    own = {
        paths["stdlib"],
        paths["platstdlib"],
        *(p for p in sys.path if p.endswith("/lib-dynload")),
    }
    found = [path for path in sys.path if path in own]
    found += [_ROOT]
    found += [
        path for path in sys.path if Path(path).is_absolute() and os.path.realpath(path) != here
    ]
    return list(dict.fromkeys(found))


def _current_folder() -> str:
    try:
        return os.path.realpath(".")
    except FileNotFoundError:  # it was removed
        return ""


# Keeps libraries from using the network; set before they are imported.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ask_child(
    module: str, question: str, *arguments: str, timeout_s: float | None = None
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Runs a module of this package in an isolated process, which answers in JSON.

    Args:
        question: what it reads from its standard input.

    Returns:
        The last line that it printed, read as JSON; None: it gave no answer. And how it ended.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    done = subprocess.run(
        isolated(module, *arguments),
        input=question,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **OFFLINE},
        timeout=timeout_s,
    )
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), done
    except (ValueError, IndexError):
        return None, done


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a child that gave no answer said last."""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1]


def run_and_exit(work: Callable[[], int | None]) -> NoReturn:
    """Runs the work of a child process with py-rattler, and ends at once, with its result as the
    status.

    The end of the interpreter is skipped: py-rattler's runtime may crash it
    (pyo3-async-runtimes#40).
    """
    status = 1
    try:
        status = work() or 0
    except Exception:  # noqa: BLE001 - the parent process reads the traceback
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def check_memory(done: subprocess.CompletedProcess[str], what: str) -> None:
    """Raises if a child failed for lack of memory, not because of its input.

    Args:
        done: the child, which gave no answer.
        what: the work that could not be done.

    Raises:
        IncompleteError: the child was killed (by Linux, for lack of memory), or printed a lack of
            memory.
    """
    if done.returncode == -signal.SIGKILL or says_no_memory(done.stderr):
        raise IncompleteError(
            f"{what}: there was not enough memory.",
            "Look at `ulimit -v` and the job's memory; then run it again.",
        )


# linux/audit.h, asm/unistd.h: the architecture's number and its socket(2).
_SOCKET_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_AF_INET, _AF_INET6 = 2, 10  # bits/socket.h
_X32_BIT = 0x40000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data


def close_network() -> str | None:
    """From now on this process and its children cannot open an internet socket: `socket()` gives
    EACCES.

    Returns:
        None; or the reason why this kernel or machine has no such sandbox.
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
    """BPF steps (code, jump if true, jump if false, value): no AF_INET, AF_INET6 or other ABI."""
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
