"""Bytes from the network to one file: over as many connections as it takes, refused if they are not the ones announced.

`partial` grows the file and hashes it on the way. What an earlier attempt left is hashed again before the rest is asked
for (a CDN's ETag says nothing about content, so there is nothing else to trust). Only bytes that match the upstream's
evidence are renamed into place.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

import urllib3

from stage.digest import PIECE, Digest, FileDigests
from stage.disk import human_size
from stage.errors import DamageError, IncompleteError, PolicyError
from stage.names import problem_with_address
from stage.progress import Reporter
from stage.sources.http import Connections, origin_of
from stage.sources.partial import Partial, partial_path
from stage.sources.rate import RateLimit
from stage.sources.retry import RETRIED_STATUS, Patience, RetryPolicy, Stopped, asked_delay
from stage.sources.streams import Broken, ByteSource

MAX_REDIRECTS = 8
SHORT_BODY = 1 << 16
_NOBODY_THERE = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
MAX_RATIO = 1000  # deflate ends at 1032:1
MAX_UNPACKED = 64 * 2**20  # bytes that may come of anything


@dataclass(frozen=True)
class Download:
    """One file to get.

    Attributes:
        what: how to call it in messages (`bert: model.safetensors`).
        url: where to ask; may redirect.
        size: bytes; None where the server does not say: then nothing can be resumed.
        evidence: digests the bytes must have; none where this download is what pins them.
        version: what a server says of this version of the file (an ETag), where there is no evidence: what is here of
            another version is not gone on with, nor is anything without evidence or version.
        redirects_expire: whether a refusal by another host means an address that expired (a CDN's), so ask again.
        token, login: sent to `url`'s own origin and to nobody else; `login` is `user:password`. Kept out of `repr`.
        refused: turns a final refusal (401, 403, 404, ...) of `url`'s own origin into the error to raise.
        source: where the bytes come from, if not by HTTP from `url`.
        pin: what to do about bytes of another digest, where the evidence is what a person or a lock says of an address
            and not what its server says of the file today; None: the server does.
    """

    what: str
    url: str
    size: int | None
    evidence: tuple[Digest, ...]
    refused: Callable[[int, str | None], Exception]
    token: str | None = None
    version: str | None = None
    redirects_expire: bool = True
    login: str | None = None
    source: ByteSource | None = None
    pin: str | None = None

    def __repr__(self) -> str:
        return f"Download({self.what!r}, {self.size})"


class Downloader:
    """Downloads files, several at once if called from several threads."""

    def __init__(
        self, connections: Connections, reporter: Reporter, policy: RetryPolicy, limit: RateLimit | None = None
    ) -> None:
        self._connections, self._reporter, self._policy = connections, reporter, policy
        self._limit = limit or RateLimit(None)
        self.stop = threading.Event()
        self.taken_over = 0  # bytes of complete files that an earlier run had brought
        self._counting = threading.Lock()

    def fetch(self, download: Download, target: Path, progress: Callable[[int], None]) -> FileDigests:
        """Gets one file into place, whatever of it is there already.

        Raises:
            DamageError: the bytes are not what the upstream says, twice, or not what was pinned; nothing is left.
            IncompleteError: the network does not let us; what came is kept for the next run.
            Stopped: `stop` was set.
        """
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(target, _identity(download))
        if not download.evidence and not download.version:
            partial.unlink(missing_ok=True)
        for last_chance in (False, True):
            digests, at_once, taken_over = self._complete(download, partial, progress)
            problem = _mismatch(download, digests)
            if problem is None:
                with self._counting:
                    self.taken_over += taken_over
                partial.replace(target)
                return digests
            partial.unlink()
            progress(-digests.size)
            if download.pin and at_once:  # TCP and TLS notice damage on the way; a pin that is out of date, nobody does
                break
            if not last_chance:
                self._reporter.warn(f"{download.what}: {problem}; fetching it once more from the start")
        raise DamageError(
            f"{download.what}: refused: {problem}. Nothing of it was kept.",
            download.pin
            or "The source changed it, or something between it and here did (proxy, mirror): if the change is meant, "
            "--update it (and its sha256 in the manifest); else try another --endpoint or network.",
        )

    def probe(self, download: Download) -> tuple[int | None, str | None]:
        """What a server says of a file before sending it: bytes, and something that changes when the file does.

        Asked by a GET whose body is not read: many servers refuse HEAD or answer it wrongly.

        Raises:
            IncompleteError: the network does not let us.
        """
        patience = Patience(self._policy, self.stop, self._reporter)
        while True:
            try:
                if download.source is not None:
                    return download.source.probe()
                with closing(self._open(download, 0)) as response:
                    return _announced(response)
            except Broken as broken:
                patience.wait(download.what, str(broken))
            except urllib3.exceptions.SSLError as error:
                raise untrusted(download.what, error) from None
            except urllib3.exceptions.HTTPError as error:
                patience.wait(download.what, _in_words(error), unreached=self._is_unreached(error))
            except _Again as again:
                patience.wait(download.what, again.problem, again.asked_s)

    def _complete(
        self, download: Download, path: Path, progress: Callable[[int], None]
    ) -> tuple[FileDigests, bool, int]:
        """Brings the partial file to its full size, over as many connections as it takes.

        Returns:
            Its digests, whether it took one connection, and how many bytes were here before.
        """
        patience = Patience(self._policy, self.stop, self._reporter)
        git = any(evidence.algorithm == "git-sha1" for evidence in download.evidence)
        with Partial(path, download.size, git, progress) as partial:
            connections = 1 if partial.size else 0
            if partial.size:
                of = f" of {human_size(download.size)}" if download.size else ""
                self._reporter.note(f"{download.what}: going on at {human_size(partial.size)}{of}")
            while not partial.is_whole:
                before, connections = partial.size, connections + 1
                try:
                    if download.source is not None:
                        self._receive_from(download.source, download, partial)
                    else:
                        self._receive(download, partial)
                except _Again as again:
                    if partial.size > before:
                        patience.progress()
                    patience.wait(download.what, again.problem, again.asked_s, unreached=again.unreached)
            return partial.finish(), connections == 1, partial.taken_over

    def _is_unreached(self, error: urllib3.exceptions.HTTPError) -> bool:
        cause = error.original_error if isinstance(error, urllib3.exceptions.ProxyError) else error
        return isinstance(cause, _NOBODY_THERE) and not self._connections.answered

    def _receive(self, download: Download, partial: Partial) -> None:
        """One request: appends what comes."""
        try:
            if download.size is None and partial.size:
                partial.restart()
            with closing(self._open(download, partial.size)) as response:
                if response.status == 200 and partial.size:
                    partial.restart()
                _check_span(download, response, partial.size)
                received = 0
                encoded = response.headers.get("Content-Encoding", "identity") != "identity"
                for chunk in response.stream(self._limit.chunk(PIECE), decode_content=encoded):
                    self._take(chunk, download, partial)
                    received += len(chunk)
                    if encoded and received > MAX_UNPACKED + MAX_RATIO * response.tell():
                        raise PolicyError(
                            f"{download.what}: what the server sends packed unpacks to over {MAX_RATIO} times its "
                            "size: a bomb.",
                            "Get it yourself, look at it, and name it with `path:`.",
                        )
        except urllib3.exceptions.SSLError as error:
            raise untrusted(download.what, error) from None
        except urllib3.exceptions.HTTPError as error:
            raise _Again(_in_words(error), unreached=self._is_unreached(error)) from None
        partial.has_ended = True
        if download.size is not None and partial.size < download.size:
            raise _Again(f"the answer ended after {partial.size} of {download.size} bytes")

    def _receive_from(self, source: ByteSource, download: Download, partial: Partial) -> None:
        """As `_receive`, from what speaks no HTTP."""
        try:
            with source.open(0 if download.size is None else partial.size, download.version) as stream:
                if stream.offset != partial.size:
                    partial.restart()
                for piece in stream.pieces:
                    self._take(piece, download, partial)
        except Broken as broken:
            if not partial.is_whole or download.size is None:
                raise _Again(str(broken)) from None
        partial.has_ended = True
        if download.size is not None and partial.size < download.size:
            raise _Again(f"the answer ended after {partial.size} of {download.size} bytes")

    def _take(self, piece: bytes, download: Download, partial: Partial) -> None:
        """Appends the next bytes, unless they are too many or nobody wants them any more; keeps to the rate."""
        if self.stop.is_set():
            raise Stopped
        if download.size is not None and partial.size + len(piece) > download.size:
            raise _Again(f"more than the {download.size} bytes announced")
        partial.append(piece)
        if delay := self._limit.delay(len(piece)):
            self.stop.wait(delay)

    def _open(self, download: Download, offset: int) -> urllib3.BaseHTTPResponse:
        """Asks for the bytes from `offset` on, following redirects; the token stays with its own origin."""
        url = download.url
        for _ in range(MAX_REDIRECTS):
            headers = {"Accept-Encoding": "identity"}
            if offset:
                headers["Range"] = f"bytes={offset}-"
                if not download.evidence and download.version:
                    headers["If-Range"] = download.version
            at_home = url == download.url or origin_of(url) == origin_of(download.url)
            if download.token and at_home:
                headers["Authorization"] = f"Bearer {download.token}"
            elif download.login and at_home:
                headers |= urllib3.make_headers(basic_auth=download.login)
            response = self._connections.get(url, headers)
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                _discard(response)
                url = _followed(download, url, location)
                continue
            if response.status in (200, 206):
                return response
            _discard(response)
            _raise_for_status(download, response, at_home or not download.redirects_expire)
        raise _Again("redirected in circles")


def _followed(download: Download, url: str, location: str) -> str:
    """Where a redirect leads.

    Raises:
        PolicyError: to no address of the web (`file:///etc/passwd`).
    """
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


def _number(text: str | None) -> int | None:
    """A length as a header states it; None where it states none."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


class _Again(Exception):
    """This attempt failed; another may not."""

    def __init__(self, problem: str, asked_s: float | None = None, *, unreached: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.asked_s, self.unreached = problem, asked_s, unreached


def untrusted(what: str, error: Exception) -> IncompleteError:
    """What to say of a certificate that nobody we trust vouches for: trying again would not help."""
    return IncompleteError(
        f"{what}: no trusted TLS connection: {error}.",
        "Behind a proxy that opens TLS, set SSL_CERT_FILE to its CA certificate.",
    )


def _discard(response: urllib3.BaseHTTPResponse) -> None:
    """Gives the connection back for the next request, which an unread body would break; a long one isn't worth it."""
    length = _number(response.headers.get("Content-Length"))
    if length is not None and length <= SHORT_BODY:
        response.drain_conn()
        response.release_conn()
    else:
        response.close()


def _raise_for_status(download: Download, response: urllib3.BaseHTTPResponse, at_home: bool) -> None:
    status = response.status
    if status in RETRIED_STATUS:
        raise _Again(f"HTTP {status}", asked_delay(response.headers))
    if at_home and status != 416:
        raise download.refused(status, response.headers.get("X-Error-Code"))
    if status in (404, 410):
        raise IncompleteError(
            f"{download.what}: HTTP {status}: the storage server that {origin_of(download.url)[1]} sends us to has not "
            "got it.",
            "The file is listed and not there: try later, another --endpoint, or another revision.",
        )
    raise _Again(f"HTTP {status} from the CDN (an expired address, mostly)")


def _announced(response: urllib3.BaseHTTPResponse) -> tuple[int | None, str | None]:
    """Size and version (an `If-Range` value: RFC 9110, 13.1.5) of what a response is about to send."""
    length = _number(response.headers.get("Content-Length"))
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    etag = response.headers.get("ETag", "")
    version = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    return (None if encoded else length), version


def _identity(download: Download) -> Digest:
    """What tells the beginning of this file from that of another version of it."""
    if download.evidence:
        return download.evidence[0]
    version = f"{download.url}\n{download.size}\n{download.version}"
    return Digest("sha256", hashlib.sha256(version.encode()).hexdigest())


def _check_span(download: Download, response: urllib3.BaseHTTPResponse, offset: int) -> None:
    """The answer must be the bytes asked for, of a file of the size announced."""
    if response.status == 206:
        span = re.fullmatch(
            r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", response.headers.get("Content-Range", "")
        )
        if not span or int(span[1]) != offset:
            raise _Again("an answer to another Range than the one asked for")
        total = span[3]
    else:
        encoded = response.headers.get("Content-Encoding", "identity") != "identity"
        length = None if encoded else _number(response.headers.get("Content-Length"))
        total = "*" if length is None else str(length)
    if download.size is None:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if not (chunked or download.evidence or total != "*"):
            raise IncompleteError(
                f"{download.what}: the server says neither how long the file is nor where it ends.",
                "Give its `sha256` in the manifest, so that a torn download can be told from a whole one.",
            )
    elif total not in ("*", str(download.size)):
        raise _Again(f"the server has {total} bytes, the listing says {download.size}")


def _mismatch(download: Download, digests: FileDigests) -> str | None:
    for evidence in download.evidence:
        if not digests.matches(evidence):
            said = "pinned" if download.pin else "announced"
            return f"its {evidence.algorithm} is {digests.found(evidence.algorithm)}, not {evidence.value} as {said}"
    return None


def _address(error: Exception) -> str:
    """` host:port` of a connection that was not made, if the error knows it."""
    connection = getattr(error, "conn", None)
    return f" {connection.host}:{connection.port}" if connection is not None else ""


def _in_words(error: urllib3.exceptions.HTTPError) -> str:
    match error:
        case urllib3.exceptions.NameResolutionError():
            return (
                f"cannot resolve the host name {error.conn.host}"
                if hasattr(error, "conn")
                else "cannot resolve the host"
            )
        case urllib3.exceptions.ProxyError() if isinstance(error.original_error, _NOBODY_THERE):
            return f"cannot connect to the proxy{_address(error.original_error)} that the environment names"
        case urllib3.exceptions.ProxyError():
            return f"the proxy: {error.original_error}"
        case urllib3.exceptions.NewConnectionError():
            return f"cannot connect to{address}" if (address := _address(error)) else "cannot connect"
        case urllib3.exceptions.TimeoutError():
            return "no bytes for a while"
    return "the connection broke"
