"""A server that sends what a test wants: wrong lengths, endless bodies, redirects in circles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Body = bytes | Callable[[Any], None]


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    `Content-Length` is that of `body`, unless `headers` has another. With a function there is none.

    Attributes:
        body: the bytes, or a function that writes to the socket's file as long as it likes.
    """

    body: Body = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Liar:
    """Answers by path (without the query, unquoted). `requests`: (path, Authorization) of each."""

    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, path: str = "", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextmanager
def lying() -> Iterator[Liar]:
    """Starts one on loopback."""
    liar = Liar()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            liar.requests.append((path, self.headers.get("Authorization")))
            answer = liar.answers.get(path, Answer(b'{"error": "not here"}', 404))
            self.send_response(answer.status)
            headers = dict(answer.headers)
            if isinstance(answer.body, bytes):
                headers.setdefault("Content-Length", str(len(answer.body)))
            else:
                headers.setdefault("Connection", "close")
                self.close_connection = True
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                if isinstance(answer.body, bytes):
                    self.wfile.write(answer.body)
                else:
                    answer.body(self.wfile)
            except OSError:  # the client closed the connection
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return None

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            return None

    with Quiet(("127.0.0.1", 0), Handler) as server:
        liar.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield liar
        finally:
            server.shutdown()
            thread.join()
