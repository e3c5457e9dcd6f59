"""Connections: pooled, through the proxy and with the certificates that the environment names.

The one place that opens a socket for payload bytes. Follows no redirect and retries nothing: both are decisions of
`download`.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

import truststore
import urllib3

from stage import __version__


class Connections:
    """A pool of HTTP connections.

    Args:
        read_timeout_s: how long a server may say nothing.
        at_once: connections kept to one host.
    """

    def __init__(self, *, read_timeout_s: float, at_once: int) -> None:
        self._timeout = urllib3.Timeout(connect=10.0, read=read_timeout_s)
        self._context = tls_context()
        self._at_once = at_once
        self._pools: dict[str | None, urllib3.PoolManager] = {}
        self.answered = False  # whether anybody ever did

    def get(self, url: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Sends a GET; the body is left to be streamed.

        Raises:
            urllib3.exceptions.HTTPError: no answer.
        """
        response = self._pool(url).request(
            "GET",
            url,
            headers={"User-Agent": f"airlift/{__version__}", **headers},
            preload_content=False,
            redirect=False,
            retries=False,
            timeout=self._timeout,
        )
        self.answered = True
        return response

    def _pool(self, url: str) -> urllib3.PoolManager:
        proxy = proxy_for(url)
        if proxy not in self._pools:
            self._pools[proxy] = (
                urllib3.PoolManager(maxsize=self._at_once, ssl_context=self._context)
                if proxy is None
                else _proxy_manager(proxy, self._at_once, self._context)
            )
        return self._pools[proxy]


def proxy_for(url: str) -> str | None:
    """The proxy that the environment (`https_proxy`, `no_proxy`, the system's settings on macOS) names for a URL."""
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def _proxy_manager(proxy: str, at_once: int, context: ssl.SSLContext) -> urllib3.ProxyManager:
    parts = urlsplit(proxy)
    credentials = f"{parts.username}:{parts.password or ''}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=credentials) if credentials else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=at_once, ssl_context=context)


def tls_context() -> ssl.SSLContext:
    """The operating system's trust, and the CA file that requests' and curl's users have set for their proxy."""
    context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if path := os.environ.get(variable):
            context.load_verify_locations(cafile=path)
    return context


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what a token belongs to (RFC 6454)."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def without_credentials(url: str) -> str:
    """A URL fit for a message or a file: user name, password and query are gone."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
