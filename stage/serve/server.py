"""The HTTP/1.1 server, with byte ranges. It writes no file and has no logins."""

from __future__ import annotations

import errno
import re
import socket
import socketserver
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from stage.errors import UsageError
from stage.files import open_inside
from stage.serve import hub
from stage.serve.answers import Answer, FileBody, Request, error_answer
from stage.serve.catalogue import Catalogue

LARGEST_BODY = 2**20  # bytes; clients post lists of paths
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class HubServer(ThreadingHTTPServer):
    """A server for the clients of a Hub, which may come in great numbers and leave at any time."""

    daemon_threads = True
    request_queue_size = 1024  # ranks of a whole node may connect at the same time

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client may close its connection at any time."""


class HubHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and prints nothing per request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


class BundleServer(HubServer):
    """Serves one catalogue.

    Args:
        say: prints what clients miss in the bundle, and which name stands for which; each once.

    Raises:
        UsageError: the port is in use, or the address is not one of this machine.
    """

    def __init__(
        self, catalogue: Catalogue, host: str, port: int, say: Callable[[str], None]
    ) -> None:
        self.catalogue, self._say = catalogue, say
        self._said: set[str] = set()
        if ":" in host:
            self.address_family = socket.AF_INET6
        if not host:  # the system would take every address
            raise UsageError("--host: the address is empty.", "--host 127.0.0.1")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}, port {port}: {error.strerror}.",
                "Try another port: --port 0 takes any free one."
                if error.errno in (errno.EADDRINUSE, errno.EACCES)
                else "--host takes an address of this machine: 127.0.0.1, or 0.0.0.0 for all.",
            ) from None

    def server_bind(self) -> None:
        """Binds. The library's own way asks DNS for this host's name, which can take seconds."""
        if self.address_family == socket.AF_INET6:  # `::` is every address, IPv4 too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def address(self) -> str:
        """The base address for clients."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def mention(self, found: Answer) -> None:
        """Prints what is missing or was chosen, the first time."""
        texts = (found.note, found.missing and f"asked for, not here: {found.missing}")
        for text in filter(None, texts):
            if text not in self._said:
                self._said.add(text)
                self._say(text)


class _Handler(HubHandler):
    timeout = 60.0  # seconds a connection may idle

    def do_GET(self) -> None:
        server = cast(BundleServer, self.server)
        try:
            found = hub.answer(self._read_request(), server.catalogue)
            server.mention(found)
            self._send(found)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def _read_request(self) -> Request:
        url = urllib.parse.urlsplit(self.path)
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else 0
        body = self.rfile.read(size) if size <= LARGEST_BODY else b""
        if size > LARGEST_BODY or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the unread body would be read as the next request
        query = urllib.parse.parse_qs(url.query)
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(self.command, url.path, query, headers, body, url.query)

    def _send(self, found: Answer) -> None:
        size = found.body.size if isinstance(found.body, FileBody) else len(found.body)
        first, last, status = 0, size - 1, found.status
        headers = dict(found.headers)
        if status == 200:
            headers["Accept-Ranges"] = "bytes"
            if span := self._span(size, headers.get("ETag")):
                first, last = span
                status = 206 if first < size else 416
                headers["Content-Range"] = (
                    f"bytes {first}-{last}/{size}" if status == 206 else f"bytes */{size}"
                )
        count = 0 if status == 416 else last - first + 1
        if isinstance(found.body, FileBody):
            return self._send_file(found.body, status, headers, first, count)
        self._send_head(status, headers, count)
        if self.command != "HEAD":
            self.wfile.write(found.body[first : first + count])
        return None

    def _span(self, size: int, etag: str | None) -> tuple[int, int] | None:
        """The bytes that were asked for; None: all. `If-Range` has the ETag of an earlier part."""
        if self.command != "GET" or self.headers.get("If-Range", etag) != etag:
            return None
        return _span(self.headers.get("Range"), size)

    def _send_file(
        self, body: FileBody, status: int, headers: dict[str, str], first: int, count: int
    ) -> None:
        try:
            file = open_inside(body.root, body.path)  # only an error here can become an answer
        except OSError as error:
            return self._send(
                error_answer(
                    500, f"{body.path}: {error.strerror}. Run `stage verify` on the bundle."
                )
            )
        with file:
            if file.seek(0, 2) != body.size:
                message = f"{body.path}: not the locked size. Run `stage verify` on the bundle."
                return self._send(error_answer(500, message))
            self._send_head(status, headers, count)
            if self.command != "HEAD" and count:
                self.wfile.flush()
                self.connection.sendfile(file, first, count)
        return None

    def _send_head(self, status: int, headers: dict[str, str], count: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(count))
        self.end_headers()


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte of a single range (RFC 9110, 14.1.2); None: send the whole file."""
    match = _RANGE.fullmatch(header or "")
    if not match or not (match[1] or match[2]):
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size - 1
    first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
    return (first, last) if first <= last or first >= size else None
