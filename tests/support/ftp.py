"""A real FTP server for tests (pyftpdlib) on loopback, with the misbehaviour asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.filesystems import AbstractedFS
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer


@dataclass
class Ftp:
    """What the server has and how it behaves.

    Attributes:
        root: the folder it shows.
        cut: so many bytes into each of the next transfers, it fails (426).
        lacks: commands it does not know.
        commands: (command, argument) of every request.
    """

    root: Path
    port: int = 0
    cut: list[int] = field(default_factory=list)
    lacks: set[str] = field(default_factory=set)
    commands: list[tuple[str, str]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"ftp://127.0.0.1:{self.port}{path}"

    def asked(self, command: str) -> list[str]:
        return [argument for name, argument in self.commands if name == command]


class _Torn:
    """A file that cannot be read to its end."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left
        self.name = file.name

    def read(self, size: int) -> bytes:
        if self._left <= 0:
            raise OSError(5, "torn for the test")
        data: bytes = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def serve(root: Path, *, anonymous: bool = True) -> Iterator[Ftp]:
    """Starts a server on loopback."""
    ftp = Ftp(root)

    class Files(AbstractedFS):
        def open(self, filename: str, mode: str) -> Any:
            file = super().open(filename, mode)
            return _Torn(file, ftp.cut.pop(0)) if ftp.cut else file

    class Handler(FTPHandler):
        use_sendfile = False
        abstracted_fs = Files
        authorizer = DummyAuthorizer()
        auth_failed_timeout = 0

        def pre_process_command(self, line: str, cmd: str, arg: str) -> None:
            ftp.commands.append((cmd, arg))
            if cmd in ftp.lacks:
                self.respond(f"502 Command {cmd} not implemented.")
            else:
                super().pre_process_command(line, cmd, arg)

        def log(self, *_: Any, **__: Any) -> None: ...
        def logline(self, *_: Any, **__: Any) -> None: ...

    if anonymous:
        Handler.authorizer.add_anonymous(str(root))
    server = FTPServer(("127.0.0.1", 0), Handler)
    ftp.port = server.address[1]
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            server.serve_forever(timeout=0.02, blocking=False, handle_exit=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ftp
    finally:
        stop.set()
        thread.join()
        server.close_all()
