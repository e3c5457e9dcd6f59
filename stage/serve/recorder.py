"""A Hub and a proxy on loopback for one script: passes on each request and records it.

The script's Hub (`HF_ENDPOINT`) is this server, which asks the real one. Redirects to another host
(the CDN) are passed on, so large files do not come through here. As the script's HTTP proxy it sees
the addresses of plain http, and of https only the hosts, because https is encrypted end to end.
"""

from __future__ import annotations

import select
import socket
import threading
from typing import cast
from urllib.parse import urlsplit

import urllib3

from stage.download.http import Connections, origin_of, proxy_for
from stage.serve.address import Address
from stage.serve.record import Exchange
from stage.serve.server import HubHandler, HubServer

# RFC 9110, 7.6.1; `Host` is that of the other connection.
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"),
        *("proxy-connection", "proxy-authorization", "proxy-authenticate"),
    )
)
_PIECE = 64 * 1024


class Recorder(HubServer):
    """The server; a context manager that serves from a thread.

    Args:
        endpoint: the real Hub.

    Attributes:
        exchanges: requests to the Hub, in order.
        addresses: plain http addresses that answered, in order.
        hosts: `host:port` asked for over https, in order.
        passed_on: hosts that the Hub redirected to.
    """

    def __init__(self, endpoint: str, connections: Connections) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint, self.connections = endpoint.rstrip("/"), connections
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.exchanges: list[Exchange] = []
        self.addresses: dict[str, None] = {}
        self.hosts: dict[str, None] = {}
        self.passed_on: set[str] = set()

    def __enter__(self) -> Recorder:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def other_hosts(self) -> list[str]:
        """Hosts that the script itself asked for over https."""
        own = {urlsplit(self.endpoint).hostname, *self.passed_on}
        return [host for host in self.hosts if host.rpartition(":")[0] not in own]


class _Handler(HubHandler):
    @property
    def recorder(self) -> Recorder:
        return cast(Recorder, self.server)

    def do_GET(self) -> None:
        is_proxied = self.path.startswith("http://")
        url = self.path if is_proxied else self.recorder.endpoint + self.path
        size = self.headers.get("Content-Length", "0")
        body = self.rfile.read(int(size)) if size.isdecimal() else b""
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        try:
            response = self.recorder.connections.request(self.command, url, kept, body)
        except urllib3.exceptions.HTTPError as error:
            return self._refuse(502, f"stage trace: {url}: {error}")
        with response:
            if is_proxied:
                if response.status < 400:
                    self.recorder.addresses[url] = None
            else:
                self._record(response)
            return self._pass_on(response)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _record(self, response: urllib3.BaseHTTPResponse) -> None:
        location = response.headers.get("Location")
        if location and urlsplit(location).hostname:
            if origin_of(location) == origin_of(self.recorder.endpoint):
                location = location.replace(self.recorder.endpoint, "", 1)
            else:
                self.recorder.passed_on.add(urlsplit(location).hostname or "")
                location = None
        commit = response.headers.get("X-Repo-Commit")
        self.recorder.exchanges.append(Exchange(self.path, response.status, commit, location))

    def _pass_on(self, response: urllib3.BaseHTTPResponse) -> None:
        self.send_response_only(response.status)
        for name, value in response.headers.items():
            if name.lower() in ("location", "link"):
                value = value.replace(self.recorder.endpoint, self.recorder.address)
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if _is_unknown_repository(self.path, response):
            self.send_header("X-Error-Code", "RepoNotFound")
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        if has_body and "Content-Length" not in response.headers:
            self.send_header("Connection", "close")  # its end is the end of the body
            self.close_connection = True
        self.end_headers()
        if has_body:
            try:
                for piece in response.stream(_PIECE, decode_content=False):
                    self.wfile.write(piece)
            except (urllib3.exceptions.HTTPError, ConnectionError):
                self.close_connection = True  # the client sees that the body is too short

    def _refuse(self, status: int, message: str) -> None:
        body = f"{message}\n".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        self.recorder.hosts[self.path] = None
        self.close_connection = True
        try:
            other = _connected(host, int(port))
        except (OSError, ValueError) as error:
            return self._refuse(502, f"stage trace: {self.path}: {error}")
        with other:
            self.send_response_only(200)
            self.end_headers()
            _join(self.connection, other)
        return None


def _is_unknown_repository(path: str, response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the answer is the Hub's for a repository that does not exist, to a client without
    a token: 401 without a code. huggingface_hub recognises that on https only.
    """
    return (
        response.status == 401
        and "X-Error-Code" not in response.headers
        and "Invalid credentials" not in response.headers.get("X-Error-Message", "")
        and Address.parse(path) is not None
    )


def _connected(host: str, port: int) -> socket.socket:
    """A connection to a host, through the proxy that the environment names.

    Raises:
        OSError: no connection.
    """
    proxy = proxy_for(f"https://{host}:{port}")
    if proxy is None:
        return socket.create_connection((host.strip("[]"), port), timeout=30)
    manager = urllib3.ProxyManager(proxy)
    headers = urllib3.make_headers(
        proxy_basic_auth=urlsplit(proxy).netloc.rpartition("@")[0] or None
    )
    where = manager.proxy
    assert where is not None
    other = socket.create_connection((where.host or "", where.port or 80), timeout=30)
    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    other.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"))
    answer = b""
    while b"\r\n\r\n" not in answer and (piece := other.recv(1)):
        answer += piece
    if b" 200" not in answer.split(b"\r\n")[0]:
        other.close()
        raise OSError(f"the proxy answers {answer.splitlines()[:1]!r}")
    return other


def _join(one: socket.socket, other: socket.socket) -> None:
    """Copies bytes both ways until one side ends."""
    while True:
        ready, _, _ = select.select([one, other], [], [], 300)
        if not ready:
            return
        for source in ready:
            try:
                piece = source.recv(_PIECE)
                (other if source is one else one).sendall(piece)
            except OSError:
                return
            if not piece:
                return
