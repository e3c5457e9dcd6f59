"""Reads a server's answer to a download.

An answer is the bytes, a redirect, a temporary failure (`AttemptFailed`), or a `StageError`.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urljoin, urlsplit

import urllib3

from stage.download.http import origin_of
from stage.download.request import Download
from stage.download.retry import AttemptFailed, check_status
from stage.errors import DamageError, IncompleteError, PolicyError
from stage.paths import problem_with_address

SHORT_BODY = 1 << 16  # bytes; a longer body costs more to read than a new connection


def followed(download: Download, url: str, location: str) -> str:
    """The address that a redirect leads to.

    A space or a byte above 127 in it is percent-encoded, as curl does.

    Raises:
        PolicyError: it is not a web address (`file:///etc/passwd`).
    """
    location = re.sub("[ \x80-\xff]", lambda found: f"%{ord(found[0]):02X}", location.strip())
    try:
        location = urljoin(url, location)
        problem = problem_with_address(location)
    except ValueError as error:
        problem = str(error).lower()
    if problem is None:
        return location
    raise PolicyError(
        f"{download.what}: the server redirects to {location.partition('?')[0][:200]}, "
        f"which cannot be requested: {problem}.",
        "That server or a proxy is misconfigured: try another --endpoint or network.",
    )


def discard(response: urllib3.BaseHTTPResponse) -> None:
    """Returns the connection for the next request, which an unread body would break."""
    length = _length(response)
    if length is not None and length <= SHORT_BODY:
        response.drain_conn()
        response.release_conn()
    else:
        response.close()


def raise_for_status(download: Download, response: urllib3.BaseHTTPResponse, at_home: bool) -> None:
    """Raises the error of an answer that is neither bytes nor a redirect.

    Args:
        at_home: the answer comes from the download's own origin, whose refusal is final.

    Raises:
        StageError: another attempt would not help.
        AttemptFailed: it may help.
    """
    status = response.status
    check_status(status, response.headers)
    if at_home and status != 416:
        raise download.refused(status, response.headers.get("X-Error-Code"))
    if status in (404, 410):
        raise IncompleteError(
            f"{download.what}: HTTP {status}: {origin_of(download.url)[1]} redirects to a storage "
            "server that does not have the file.",
            "The file is listed but missing: try later, another --endpoint, or another revision.",
        )
    raise AttemptFailed(f"HTTP {status} from the CDN (usually an expired address)")


def is_unpacked(download: Download, response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the body must be unpacked while it is received.

    A `.gz` file that a server labels as gzip-encoded (Apache's AddEncoding, objects of cloud
    stores) is kept as it is: its compressed bytes are the file.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    is_gzip_file = unquote(urlsplit(download.url).path).lower().endswith((".gz", ".tgz"))
    return encoding not in ("", "identity") and not (
        encoding in ("gzip", "x-gzip") and is_gzip_file
    )


def announced(
    download: Download, response: urllib3.BaseHTTPResponse
) -> tuple[int | None, str | None]:
    """Size in bytes and version (an `If-Range` value: RFC 9110, 13.1.5) of a response."""
    etag = response.headers.get("ETag", "")
    version = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    return (None if is_unpacked(download, response) else _length(response)), version


def check_span(download: Download, response: urllib3.BaseHTTPResponse, offset: int) -> None:
    """Checks that a response has the requested bytes, of a file of the announced size.

    Raises:
        AttemptFailed: it does not.
        DamageError: the file at a pinned address has another size than the pin.
        IncompleteError: the response does not say where the file ends.
    """
    total, _ = announced(download, response)
    if response.status == 206:
        span = re.fullmatch(
            r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:([0-9]{1,18})|\*)",
            response.headers.get("Content-Range", ""),
        )
        if not span or int(span[1]) != offset:
            raise AttemptFailed("an answer to another Range than the requested one")
        total = int(span[2]) if span[2] else None
    if download.size is None:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if total is None and not (chunked or download.evidence):
            raise IncompleteError(
                f"{download.what}: the server says neither how long the file is nor where it ends.",
                "Give its `sha256` in the manifest, to recognise a download that is cut.",
            )
    elif total not in (None, download.size):
        if download.pin and download.evidence:  # another attempt would fetch the same file
            raise mismatch_error(download, f"it has {total:,} bytes, not {download.size:,}")
        raise AttemptFailed(f"the server has {total} bytes, the listing says {download.size}")


def mismatch_error(download: Download, problem: str) -> DamageError:
    """The error for bytes that are not the locked ones."""
    return DamageError(
        f"{download.what}: refused: {problem}. Nothing was kept.",
        download.pin
        or "The source changed the file, or a proxy or mirror did. If the source did: --update it "
        "(and its sha256 in the manifest); else try another --endpoint or network.",
    )


def _length(response: urllib3.BaseHTTPResponse) -> int | None:
    """The length that an answer states; None where it states none."""
    text = response.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
