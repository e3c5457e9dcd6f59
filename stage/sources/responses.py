"""What a server answers to a download: the bytes asked for, another place to ask, `Again`, or an error in words."""

from __future__ import annotations

import re
from urllib.parse import unquote, urljoin, urlsplit

import urllib3

from stage.errors import DamageError, IncompleteError, PolicyError
from stage.names import problem_with_address
from stage.sources.http import origin_of
from stage.sources.retry import RETRIED_STATUS, asked_delay
from stage.sources.wanted import Download

SHORT_BODY = 1 << 16
NOBODY_THERE = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)


class Again(Exception):
    """This attempt failed; another may not."""

    def __init__(self, problem: str, asked_s: float | None = None, *, unreached: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.asked_s, self.unreached = problem, asked_s, unreached


def followed(download: Download, url: str, location: str) -> str:
    """Where a redirect leads. A space or a byte above 127 in it is written as an address has it, as curl does.

    Raises:
        PolicyError: to no address of the web (`file:///etc/passwd`).
    """
    location = re.sub("[ \x80-\xff]", lambda found: f"%{ord(found[0]):02X}", location.strip())
    try:
        url = urljoin(url, location)
        problem = problem_with_address(url)
    except ValueError as error:
        url, problem = location, str(error).lower()
    if problem is None:
        return url
    raise PolicyError(
        f"{download.what}: the server sends us on to {url.partition('?')[0][:200]}, where nobody can ask: {problem}.",
        "Something is wrong with that server, or in between: try another --endpoint or network.",
    )


def discard(response: urllib3.BaseHTTPResponse) -> None:
    """Gives the connection back for the next request, which an unread body would break; a long one isn't worth it."""
    length = _number(response.headers.get("Content-Length"))
    if length is not None and length <= SHORT_BODY:
        response.drain_conn()
        response.release_conn()
    else:
        response.close()


def raise_for_status(download: Download, response: urllib3.BaseHTTPResponse, at_home: bool) -> None:
    """An answer that is neither bytes nor another place to ask.

    Args:
        at_home: whether it comes from the origin that the download named: what that refuses, it refuses for good.

    Raises:
        StageError: there is no use in asking again.
        Again: there may be.
    """
    status = response.status
    if status in RETRIED_STATUS:
        raise Again(f"HTTP {status}", asked_delay(response.headers))
    if at_home and status != 416:
        raise download.refused(status, response.headers.get("X-Error-Code"))
    if status in (404, 410):
        raise IncompleteError(
            f"{download.what}: HTTP {status}: the storage server that {origin_of(download.url)[1]} sends us to has not "
            "got it.",
            "The file is listed and not there: try later, another --endpoint, or another revision.",
        )
    raise Again(f"HTTP {status} from the CDN (an expired address, mostly)")


def is_unpacked(download: Download, response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the body is to be unpacked on its way. A `.gz` that a server calls gzip-encoded is that file as it lies
    there (Apache's AddEncoding, objects of cloud stores): its bytes are those that were asked for.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    is_gzip_file = unquote(urlsplit(download.url).path).lower().endswith((".gz", ".tgz"))
    return encoding not in ("", "identity") and not (encoding in ("gzip", "x-gzip") and is_gzip_file)


def announced(download: Download, response: urllib3.BaseHTTPResponse) -> tuple[int | None, str | None]:
    """Size and version (an `If-Range` value: RFC 9110, 13.1.5) of what a response is about to send."""
    length = _number(response.headers.get("Content-Length"))
    etag = response.headers.get("ETag", "")
    version = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    return (None if is_unpacked(download, response) else length), version


def check_span(download: Download, response: urllib3.BaseHTTPResponse, offset: int) -> None:
    """The answer must be the bytes asked for, of a file of the size announced.

    Raises:
        Again: it is not.
        DamageError: the file at a pinned address has another size than the one that was pinned.
        IncompleteError: nobody could tell.
    """
    if response.status == 206:
        span = re.fullmatch(
            r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", response.headers.get("Content-Range", "")
        )
        if not span or int(span[1]) != offset:
            raise Again("an answer to another Range than the one asked for")
        total = span[3]
    else:
        length, _ = announced(download, response)
        total = "*" if length is None else str(length)
    if download.size is None:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if not (chunked or download.evidence or total != "*"):
            raise IncompleteError(
                f"{download.what}: the server says neither how long the file is nor where it ends.",
                "Give its `sha256` in the manifest, so that a torn download can be told from a whole one.",
            )
    elif total not in ("*", str(download.size)):
        if download.pin and download.evidence:  # as for another digest: asking again brings the same file
            raise refused(download, f"it has {int(total):,} bytes, not {download.size:,}")
        says = f"{download.size} were announced" if download.pin else f"the listing says {download.size}"
        raise Again(f"the server has {total} bytes, {says}")


def refused(download: Download, problem: str) -> DamageError:
    """What to say of bytes that are not the ones that were locked."""
    return DamageError(
        f"{download.what}: refused: {problem}. Nothing of it was kept.",
        download.pin
        or "The source changed it, or something between it and here did (proxy, mirror): if the change is meant, "
        "--update it (and its sha256 in the manifest); else try another --endpoint or network.",
    )


def _number(text: str | None) -> int | None:
    """A length as a header states it; None where it states none."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def untrusted(what: str, error: Exception) -> IncompleteError:
    """What to say of a certificate that nobody we trust vouches for: trying again would not help."""
    return IncompleteError(
        f"{what}: no trusted TLS connection: {error}.",
        "Behind a proxy that opens TLS, set SSL_CERT_FILE to its CA certificate.",
    )


def in_words(error: urllib3.exceptions.HTTPError) -> str:
    """Why there is no answer, or half of one."""
    match error:
        case urllib3.exceptions.NameResolutionError():
            return (
                f"cannot resolve the host name {error.conn.host}"
                if hasattr(error, "conn")
                else "cannot resolve the host"
            )
        case urllib3.exceptions.ProxyError() if isinstance(error.original_error, NOBODY_THERE):
            return f"cannot connect to the proxy{_address(error.original_error)} that the environment names"
        case urllib3.exceptions.ProxyError():
            return f"the proxy: {error.original_error}"
        case urllib3.exceptions.NewConnectionError():
            return f"cannot connect to{address}" if (address := _address(error)) else "cannot connect"
        case urllib3.exceptions.TimeoutError():
            return "no bytes for a while"
    return "the connection broke"


def _address(error: Exception) -> str:
    """` host:port` of a connection that was not made, if the error knows it."""
    connection = getattr(error, "conn", None)
    return f" {connection.host}:{connection.port}" if connection is not None else ""
