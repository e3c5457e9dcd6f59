"""Connections: pooled, through the proxy and with the certificates that the environment names.

The one place that opens a socket for payload bytes. Follows no redirect and retries nothing: both are decisions of
`download`.
"""

from __future__ import annotations

import base64
import os
import ssl
import urllib.request
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import truststore
import urllib3

from stage import __version__
from stage.errors import UsageError

_NO_RETRIES = urllib3.Retry(False, redirect=False)  # what urllib3 makes of `retries=False`, for each request anew


class Connections:
    """A pool of HTTP connections.

    Args:
        read_timeout_s: how long a server may say nothing.
        at_once: connections kept to one host.
        trust: whom to trust (`tls_context`).
    """

    def __init__(self, *, read_timeout_s: float, at_once: int, trust: ssl.SSLContext) -> None:
        self._timeout = urllib3.Timeout(connect=10.0, read=read_timeout_s)
        self._context = trust
        self._at_once = at_once
        self._proxies: dict[str, urllib3.ProxyManager] = {}
        self.answered = False  # whether anybody ever did
        self._by_origin: dict[tuple[str, str, int | None], urllib3.ProxyManager | urllib3.HTTPConnectionPool] = {}

    def get(self, url: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Sends a GET; the body is left to be streamed.

        Raises:
            urllib3.exceptions.HTTPError: no answer.
            UsageError: the environment names a proxy that cannot be used.
        """
        pool = self._pool(url)
        response = pool.urlopen(
            "GET",
            url if isinstance(pool, urllib3.ProxyManager) else _target(url),
            headers={"User-Agent": f"airlift/{__version__}", **headers},
            preload_content=False,
            redirect=False,
            retries=_NO_RETRIES,
            timeout=self._timeout,
        )
        self.answered = True
        return response

    def _pool(self, url: str) -> urllib3.ProxyManager | urllib3.HTTPConnectionPool:
        """One origin's own pool, found once: a manager that looks for it each time takes a third of a small file."""
        origin = origin_of(url)
        if origin not in self._by_origin:
            proxy = proxy_for(url)
            self._by_origin[origin] = self._direct(url) if proxy is None else self._through(proxy)
        return self._by_origin[origin]

    def _direct(self, url: str) -> urllib3.HTTPConnectionPool:
        return urllib3.PoolManager(maxsize=self._at_once, ssl_context=self._context).connection_from_url(url)

    def _through(self, proxy: str) -> urllib3.ProxyManager:
        if proxy not in self._proxies:
            self._proxies[proxy] = _proxy_manager(proxy, self._at_once, self._context)
        return self._proxies[proxy]


def _target(url: str) -> str:
    """What of an address is asked of its own host (RFC 9112, 3.2.1)."""
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"


def proxy_for(url: str) -> str | None:
    """The proxy that the environment (`https_proxy`, `no_proxy`, the system's settings on macOS) names for a URL.

    Raises:
        UsageError: it is none that can be used.
    """
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies = urllib.request.getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    return _proxy_address(found) if found else None


def require_usable_proxies() -> None:
    """Whether all proxies of the environment can be used: huggingface_hub's client takes up each, asked or not.

    Raises:
        UsageError: one cannot.
    """
    proxies = urllib.request.getproxies()
    if "*" in (host.strip() for host in proxies.get("no", "").split(",")):
        return
    for scheme in ("http", "https", "all"):
        if proxy := proxies.get(scheme):
            _proxy_address(proxy)


def _proxy_address(proxy: str) -> str:
    """As curl reads it: without a scheme, it is an HTTP proxy."""
    address = proxy.strip() if "://" in proxy else f"http://{proxy.strip()}"
    try:
        shown = without_credentials(address)
        problem = "is not spoken here" if urlsplit(address).scheme not in ("http", "https") else None
        problem = problem or (None if urlsplit(address).hostname else "names no host")
    except ValueError as error:
        shown, problem = address.rpartition("@")[2], f"is no address: {str(error).lower()}"
    if problem is None:
        return address
    raise UsageError(
        f"the proxy {shown} that the environment names {problem}: an HTTP proxy (http:// or https://) is.",
        "Set http_proxy and https_proxy to one and unset all_proxy; or where none is needed, unset all three.",
    )


def _proxy_manager(proxy: str, at_once: int, context: ssl.SSLContext) -> urllib3.ProxyManager:
    parts = urlsplit(proxy)
    headers = None
    if parts.username:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers = {"Proxy-Authorization": f"Basic {base64.b64encode(credentials).decode()}"}
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=at_once, ssl_context=context)


def tls_context() -> ssl.SSLContext:
    """The operating system's trust, and the CA file that requests' and curl's users have set for their proxy.

    Reading it takes as long as downloading a hundred small files: make it once.
    """
    context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for path in {os.environ.get(variable) for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")}:
        if path:
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
