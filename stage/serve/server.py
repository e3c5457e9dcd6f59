"""The HTTP/1.1 server, with byte ranges. It writes no file and has no logins."""

from __future__ import annotations

import errno
import re
import socket
import socketserver
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from os import SEEK_END
from typing import IO, Any, cast
from urllib.parse import urlsplit

from stage.errors import UsageError
from stage.files import open_inside
from stage.serve import hub_api
from stage.serve.catalogue import Catalogue
from stage.serve.hub_api import Answer, FileBody, Request, error_answer

LARGEST_BODY = 2**20  # bytes; clients post lists of paths
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class HubServer(ThreadingHTTPServer):
    """A server for the clients of a Hub, which may come in great numbers and leave at any time."""

    daemon_threads = True
    request_queue_size = 1024  # ranks of a whole node may connect at the same time

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client may close its connection at any time."""


class HubHandler(BaseHTTPRequestHandler):
    """Keeps connections open, prints nothing per request, and sends answers, whole or in part."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def send(self, answer: Answer) -> None:
        """Sends an answer, or the bytes of it that were asked for."""
        body = answer.body
        if isinstance(body, bytes):
            return self._send_from(BytesIO(body), len(body), answer)
        try:  # only an error before the first byte can become an answer
            file = open_inside(body.root, body.path)
        except FileNotFoundError:
            return self.send(self.changed(body, "is gone"))
        except OSError as error:
            return self.send(_damaged(body, error.strerror))
        with file:
            if file.seek(0, SEEK_END) != body.size:
                return self.send(self.changed(body, "has another size"))
            return self._send_from(file, body.size, answer)

    def changed(self, body: FileBody, how: str) -> Answer:
        """The answer for a file that is not as it was at the start; 410: clients do not repeat."""
        return error_answer(
            410,
            f"the bundle changed since this script began: {body.path} {how}. Run `stage verify` "
            "on the bundle, and start again.",
        )

    def _send_from(self, file: IO[bytes], size: int, answer: Answer) -> None:
        headers, status, first, end = dict(answer.headers), answer.status, 0, size
        if status == 200:
            headers["Accept-Ranges"] = "bytes"
            # `If-Range` has the ETag of an earlier part.
            is_same = self.headers.get("If-Range", headers.get("ETag")) == headers.get("ETag")
            if self.command == "GET" and is_same and (span := _span(self.headers["Range"], size)):
                first, end = span
                status = 206 if first < size else 416
                part = f"{first}-{end - 1}" if status == 206 else "*"
                headers["Content-Range"] = f"bytes {part}/{size}"
        count = 0 if status == 416 else end - first
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(count))
        self.end_headers()
        if self.command != "HEAD" and count:
            self.wfile.flush()
            self.connection.sendfile(file, first, count)


def _damaged(body: FileBody, problem: str | None) -> Answer:
    return error_answer(500, f"{body.path}: {problem}. Run `stage verify` on the bundle.")


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of a single range (RFC 9110, 14.1.2); None: send the whole file."""
    match = _RANGE.fullmatch(header or "")
    if not match or not (match[1] or match[2]):
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size
    first, end = int(match[1]), min(int(match[2] or size - 1) + 1, size)
    return (first, end) if first < end or first >= size else None


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
            super().__init__((host, port), _BundleHandler)
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
        if host in ("0.0.0.0", "::"):  # no address for others
            host = socket.gethostname()
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def mention(self, found: Answer) -> None:
        """Prints what is missing or was chosen, the first time."""
        texts = (found.note, found.missing and f"asked for, not here: {found.missing}")
        for text in filter(None, texts):
            if text not in self._said:
                self._said.add(text)
                self._say(text)


class _BundleHandler(HubHandler):
    timeout = 60.0  # seconds a connection may idle; a client that was killed does not close it

    def do_GET(self) -> None:
        server = cast(BundleServer, self.server)
        try:
            answer = hub_api.answer(self._read_request(), server.catalogue)
            server.mention(answer)
            self.send(answer)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def changed(self, body: FileBody, how: str) -> Answer:
        """Prints it too: libraries hide what a server says."""
        answer = super().changed(body, how)
        note = answer.headers["X-Error-Message"]
        cast(BundleServer, self.server).mention(replace(answer, note=note))
        return answer

    def _read_request(self) -> Request:
        url = urlsplit(self.path)
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else 0
        body = self.rfile.read(size) if size <= LARGEST_BODY else b""
        if size > LARGEST_BODY or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the unread body would be read as the next request
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(self.command, url.path, url.query, headers, body)
