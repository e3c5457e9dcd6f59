"""The client by which huggingface_hub asks, so that no answer can hang us, fill the memory, or get another's token.

Answers are read here, whole and bounded, before anybody parses them.
"""

from __future__ import annotations

import ssl
import zlib

import httpx2
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import OfflineModeIsEnabled

from stage.sources.http import origin_of, require_usable_proxies

MAX_ANSWER = 128 * 2**20  # bytes, unpacked: the names and digests of half a million files
MAX_REQUESTS = 5_000  # for one client: pages of a thousand files
# What huggingface_hub and httpx2 raise at an answer that is none.
SENSELESS = (
    httpx2.DecodingError,
    httpx2.TooManyRedirects,
    httpx2.InvalidURL,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def guarded_client(endpoint: str, timeout_s: float, trust: ssl.SSLContext) -> httpx2.Client:
    """huggingface_hub's own client but for this: it trusts whom our downloads trust (not certifi alone), waits for
    `timeout_s` seconds and no longer, sends the token to `endpoint` alone, and takes no more than `MAX_ANSWER`.

    Raises:
        UsageError: the environment names a proxy that cannot be used.
    """
    require_usable_proxies()
    asked = 0

    def before(request: httpx2.Request) -> None:
        nonlocal asked
        if is_offline_mode():
            raise OfflineModeIsEnabled(f"Cannot reach {request.url}: offline mode is enabled.")
        asked += 1
        if asked > MAX_REQUESTS:
            raise httpx2.TooManyRedirects(f"more than {MAX_REQUESTS} requests", request=request)
        if origin_of(str(request.url)) != origin_of(endpoint):  # the next page of a listing may be anywhere
            request.headers.pop("authorization", None)

    return httpx2.Client(
        verify=trust,
        event_hooks={"request": [before], "response": [_read_bounded]},
        follow_redirects=True,
        timeout=httpx2.Timeout(timeout_s),
        headers={"Accept-Encoding": "gzip"},
    )


def _read_bounded(response: httpx2.Response) -> None:
    """Replaces the body by what it says, unpacked.

    Raises:
        httpx2.DecodingError: larger than `MAX_ANSWER`, or packed in a way that was not asked for.
    """
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise httpx2.DecodingError(f"an answer packed by {encoding[:40]!a}", request=response.request)
    unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    whole = bytearray()
    source = response.stream
    assert isinstance(source, httpx2.SyncByteStream)
    try:
        for chunk in source:
            whole += chunk if unpack is None else unpack.decompress(chunk, MAX_ANSWER + 1 - len(whole))
            if len(whole) > MAX_ANSWER:
                raise httpx2.DecodingError(f"an answer of more than {MAX_ANSWER} bytes", request=response.request)
    except zlib.error as error:
        raise httpx2.DecodingError(str(error), request=response.request) from None
    finally:
        source.close()
    response.stream = httpx2.ByteStream(bytes(whole))
