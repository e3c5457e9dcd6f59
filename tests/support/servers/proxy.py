"""A small HTTP proxy on loopback for plain requests, with a password and a log."""

from __future__ import annotations

import base64
import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

BUFFER = 1 << 16


class Proxy:
    """A running proxy. `seen`: `METHOD host:port` of accepted requests; `refused`: of others."""

    def __init__(self, password: str) -> None:
        self.seen: list[str] = []
        self.refused: list[str] = []
        self._expected = "Basic " + base64.b64encode(password.encode()).decode()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                if not self._may(self.command, parts.netloc):
                    return
                with closing(
                    socket.create_connection((parts.hostname, parts.port or 80), 10)
                ) as upstream:
                    hop = {"proxy-authorization", "proxy-connection", "connection"}
                    headers = "".join(
                        f"{k}: {v}\r\n" for k, v in self.headers.items() if k.lower() not in hop
                    )
                    target = self.path.partition(parts.netloc)[2] or "/"
                    head = f"{self.command} {target} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
                    upstream.sendall(head.encode())
                    while data := upstream.recv(BUFFER):
                        self.connection.sendall(data)
                self.close_connection = True

            do_HEAD = do_GET

            def _may(self, method: str, where: str) -> bool:
                if self.headers.get("Proxy-Authorization") != proxy._expected:
                    proxy.refused.append(f"{method} {where}")
                    self.send_response(407, "Proxy Authentication Required")
                    self.send_header("Proxy-Authenticate", 'Basic realm="proxy"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return False
                proxy.seen.append(f"{method} {where}")
                return True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
