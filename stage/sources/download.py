"""Bytes from the network to one file: over as many connections as it takes, refused if they are not the ones announced.

`partial` grows the file and hashes it on the way. What an earlier attempt left is hashed again before the rest is asked
for (a CDN's ETag says nothing about content, so there is nothing else to trust). Only bytes that match the upstream's
evidence are renamed into place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import urllib3

from stage.digest import PIECE, FileDigests
from stage.disk import human_size
from stage.errors import DamageError, PolicyError
from stage.progress import Reporter
from stage.sources.http import Connections, origin_of
from stage.sources.partial import Partial, partial_path
from stage.sources.rate import RateLimit
from stage.sources.responses import (
    NOBODY_THERE,
    Again,
    announced,
    check_span,
    discard,
    followed,
    in_words,
    is_unpacked,
    raise_for_status,
    refused,
    untrusted,
)
from stage.sources.retry import Patience, RetryPolicy, Stopped
from stage.sources.streams import Broken, ByteSource
from stage.sources.wanted import Download

MAX_REDIRECTS = 8
MAX_RATIO = 1000  # deflate ends at 1032:1
MAX_UNPACKED = 64 * 2**20  # bytes that may come of anything


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
        partial = partial_path(target, download.identity)
        if not download.evidence and not download.version:
            partial.unlink(missing_ok=True)
        for last_chance in (False, True):
            try:
                digests, at_once, taken_over = self._complete(download, partial, progress)
            except DamageError:
                partial.unlink(missing_ok=True)
                raise
            problem = download.mismatch(digests)
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
        raise refused(download, str(problem))

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
                    return announced(download, response)
            except Broken as broken:
                patience.wait(download.what, str(broken))
            except urllib3.exceptions.SSLError as error:
                raise untrusted(download.what, error) from None
            except urllib3.exceptions.HTTPError as error:
                patience.wait(download.what, in_words(error), unreached=self._is_unreached(error))
            except Again as again:
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
                except Again as again:
                    if partial.size > before:
                        patience.progress()
                    patience.wait(download.what, again.problem, again.asked_s, unreached=again.unreached)
            return partial.finish(), connections == 1, partial.taken_over

    def _is_unreached(self, error: urllib3.exceptions.HTTPError) -> bool:
        cause = error.original_error if isinstance(error, urllib3.exceptions.ProxyError) else error
        return isinstance(cause, NOBODY_THERE) and not self._connections.answered

    def _receive(self, download: Download, partial: Partial) -> None:
        """One request: appends what comes."""
        try:
            if download.size is None and partial.size:
                partial.restart()
            with closing(self._open(download, partial.size)) as response:
                if response.status == 200 and partial.size:
                    partial.restart()
                check_span(download, response, partial.size)
                received = 0
                encoded = is_unpacked(download, response)
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
            raise Again(in_words(error), unreached=self._is_unreached(error)) from None
        partial.has_ended = True
        if download.size is not None and partial.size < download.size:
            raise Again(f"the answer ended after {partial.size} of {download.size} bytes")

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
                raise Again(str(broken)) from None
        partial.has_ended = True
        if download.size is not None and partial.size < download.size:
            raise Again(f"the answer ended after {partial.size} of {download.size} bytes")

    def _take(self, piece: bytes, download: Download, partial: Partial) -> None:
        """Appends the next bytes, unless they are too many or nobody wants them any more; keeps to the rate."""
        if self.stop.is_set():
            raise Stopped
        if download.size is not None and partial.size + len(piece) > download.size:
            raise Again(f"more than the {download.size} bytes announced")
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
                discard(response)
                url = followed(download, url, location)
                continue
            if response.status in (200, 206):
                return response
            discard(response)
            raise_for_status(download, response, at_home or not download.redirects_expire)
        raise Again("redirected in circles")
