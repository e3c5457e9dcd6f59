"""Sends the answers of an embedded Hub over HTTP/1.1, with faults; `loopback_hub` decides on them.

request -> log -> fault -> `route()` of a subclass -> status, headers and body. A body is sent in
small pieces where a fault cuts, stalls or damages it at an exact byte. Else the kernel sends it
from file to socket, so that a benchmark measures the client.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from scripts.lib.hub.faults import Exchange, Fault, Faults, RequestLog

CHUNK = 1 << 16
SENT_AT_ONCE = 8 << 20  # by the kernel; the log is updated after each


class HubError(Exception):
    """An answer that is an error; huggingface_hub reads its code and headers."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = headers


class Listener(ThreadingHTTPServer):
    """One port. `side` is "hub" or "cdn". With a TLS context it speaks https."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[Answerer],
        side: str,
        faults: Faults,
        log: RequestLog,
        tls: ssl.SSLContext | None = None,
    ):
        self.side, self.faults, self.log = side, faults, log
        self.stopping = threading.Event()
        super().__init__(address, handler)
        if tls:  # the handshake is left to the thread of the connection: a client may be slow
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: tests make clients that disconnect."""


class Answerer(BaseHTTPRequestHandler):
    """Answers one connection. Subclasses define `route`, and `file_name` (the file of a URL)."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def route(self) -> None:
        raise NotImplementedError

    def file_name(self) -> str | None:
        raise NotImplementedError

    def user(self, token: str) -> str | None:
        """The user of a token."""
        return None

    @property
    def listener(self) -> Listener:
        return cast(Listener, self.server)

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.raw_path = url.path
        self.segments = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        self.query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
        self.request_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        authorization = self.headers.get("Authorization")
        self.exchange = Exchange(
            side=self.listener.side,
            method=self.command,
            path=urllib.parse.unquote(url.path),
            file=self.file_name(),
            range=self.headers.get("Range"),
            token=authorization is not None,
            user=self.user(authorization.partition(" ")[2]) if authorization else None,
            at=time.time(),
        )
        self.listener.log.begin(self.exchange)
        names = [name for name in (self.exchange.path, self.exchange.file) if name]
        self.fault = self.listener.faults.match(self.listener.side, self.command, names)
        try:
            self._answer(self.fault)
        except HubError as error:
            self.send_hub_error(error)
        except ConnectionError:
            self.close_connection = True
        finally:
            self.listener.log.end(self.exchange)

    do_HEAD = do_POST = do_GET

    def _answer(self, fault: Fault) -> None:
        if fault.delay_s:
            self.listener.stopping.wait(fault.delay_s)
        if fault.close:
            self._hang_up(fault.reset)
        elif fault.status is not None:
            self.send_bytes(fault.body.encode(), fault.headers, fault.status)
        else:
            self.route()

    def send_hub_error(self, error: HubError) -> None:
        headers = {"X-Error-Message": error.message, **error.headers}
        if error.code:
            headers["X-Error-Code"] = error.code
        self.send_json({"error": error.message}, headers, error.status)

    def send_json(
        self, value: object, headers: Mapping[str, str] | None = None, status: int = 200
    ) -> None:
        typed = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        self.send_bytes(json.dumps(value).encode(), typed, status)

    def send_bytes(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self._send(status, headers, io.BytesIO(body), 0, len(body))

    def send_file(self, path: Path, headers: Mapping[str, str]) -> None:
        """Sends the file, or the requested range."""
        size = path.stat().st_size
        if self.fault.truncate_to is not None:
            size = min(size, self.fault.truncate_to)
        with path.open("rb") as source:
            wanted = None if self.fault.ignore_range else self.headers.get("Range")
            span = _span(wanted, size) if wanted else None
            headers = {
                "Content-Type": "application/octet-stream",
                "Accept-Ranges": "bytes",
                **headers,
            }
            if span is None:
                self._send(200, headers, source, 0, size)
            elif span[0] >= size:
                self._send(416, {**headers, "Content-Range": f"bytes */{size}"}, io.BytesIO(), 0, 0)
            else:
                first, last = span
                headers["Content-Range"] = f"bytes {first}-{last}/{size}"
                self._send(206, headers, source, first, last - first + 1)

    def _send(
        self, status: int, headers: Mapping[str, str], source: Any, start: int, length: int
    ) -> None:
        self.exchange.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if (
            isinstance(source, io.BytesIO)
            or isinstance(self.connection, ssl.SSLSocket)  # the kernel does not encrypt
            or self.fault.touches_the_body
        ):
            self._stream(source, start, length)
        else:
            self._send_by_kernel(source.fileno(), start, length)

    def _send_by_kernel(self, source: int, start: int, length: int) -> None:
        self.wfile.flush()
        sent = 0
        while sent < length:
            count = os.sendfile(
                self.connection.fileno(), source, start + sent, min(SENT_AT_ONCE, length - sent)
            )
            if not count:  # the file shrank
                self.close_connection = True
                return
            sent += count
            self.exchange.sent = sent

    def _stream(self, source: Any, start: int, length: int) -> None:
        fault, sent = self.fault, 0
        source.seek(start)
        while sent < length:
            if fault.drop_after is not None and sent >= fault.drop_after:
                return self._hang_up(fault.reset)
            if fault.stall_after is not None and sent == fault.stall_after:
                self.listener.stopping.wait(fault.stall_s)
            # A piece ends exactly where a fault begins
            edges = [
                edge - sent
                for edge in (fault.drop_after, fault.stall_after)
                if edge is not None and edge > sent
            ]
            chunk = bytearray(source.read(min([CHUNK, length - sent, *edges])))
            if fault.corrupt_at is not None and 0 <= fault.corrupt_at - start - sent < len(chunk):
                chunk[fault.corrupt_at - start - sent] ^= 1
            began = time.monotonic()
            self.wfile.write(chunk)
            sent += len(chunk)
            self.exchange.sent = sent
            if fault.rate_mbps:
                pause = len(chunk) / (fault.rate_mbps * 1e6) - (time.monotonic() - began)
                self.listener.stopping.wait(max(0.0, pause))
        return None

    def _hang_up(self, reset: bool) -> None:
        self.close_connection = True
        if reset:  # closing without waiting for what is under way sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr: the request log has it."""


def _span(header: str, size: int) -> tuple[int, int] | None:
    """First and last byte of `bytes=a-b`, `bytes=a-` or `bytes=-n`; None for anything else."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not match or match[0] == "bytes=-":
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size - 1
    return int(match[1]), min(int(match[2] or size - 1), size - 1)
