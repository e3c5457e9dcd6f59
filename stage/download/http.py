"""Pooled connections, with the proxy and the certificates that the environment names.

Only this module opens a socket for payload bytes. It follows no redirect and retries nothing:
`downloader` decides on both.
"""

from __future__ import annotations

import base64
import os
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import truststore
import urllib3

from stage.errors import UsageError
from stage.version import __version__

# urllib3 builds this object from `retries=False` again for each request.
_NO_RETRIES = urllib3.Retry(False, redirect=False)


class Connections:
    """A pool of HTTP connections.

    Args:
        read_timeout_s: how long a server may stay silent.
        at_once: connections kept open per host.
        trust: the trusted certificates (`tls_context`).
    """

    def __init__(self, *, read_timeout_s: float, at_once: int, trust: ssl.SSLContext) -> None:
        self._timeout = urllib3.Timeout(connect=10.0, read=read_timeout_s)
        self._context = trust
        self._at_once = at_once
        self._proxies: dict[str, urllib3.ProxyManager] = {}
        self.answered = False  # whether any server ever answered
        self._by_origin: dict[
            tuple[str, str, int | None], urllib3.ProxyManager | urllib3.HTTPConnectionPool
        ] = {}

    def get(self, url: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Sends a GET; the caller streams the body.

        Raises:
            urllib3.exceptions.HTTPError: no answer.
            UsageError: the environment names a proxy that cannot be used.
        """
        return self.request("GET", url, {"User-Agent": f"airlift/{__version__}", **headers})

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> urllib3.BaseHTTPResponse:
        """Sends a request; the caller streams the body of the answer.

        Raises:
            urllib3.exceptions.HTTPError, UsageError: as for `get`.
        """
        pool = self._pool(url)
        response = pool.urlopen(
            method,
            url if isinstance(pool, urllib3.ProxyManager) else _target(url),
            body=body or None,
            headers=headers,
            preload_content=False,
            redirect=False,
            retries=_NO_RETRIES,
            timeout=self._timeout,
        )
        self.answered = True
        return response

    def _pool(self, url: str) -> urllib3.ProxyManager | urllib3.HTTPConnectionPool:
        """The pool of one origin.

        It is kept here: urllib3's manager takes a third of a small file's time to find it again.
        """
        origin = origin_of(url)
        if origin not in self._by_origin:
            proxy = proxy_for(url)
            self._by_origin[origin] = self._direct(url) if proxy is None else self._through(proxy)
        return self._by_origin[origin]

    def _direct(self, url: str) -> urllib3.HTTPConnectionPool:
        return urllib3.PoolManager(
            maxsize=self._at_once, ssl_context=self._context
        ).connection_from_url(url)

    def _through(self, proxy: str) -> urllib3.ProxyManager:
        if proxy not in self._proxies:
            self._proxies[proxy] = _proxy_manager(proxy, self._at_once, self._context)
        return self._proxies[proxy]


def _target(url: str) -> str:
    """The request target: path and query of an address (RFC 9112, 3.2.1)."""
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL; None if it names none.

    The environment is `https_proxy`, `no_proxy`, and on macOS the system's settings.

    Raises:
        UsageError: the proxy cannot be used.
    """
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies = urllib.request.getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    return _proxy_address(found) if found else None


def check_proxies() -> None:
    """Checks all proxies of the environment: huggingface_hub's client opens each of them.

    Raises:
        UsageError: one cannot be used.
    """
    proxies = urllib.request.getproxies()
    if "*" in (host.strip() for host in proxies.get("no", "").split(",")):
        return
    for scheme in ("http", "https", "all"):
        if proxy := proxies.get(scheme):
            _proxy_address(proxy)


def _proxy_address(proxy: str) -> str:
    """A proxy's address as curl reads it: without a scheme, it is an HTTP proxy."""
    address = proxy.strip() if "://" in proxy else f"http://{proxy.strip()}"
    try:
        shown = without_credentials(address)
        problem = (
            "has an unsupported scheme"
            if urlsplit(address).scheme not in ("http", "https")
            else None
        )
        problem = problem or (None if urlsplit(address).hostname else "names no host")
    except ValueError as error:
        shown, problem = address.rpartition("@")[2], f"is not an address: {str(error).lower()}"
    if problem is None:
        return address
    raise UsageError(
        f"the proxy {shown} that the environment names {problem}; "
        "it must be an HTTP proxy (http:// or https://).",
        "Set http_proxy and https_proxy to an HTTP proxy and unset all_proxy; "
        "or unset all three where no proxy is needed.",
    )


def _proxy_manager(proxy: str, at_once: int, context: ssl.SSLContext) -> urllib3.ProxyManager:
    parts = urlsplit(proxy)
    headers = None
    if parts.username:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers = {"Proxy-Authorization": f"Basic {base64.b64encode(credentials).decode()}"}
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=at_once, ssl_context=context)


def tls_context() -> ssl.SSLContext:
    """Trusts what the operating system trusts, and the CA file set for requests or curl.

    Make it once: it takes as long as the download of a hundred small files.

    Raises:
        UsageError: that file cannot be read, or has no certificates.
    """
    context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        path = os.environ.get(variable)
        if not path:
            continue
        folder = Path(path).is_dir()
        try:
            context.load_verify_locations(**{"capath" if folder else "cafile": path})
        except OSError as error:  # of ssl, too: it is one of its kinds
            raise UsageError(
                f"{variable}={path}: no certificates can be read there ({error.strerror or error})",
                f"unset {variable}; or name the file that the site gives for its proxy.",
            ) from None
    return context


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of a URL: a token belongs to them (RFC 6454)."""
    parts = urlsplit(url)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or {"http": 80, "https": 443}.get(parts.scheme),
    )


def without_credentials(url: str) -> str:
    """A URL for a message or a file: without user name, password and query."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
