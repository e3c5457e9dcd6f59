"""A small web server for tests: files in memory, ranges, and faults that a test selects."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """The files of the server, and how it behaves.

    Attributes:
        files: path (`/x.tar`) -> bytes.
        redirects: path -> address to redirect to.
        cut: for each of the next answers, the bytes of the body after which the connection breaks.
        length: `length`, `chunked`, or `none` (the end of the connection ends the file).
        validator: whether an ETag is sent.
        encodings: path -> the Content-Encoding header of its answer.
        probes: number of first requests per file whose body nobody reads; these are not cut.
        requests: (path, Range) of every request.
    """

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    cut: list[int] = field(default_factory=list)
    length: str = "length"
    validator: bool = True
    encodings: dict[str, str] = field(default_factory=dict)
    probes: int = 2
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def serve() -> Iterator[Web]:
    """Starts a server on loopback."""
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            web.requests.append((self.path, asked))
            if self.path in web.redirects:
                self._head(302, {"Location": web.redirects[self.path], "Content-Length": "0"})
                return
            if self.path not in web.files:
                self._head(404, {"Content-Length": "0", "Content-Type": "text/html"})
                return
            self._send(web.files[self.path], asked)

        def _send(self, data: bytes, asked: str | None) -> None:
            # Before the head is sent: the next request may come before the body is.
            is_probe = (
                asked is None and sum(path == self.path for path, _ in web.requests) <= web.probes
            )
            etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            headers = {"ETag": etag} if web.validator else {}
            if self.path in web.encodings:
                headers["Content-Encoding"] = web.encodings[self.path]
            span = re.fullmatch(r"bytes=(\d+)-", asked or "")
            condition = self.headers.get("If-Range")
            start = int(span[1]) if span and condition in (None, etag) else 0
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            body = data[start:]
            if web.length == "length":
                headers["Content-Length"] = str(len(body))
            elif web.length == "chunked":
                headers["Transfer-Encoding"] = "chunked"
                body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            else:
                headers["Connection"] = "close"
            self._head(206 if start else 200, headers)
            if web.cut and not is_probe:
                body = body[: web.cut.pop(0)]
                self.close_connection = True
            try:
                self.wfile.write(body)
            except OSError:  # a probe reads no body
                self.close_connection = True

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            return None  # tests close connections early

    with Quiet(("127.0.0.1", 0), Handler) as server:
        web.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()
