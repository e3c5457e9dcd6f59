"""Ranks that start warm: forked from one process that has imported torch, not started from nothing.

The imports of a rank take ten times as long as a small training. `warm_python` returns a Python for
tests. It is the Python of the tests for every command but two, a rank of `runner` and a module of
`tests`: for these it asks the server for a fork, which runs the same command line with the same
variables, folder and files. Whoever started it sees an ordinary child process, which passes signals
on and ends as the fork ends. Tests of starts, kills and hangs use the real Python.
"""

from __future__ import annotations

import array
import contextlib
import gc
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.once import once
from tests.support.warm_client import HEADER

IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "runner.cli.start",
    "runner.launch.train",
    "runner.training.engines.deepspeed",
    "runner.training.engines.fsdp",
    "runner.training.start",
)
CLIENT = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
from warm_client import client
client({python!r}, {socket!r})
"""


_FACTORY: list[pytest.TempPathFactory] = []


def provide(factory: pytest.TempPathFactory) -> None:
    """Called once by each worker of a test run."""
    _FACTORY.append(factory)


def warm_python() -> str:
    """A Python that starts ranks warm. The server starts when the first one is needed."""
    return str(once(_FACTORY[-1], "warm", _start_server) / "bin/python")


def _start_server(folder: Path) -> None:
    """Makes a virtual environment around the client, and starts the server."""
    (folder / "bin").mkdir()
    venv = Path(sys.prefix)
    (folder / "pyvenv.cfg").write_text((venv / "pyvenv.cfg").read_text())
    (folder / "lib").symlink_to(venv / "lib")
    client_file = folder / "bin/python"
    places = {"folder": str(Path(__file__).parent), "socket": str(folder / "socket")}
    client_file.write_text(CLIENT.format(python=os.path.realpath(sys.executable), **places))
    client_file.chmod(0o755)
    # The launcher starts ranks by the script beside its Python.
    runner = (venv / "bin/runner").read_text().partition("\n")[2]
    (folder / "bin/runner").write_text(f"#!{client_file}\n{runner}")
    (folder / "bin/runner").chmod(0o755)
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    suite = os.getppid() if in_worker else os.getpid()
    command = [sys.executable, "-m", "tests.support.warm", places["socket"], str(suite)]
    with open(folder / "server.log", "wb") as log:
        subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip


def serve(meeting: str, suite: int) -> None:
    """Forks until process `suite` has ended."""
    from importlib import import_module

    from runner import offline
    from runner.processes import is_alive

    offline.set_variables(os.environ)
    for name in IMPORTS:
        import_module(name)
    # DeepSpeed collects garbage at each start: it would look at, and so copy, all of the above.
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(meeting)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ranks: dict[int, socket.socket] = {}
    while is_alive(suite) or ranks:
        for key, _ in selector.select(timeout=0.02 if ranks else 0.5):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                pid = _fork(connection, listener)
                ranks[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            else:  # the client has ended, and sends nothing
                selector.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            connection = ranks.pop(pid)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            connection.close()


def _fork(connection: socket.socket, listener: socket.socket) -> int:
    size = array.array("i", [0, 0, 0])
    head, controls, _, _ = connection.recvmsg(HEADER, socket.CMSG_SPACE(3 * size.itemsize))
    files = array.array("i")
    files.frombytes(controls[0][2])
    stream = connection.makefile("rb")
    wish = json.loads(stream.read(int.from_bytes(head, "big")))
    pid = os.fork()
    if pid:
        for number in files:
            os.close(number)
        connection.sendall(b"%d\n" % pid)
        return pid
    code = 70
    try:
        os.setsid()
        listener.close()
        for number, target in zip(files, range(3), strict=True):
            os.dup2(number, target)
        os.closerange(3, 1024)
        code = _be(wish)
    finally:
        for stream in (sys.stdout, sys.stderr):  # the command may have put others there
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _be(wish: dict[str, Any]) -> int:
    """Runs the command line in this process; returns its exit code."""
    import runpy
    import traceback

    import torch

    os.chdir(wish["folder"])
    os.environ.clear()
    os.environ.update(wish["environ"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))
    is_module = wish["argv"][0] == "-m"
    sys.argv = wish["argv"][is_module:]
    if not is_module:
        sys.path[0] = str(Path(sys.argv[0]).parent)
    for name, number in (("stdout", 1), ("stderr", 2)):  # those of the server are other files
        binary = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(binary, encoding="utf-8", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
