"""Runs one of our functions in an isolated child process of a launcher.

The child reads a pickled `(function, arguments)` from stdin; its arguments are a file descriptor
for the answer and the launcher's process id. It answers with a pickled
`(result, StageError or None)`.
`multiprocessing` would start it as `python -c`, which imports from the current folder first: a
`struct.py` or `random.py` of the user there would replace Python's own.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from runner.from_stage import StageError, isolated, shortage
from runner.processes import die_with, die_with_parent, outlive_readers, why_ended

T = TypeVar("T")
# Seconds. A container starts, and imports torch from a slow disk, in about a minute; one that waits
# for an answer of a terminal would never end.
FOREIGN_S = 120.0
_MARK = b"\nthe answer of airlift's child:\n"
_START = "import runpy; runpy.run_module('runner.child', None, '__main__', True)"


def in_child(
    work: Callable[..., T],
    arguments: tuple[object, ...],
    purpose: str,
    remedy: str,
    python: tuple[str, ...] = (),
) -> T:
    """Calls `work(*arguments)` in a child process and waits for its answer; see `Child`.

    What it prints is shown; by the Python of a container on stderr.
    """
    return cast("T", Child(work, arguments, python, is_quick=False).answer(purpose, remedy))


class Child:
    """A call of `work(*arguments)` in a child process, which ends with this one.

    Args:
        work: a function of one of our modules; its result can be pickled.
        arguments: can be pickled.
        python: the words that start the Python of a container, in which the same airlift is; empty:
            this Python.
        is_quick: whether that of a container is ended after `FOREIGN_S`, and prints nothing.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        arguments: tuple[object, ...],
        python: tuple[str, ...] = (),
        *,
        is_quick: bool = True,
    ) -> None:
        receiver, sender = os.pipe()
        self._answer = os.fdopen(receiver, "rb")
        # The child takes a Ctrl-C only when its `main` can: Python would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            own = isolated("runner.child", str(sender), str(os.getpid()))
            self._process = subprocess.Popen(
                [*python, "-I", "-c", _START, "1", "0"] if python else own,
                stdin=subprocess.PIPE,
                stdout=sender if python else None,  # containers close other pipes
                stderr=subprocess.DEVNULL if python and is_quick else None,
                pass_fds=[sender],
                start_new_session=bool(python),
                preexec_fn=die_with_parent() if python else None,  # ours does it itself
            )
        finally:
            os.close(sender)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._end = threading.Timer(FOREIGN_S, os.killpg, (self._process.pid, signal.SIGKILL))
        self._end.daemon = True
        if python and is_quick:
            self._end.start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as question:
            question.write(pickle.dumps((work, arguments)))

    def answer(self, purpose: str, remedy: str) -> Any:
        """Waits for the end of the child.

        Args:
            purpose: its purpose, for the message if it is killed: "preparing the data".
            remedy: the advice in that message.

        Returns:
            What `work` returned.

        Raises:
            StageError: `work` raised it, or the child was killed.
        """
        with self._answer as answer:
            answered = answer.read().partition(_MARK)[2]  # a container may print before
        code = self._process.wait()
        self._end.cancel()
        if code != 0 or not answered:
            # Linux kills a process that uses too much memory; exit code 1 would blame the data.
            why = why_ended(code)
            is_limit = "ulimit" in why
            raise StageError(
                f"{purpose} ended with {code} (see above; -9 is often too little memory).",
                f"{why[0].upper()}{why[1:]}." if is_limit else remedy,
                exit_code=5 if code < 0 else 1,
            )
        result, problem = pickle.loads(answered)
        if problem is not None:
            raise problem
        return result


def main() -> None:
    """The child: reads the function, calls it and writes the answer.

    The launcher reports a Ctrl-C, which reaches both.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        _work()
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _work() -> None:
    answer, launcher = map(int, sys.argv[1:])
    if launcher:
        die_with(launcher)
    if answer == 1:
        answer = os.dup(1)
        os.dup2(2, 1)
    outlive_readers()
    work, arguments = pickle.load(sys.stdin.buffer)
    outcome = _call(work, arguments)
    with open(answer, "wb") as file:
        file.write(_MARK)
        pickle.dump(outcome, file)


def _call(work: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[Any, StageError | None]:
    try:
        return work(*arguments), None
    except StageError as error:
        return None, error
    except Exception as error:
        if fault := shortage(error):
            return None, fault
        raise


def runner_command(*arguments: str, prefix: Path | None = None) -> list[str]:
    """The command for `runner ARGUMENTS`, by its script: no folder named `runner` can shadow it.

    Args:
        prefix: the environment to activate and use. None: this interpreter.
    """
    if prefix is not None:
        activated = ["sh", "-c", '. "$0"; exec "$@"', str(prefix / "activate")]
        programs = [str(prefix / "bin" / name) for name in ("python", "runner")]
        return [*activated, *programs, *arguments]
    script = Path(sys.executable).parent / "runner"
    if script.is_file():
        return [sys.executable, str(script), *arguments]
    python, *options = isolated("runner", *arguments)
    return [python, "-u", *options]  # `-I` ignores PYTHONUNBUFFERED


if __name__ == "__main__":
    main()
