"""Processes that start warm: forked from one that has imported torch, not started from nothing.

The imports of a rank take ten times as long as a small training. `warm_python` returns a Python for
tests. It is the Python of the tests for every command but three: a rank of `runner`, a child of its
launcher (`runner.child`) and a module of `tests`. For these it asks a server for a fork, which runs
the same command line with the same variables, folder and files. Whoever started it sees an ordinary
child process, which passes signals on and ends as the fork ends. Tests of starts, kills and hangs
use the real Python.

There are two servers: a child that shall not import torch is a fork of one that cannot.
"""

from __future__ import annotations

import array
import contextlib
import gc
import io
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.once import once
from tests.support.warm_client import FILES, HEADER, surroundings

IMPORTS = {
    "light": (
        "transformers.models.bert.tokenization_bert",
        "transformers.models.gpt2.tokenization_gpt2",
        "runner.job.model_probe",
        "runner.launch.train",
    ),
    "torch": (
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch.utils.tensorboard",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "runner.cli.run",
        "runner.launch.train",
        "runner.training.engines.deepspeed",
        "runner.training.engines.native",
        "runner.training.setup",
    ),
}
CLIENT = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
from warm_client import client
client({python!r}, {sockets!r}, {here!r})
"""

HOOK = "TESTS_HOOK"
"""The variable with code that each fork runs first."""


class _Suite(NamedTuple):
    """The test run, before a test has changed anything. A test may be the first to need a server.

    Attributes:
        process: the one with which the servers end.
    """

    factory: pytest.TempPathFactory
    process: int
    python: str
    environ: dict[str, str]
    surroundings: list[object]


_SUITES: list[_Suite] = []


def provide(factory: pytest.TempPathFactory) -> None:
    """Called once by each worker of a test run."""
    process = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    _SUITES.append(_Suite(factory, process, sys.executable, environ, surroundings()))


def warm_python() -> str:
    """A Python that starts ranks warm. The server starts when the first one is needed."""
    return str(once(_SUITES[-1].factory, "warm", _start_server) / "bin/python")


def start_children_warm(patch: pytest.MonkeyPatch) -> None:
    """The children of launchers that run in this process start warm."""
    from runner.from_stage import isolated as real

    user, own = os.geteuid(), sys.executable

    def isolated(*words: str) -> list[str]:
        python, *rest = real(*words)
        is_own = python == own and os.geteuid() == user  # a test changes both
        return [warm_python() if is_own else python, *rest]

    patch.setattr("runner.child.isolated", isolated)


def _start_server(folder: Path) -> None:
    """Makes a virtual environment around the client, and starts the server."""
    suite = _SUITES[-1]
    (folder / "bin").mkdir()
    venv = Path(sys.prefix)
    (folder / "pyvenv.cfg").write_text((venv / "pyvenv.cfg").read_text())
    (folder / "lib").symlink_to(venv / "lib")
    client_file = folder / "bin/python"
    client_file.write_text(
        CLIENT.format(
            folder=str(Path(__file__).parent),
            python=os.path.realpath(suite.python),
            sockets=str(folder),
            here=suite.surroundings,
        )
    )
    client_file.chmod(0o755)
    # The launcher starts ranks by the script beside its Python.
    runner = (venv / "bin/runner").read_text().partition("\n")[2]
    (folder / "bin/runner").write_text(f"#!{client_file}\n{runner}")
    (folder / "bin/runner").chmod(0o755)
    for kind in IMPORTS:
        module = [suite.python, "-m", "tests.support.warm"]
        with open(folder / f"{kind}.log", "wb") as log:
            server = subprocess.Popen(
                [*module, str(folder), kind, str(suite.process)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=suite.environ,
                start_new_session=True,
            )
        (folder / f"{kind}.pid").write_text(str(server.pid))


def serve(folder: str, kind: str, suite: int) -> None:
    """Forks until process `suite` has ended."""
    from importlib import import_module

    from runner import offline
    from runner.job.installed import leave_torch_alone
    from runner.processes import is_alive

    offline.set_variables(os.environ)
    if kind == "light":
        leave_torch_alone()
    for name in IMPORTS[kind]:
        import_module(name)
    # DeepSpeed collects garbage at each start: it would look at, and so copy, all of the above.
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{kind}")
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
    size = array.array("i", range(FILES))
    head, controls, _, _ = connection.recvmsg(HEADER, socket.CMSG_SPACE(FILES * size.itemsize))
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
        for target, number in enumerate(files):
            os.dup2(number, target)
        os.closerange(len(files), 1024)
        code = _be(wish)
    finally:
        for output in (sys.stdout, sys.stderr):  # the command may have put others there
            with contextlib.suppress(OSError, ValueError):
                output.flush()
        os._exit(code)


def _be(wish: dict[str, Any]) -> int:
    """Runs the command line in this process; returns its exit code."""
    import runpy
    import traceback

    os.chdir(wish["folder"])
    for kind, limits in wish["limits"]:
        resource.setrlimit(kind, limits)
    os.environ.clear()
    os.environ.update(wish["environ"])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))
    sys.executable = wish["python"]
    how = wish["argv"][0]
    sys.argv = wish["argv"][how == "-m" :]
    if how == "-c":  # a child, which sees whether its launcher is its parent
        code = sys.argv.pop(1)
        sys.argv[1:] = [str(FILES - 1), str(os.getppid())]
        sys.modules.pop("runner.child", None)  # runpy warns of it
    elif how != "-m":
        sys.path[0] = str(Path(sys.argv[0]).parent)
    for name, number in (("stdout", 1), ("stderr", 2)):  # those of the server are other files
        binary = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(binary, encoding="utf-8", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        exec(os.environ.get(HOOK, ""), {})
        if how == "-c":
            exec(code, {"__name__": "__main__"})
        elif how == "-m":
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
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
