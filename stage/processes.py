"""Worker processes that share numbered pieces of work; and SIGTERM and SIGHUP as an exception.

Workers are forked: they have the parent's data, and start in a millisecond. They are processes,
because threads that hash small files spend more time on the interpreter's lock than on hashing. A
free worker takes the next number from one pipe. It writes its messages to another; each is shorter
than `PIPE_BUF`, so that messages do not mix. A worker ends when no number is left, when its parent
ends it, or when nobody reads its messages.

By default SIGTERM (`kill`, the end of a job) and SIGHUP (a closed terminal) end a process at once:
without a message, and temporary folders and child processes remain. As an exception they do not.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from stage.errors import IncompleteError, shortage

Message = list[Any]  # short, and of JSON's types
Send = Callable[[Message], None]
_NUMBER = struct.Struct("=H")
MOST_PIECES = 4096 // _NUMBER.size  # Linux gives a user with many pipes only one page for each


class Workers:
    """Runs `work(number, send)` for each number below `count`, in `processes` processes.

    With one process, it is this one. As a context manager: the work begins on entering, and has
    ended on leaving, also if it is not done.
    """

    def __init__(self, work: Callable[[int, Send], None], count: int, processes: int) -> None:
        # More numbers would fill the pipe, while the workers wait for a reader of their messages.
        assert count <= MOST_PIECES
        self._work = work
        self._count = count
        self._processes = min(processes, count)
        self._children: list[int] = []
        self._numbers = self._results = -1

    def __enter__(self) -> Workers:
        if self._processes > 1:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in (self._numbers, self._results):
            if descriptor >= 0:
                os.close(descriptor)
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def messages(self) -> Iterator[Message]:
        """The messages of the workers, until all work is done. Read them to the end, once.

        Raises:
            IncompleteError: a worker ended before its work was done.
        """
        if self._processes <= 1:
            for number in range(self._count):
                yield from self._done_here(number)
            return
        done = 0
        with open(self._results, "rb", closefd=False) as lines:
            for line in lines:
                message = json.loads(line)
                if message is None:
                    done += 1
                else:
                    yield message
        if done != self._count:
            raise IncompleteError(
                f"Of {self._processes} processes that read, one ended before its work was done "
                "(killed? no memory?).",
                "Run the same command again, with fewer --jobs if memory is short.",
            )

    def _done_here(self, number: int) -> list[Message]:
        sent: list[Message] = []
        self._work(number, sent.append)
        return sent

    def _start(self) -> None:
        self._numbers, numbers_in = os.pipe()
        self._results, results_in = os.pipe()
        for _ in range(self._processes):
            try:
                child = os.fork()
            except OSError:  # the user's limit of processes: the ones that exist do all the work
                break
            if child == 0:
                os.close(numbers_in)
                os.close(self._results)
                self._be_a_worker(results_in)
            self._children.append(child)
        os.close(results_in)
        if not self._children:
            os.close(numbers_in)
            self._processes = 1
            return
        os.write(numbers_in, b"".join(map(_NUMBER.pack, range(self._count))))
        os.close(numbers_in)

    def _be_a_worker(self, results: int) -> None:
        """Never returns."""
        # The parent reports Ctrl-C. It is ignored already in `script &` of a script.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            while number := os.read(self._numbers, _NUMBER.size):
                self._work(_NUMBER.unpack(number)[0], lambda message: _send(results, message))
                _send(results, None)
        except BrokenPipeError:
            pass
        except Exception as error:
            if shortage(error) is None:  # the parent reports a shortage
                sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(0)


def cores() -> int:
    """Cores that this process may use: on a shared node fewer than the node has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _send(results: int, message: Message | None) -> None:
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF  # longer messages of several processes would mix
    os.write(results, line)


_AGAIN_S = 0.01
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked this process to end. It is no `Exception`, so that no handler catches it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number  # as a shell reports it


@contextmanager
def ending_signals() -> Iterator[None]:
    """Inside it, SIGTERM and SIGHUP raise `Ended` in the main thread.

    They do so once, so that a second signal does not stop the clean-up: `timeout` and Slurm signal
    a process and its group. A signal that was ignored before (`nohup`) stays ignored. A forked
    child of ours ends without a message.

    Python drops what a signal raises in a callback of its own (of a weak reference at each import,
    `__del__`): such a signal, Ctrl-C too, is delivered again.
    """
    owner, came = os.getpid(), False
    hook = sys.unraisablehook

    def deliver_again(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal came
        error = dropped.exc_value
        if not isinstance(error, KeyboardInterrupt | Ended):
            hook(dropped)
            return
        came = False
        number = error.number if isinstance(error, Ended) else signal.SIGINT
        main = threading.main_thread().ident or 0
        # Not at once: the callback has not returned.
        threading.Timer(_AGAIN_S, lambda: signal.pthread_kill(main, number)).start()

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not came:
            came = True
            raise Ended(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
    except ValueError:  # Python lets only the main thread have handlers
        ours = []
    sys.unraisablehook = deliver_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in ours if not came else ():  # the second may still be on its way
            signal.signal(number, signal.SIG_DFL)
