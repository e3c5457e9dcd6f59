"""Processes that share out numbered pieces of work and send back what they find, piece by piece.

Forked, so that they know everything the parent knew and cost a millisecond; processes, because threads that hash small
files hand the interpreter's lock to and fro for longer than they hash. The numbers of the pieces wait in one pipe for
whoever is free; messages, each shorter than what a pipe takes in one go, come back through another. A worker ends when
no number is left, when its parent ends it, or when nobody listens any more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from stage.errors import IncompleteError

Message = list[Any]  # short, and made of what JSON has
Send = Callable[[Message], None]
_NUMBER = struct.Struct("=H")
MOST_PIECES = 4096 // _NUMBER.size  # a pipe of one page is the least there is (Linux, of a user who has many)


class Workers:
    """Runs `work(number, send)` for every number below `count` in `processes` processes; in this one if that is one.

    A context manager: work begins on entering, and has ended on leaving, be it done or not.

    Args:
        joins: this process is one of them as soon as it listens: until then it has other things to do.
    """

    def __init__(self, work: Callable[[int, Send], None], count: int, processes: int, *, joins: bool = False) -> None:
        assert count <= MOST_PIECES, "writing their numbers would wait for workers that wait to be listened to"
        self._work = work
        self._count = count
        self._processes = min(processes, count)
        self._joins = joins
        self._children: list[int] = []
        self._numbers = self._results = -1

    def __enter__(self) -> Workers:
        if self._processes > 1:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in (self._numbers, self._results):
            if descriptor >= 0:
                os.close(descriptor)
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def messages(self) -> Iterator[Message]:
        """What the workers send, until all is done. To be read to its end, once.

        Raises:
            IncompleteError: a worker ended before its work was done.
        """
        if self._processes <= 1:
            for number in range(self._count):
                yield from self._done_here(number)
            return
        done = 0
        while self._joins and (mine := os.read(self._numbers, _NUMBER.size)):
            yield from self._done_here(_NUMBER.unpack(mine)[0])
            done += 1
        with open(self._results, "rb", closefd=False) as lines:
            for line in lines:
                message = json.loads(line)
                if message is None:
                    done += 1
                else:
                    yield message
        if done != self._count:
            raise IncompleteError(
                f"Of {self._processes} processes that read, one ended before its work was done (killed? no memory?).",
                "Run the same command again, with fewer --jobs if memory is short.",
            )

    def _done_here(self, number: int) -> list[Message]:
        sent: list[Message] = []
        self._work(number, sent.append)
        return sent

    def _start(self) -> None:
        self._numbers, numbers_in = os.pipe()
        self._results, results_in = os.pipe()
        for _ in range(self._processes - self._joins):
            try:
                child = os.fork()
            except OSError:  # the user may have no more processes: those there are do it all, or this one
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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the parent to talk about
        try:
            while number := os.read(self._numbers, _NUMBER.size):
                self._work(_NUMBER.unpack(number)[0], lambda message: _send(results, message))
                _send(results, None)
        except BrokenPipeError:
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(0)


def cores() -> int:
    """Cores this process may use: on a shared node that is fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _send(results: int, message: Message | None) -> None:
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF, "longer messages of several processes would run into each other"
    os.write(results, line)
