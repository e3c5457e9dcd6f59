"""Requests over HTTP: pooled connections, and several requests at once.

Every byte of a fetch, of metadata too, comes through `Connections`, with the proxy and the
certificates that the environment names. It follows no redirect and retries nothing: `downloader`
and `stage.hub.client` decide on both, by the one policy of `retry`. The first failure that is final
ends the others (`together`).
"""

from __future__ import annotations

import base64
import math
import os
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import truststore
import urllib3

from stage.download.retry import AttemptFailed, Stopped
from stage.errors import IncompleteError, UsageError
from stage.paths import problem_with_address

S = TypeVar("S")
T = TypeVar("T")


def together(
    work: Callable[[S], T],
    things: Iterable[S],
    at_once: int,
    stop: Callable[[], None] = lambda: None,
) -> list[T]:
    """Does `work` with each thing.

    Ctrl-C does not wait for work that is under way: a server may never answer.

    Args:
        things: in the order in which work starts.
        at_once: the number of threads.
        stop: makes work under way raise `Stopped` soon. Called on the first failure and on Ctrl-C.

    Returns:
        The results, in the order of `things`.

    Raises:
        Exception: the first failure.
        KeyboardInterrupt: all work was stopped from outside.
    """
    pool, waited = ThreadPoolExecutor(max_workers=at_once), False
    futures: list[Future[T]] = []
    try:
        futures = [pool.submit(work, thing) for thing in things]
        wait(futures, return_when=FIRST_EXCEPTION)
        waited = True
    finally:
        if not waited or any(not f.done() or f.exception() for f in futures):
            stop()
        # After Ctrl-C no thread is waited for: it may hang in a read from a server that is silent.
        pool.shutdown(wait=waited, cancel_futures=True)
    errors = [error for f in futures if not f.cancelled() and (error := f.exception())]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    if errors:
        raise KeyboardInterrupt
    return [future.result() for future in futures]


# urllib3 builds this object from `retries=False` again for each request.
_NO_RETRIES = urllib3.Retry(False, redirect=False)
_NOT_CONNECTED = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
DEFAULT_TIMEOUT_S = 10.0  # huggingface_hub's own default for a read


def timeout_s() -> float:
    """Seconds a server may stay silent: $HF_HUB_DOWNLOAD_TIMEOUT, as for huggingface_hub."""
    try:
        seconds = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", ""))
    except ValueError:
        return DEFAULT_TIMEOUT_S
    return seconds if 0 < seconds < math.inf else DEFAULT_TIMEOUT_S


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
        self._answered: set[tuple[str, str, int | None]] = set()  # origins that ever did
        self._by_origin: dict[
            tuple[str, str, int | None], urllib3.ProxyManager | urllib3.HTTPConnectionPool
        ] = {}

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> urllib3.BaseHTTPResponse:
        """Sends a request; the caller streams the body of the answer.

        Raises:
            urllib3.exceptions.HTTPError: no answer.
            UsageError: the environment names a proxy that cannot be used.
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
        self._answered.add(origin_of(url))
        return response

    @contextmanager
    def errors(self, asked: str, url: str | None = None) -> Iterator[None]:
        """Turns the errors of `request`, and of reading its answer, into ours.

        Args:
            asked: the address that was asked first.
            url: the address of this request, where `asked` redirected to it.

        Raises:
            IncompleteError: no trusted TLS connection; another attempt would not help.
            AttemptFailed: any other network error.
        """
        first, last = origin_of(asked), origin_of(url or asked)
        try:
            yield
        except urllib3.exceptions.SSLError as error:
            if "certificate" in str(error).lower():
                raise _untrusted(error) from None
            # A handshake that was cut, or one bad record: the next attempt may succeed.
            raise AttemptFailed(_describe(error), unreached=last not in self._answered) from None
        except urllib3.exceptions.HTTPError as error:
            cause = getattr(error, "original_error", error)  # of a proxy
            unreached = isinstance(cause, _NOT_CONNECTED) and last not in self._answered
            if unreached and cause is error and first != last:
                raise AttemptFailed(
                    f"{first[1]} redirects to {last[1]}: {_describe(error)}",
                    unreached=True,
                    remedy=f"A mirror must serve all files itself. Name another --endpoint than "
                    f"{first[1]}, or let this machine reach {last[1]}.",
                ) from None
            raise AttemptFailed(_describe(error), unreached=unreached) from None

    def _pool(self, url: str) -> urllib3.ProxyManager | urllib3.HTTPConnectionPool:
        """The pool of one origin.

        It is kept here: urllib3's manager takes a third of a small file's time to find it again.
        """
        origin = origin_of(url)
        if origin not in self._by_origin:
            proxy = proxy_for(url)
            if proxy is None:
                manager = urllib3.PoolManager(maxsize=self._at_once, ssl_context=self._context)
                self._by_origin[origin] = manager.connection_from_url(url)
            else:
                self._by_origin[origin] = urllib3.ProxyManager(
                    proxy,
                    proxy_headers=_login(proxy),
                    maxsize=self._at_once,
                    ssl_context=self._context,
                )
        return self._by_origin[origin]


def _target(url: str) -> str:
    """The request target: path and query of an address (RFC 9112, 3.2.1)."""
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL, as curl reads it; None if it names none.

    The environment is `https_proxy`, `no_proxy`, and on macOS the system's settings. Without a
    scheme, it is an HTTP proxy.

    Raises:
        UsageError: the proxy cannot be used.
    """
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies = urllib.request.getproxies()
    named = (proxies.get(parts.scheme) or proxies.get("all") or "").strip()
    if not named:
        return None
    proxy = named if "://" in named else f"http://{named}"
    if problem := problem_with_address(proxy):
        raise UsageError(
            f"the proxy {proxy.rpartition('@')[2]} that the environment names is not an HTTP "
            f"proxy: {problem}.",
            "Set http_proxy and https_proxy to an HTTP proxy and unset all_proxy; "
            "or unset all three where no proxy is needed.",
        )
    return proxy


def _login(proxy: str) -> dict[str, str] | None:
    parts = urlsplit(proxy)
    if not parts.username:
        return None
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(credentials).decode()}"}


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
        try:
            context.load_verify_locations(**{"capath" if Path(path).is_dir() else "cafile": path})
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


def _untrusted(error: Exception) -> IncompleteError:
    remedy = "Behind a proxy that opens TLS, set SSL_CERT_FILE to its CA certificate."
    if "not yet valid" in str(error) or "expired" in str(error):
        now = time.strftime("%F %R")
        remedy = f"Is it {now} now? Where this machine's clock is wrong, every certificate is."
    elif (file := os.environ.get("SSL_CERT_FILE")) and not Path(file).exists():
        remedy = f"SSL_CERT_FILE={file}: there is no such file. unset SSL_CERT_FILE"
    return IncompleteError(f"no trusted TLS connection: {error}.", remedy)


def _describe(error: urllib3.exceptions.HTTPError) -> str:
    """Describes why there is no answer, or only a part."""
    match error:
        case urllib3.exceptions.ProxyError(
            original_error=urllib3.exceptions.NewConnectionError(conn=proxy)
        ):
            where = f"{proxy.host}:{proxy.port}"
            return f"cannot connect to the proxy {where} that the environment names"
        case urllib3.exceptions.ProxyError():
            return f"the proxy: {error.original_error}"
        case urllib3.exceptions.NameResolutionError():
            return f"cannot resolve the host name {error.conn.host}"
        case urllib3.exceptions.NewConnectionError():
            return f"cannot connect to {error.conn.host}:{error.conn.port}"
        case urllib3.exceptions.TimeoutError():
            return "the server was silent for too long"
    return "the connection broke"
