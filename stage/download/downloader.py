"""Downloads one file over as many connections as it takes, and checks its digests.

`Partial` grows the file and hashes it. Bytes that an earlier run left are hashed again before the
rest is requested, because a CDN's ETag says nothing about content (docs/adr/0003). Only bytes that
match the upstream's evidence are renamed to the target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import urllib3

from stage.digests import PIECE, FileDigests, MismatchError
from stage.download.http import Connections, origin_of
from stage.download.partial_file import Partial, partial_path
from stage.download.request import Download
from stage.download.responses import (
    announced,
    check_span,
    discard,
    followed,
    is_unpacked,
    mismatch_error,
    raise_for_status,
)
from stage.download.retry import AttemptFailed, Retries, RetryPolicy
from stage.errors import PolicyError, UsageError
from stage.files import human_size, is_pointer
from stage.progress import Reporter
from stage.threads import Stopped
from stage.version import __version__

MAX_REDIRECTS = 8  # the Hub redirects once, to its CDN; a renamed repository once more
MAX_RATIO = 1000  # deflate reaches 1032:1
MAX_UNPACKED = 64 * 2**20  # bytes that are accepted whatever the ratio: zeros compress well


class Downloader:
    """Downloads files; several threads may call it at the same time."""

    def __init__(self, connections: Connections, reporter: Reporter, policy: RetryPolicy) -> None:
        self.connections, self._reporter = connections, reporter
        self.retries = Retries(policy, reporter)
        self.stop = self.retries.stop
        self.taken_over = 0  # bytes of complete files that an earlier run had fetched
        self._counting = threading.Lock()

    def fetch(
        self, download: Download, target: Path, progress: Callable[[int], None]
    ) -> FileDigests:
        """Downloads one file to `target`; resumes what an earlier run left.

        Args:
            progress: called with each count of new bytes, negative for bytes that are discarded.

        Raises:
            UsageError: the bytes are a Git LFS pointer.
            DamageError: the bytes differ from what the upstream announces, twice, or from the
                pin. Nothing is left on disk.
            IncompleteError: the network failed. The partial file is kept for the next run.
            Stopped: `stop` was set.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        path = partial_path(target, download.identity)
        if not download.evidence and not download.version:
            path.unlink(missing_ok=True)
        last_chance = False
        while True:
            with Partial(path, download.size, download.expected.needs_git, progress) as partial:
                self._complete(download, partial)
                digests = partial.finish()
            if is_pointer(path, digests.size):
                path.unlink()
                raise UsageError(
                    f"{download.what}: the address gives a Git LFS pointer, not the file itself.",
                    "Run git clone and git lfs pull, and name the file with `path:`; "
                    "or find the file's own address.",
                )
            try:
                download.expected.check(digests)
            except MismatchError as error:
                path.unlink()
                progress(-digests.size)
                # TCP and TLS exclude damage on the way: bytes of one answer are as the server has
                # them, so a pin is out of date, and another attempt would bring the same.
                is_whole_answer = not (partial.resumed or partial.taken_over)
                if last_chance or (download.pin and is_whole_answer):
                    raise mismatch_error(download, error.problem) from None
                self._reporter.warn(
                    f"{download.what}: {error.problem}; fetching it once more from the start"
                )
                last_chance = True
            else:
                with self._counting:
                    self.taken_over += partial.taken_over
                path.replace(target)
                return digests

    def probe(self, download: Download) -> tuple[int | None, str | None]:
        """The size in bytes and the version (ETag, date) that a server announces for a file.

        Sends a GET and does not read the body: many servers refuse HEAD or answer it wrongly.

        Raises:
            IncompleteError: the network failed.
        """

        def attempt() -> tuple[int | None, str | None]:
            with (
                self.connections.errors(download.what, download.url),
                closing(self._open(download, 0)) as response,
            ):
                return announced(download, response)

        return self.retries.call(download.what, attempt)

    def _complete(self, download: Download, partial: Partial) -> None:
        """Receives the rest of a partial file, over as many connections as it takes."""
        if partial.size:
            of = f" of {human_size(download.size)}" if download.size else ""
            self._reporter.note(f"{download.what}: resuming at {human_size(partial.size)}{of}")

        def attempt() -> None:
            if download.size is None and partial.size:
                partial.restart()
            partial.resumed = partial.size > 0
            with (
                self.connections.errors(download.what, download.url),
                closing(self._open(download, partial.size)) as response,
            ):
                self._receive(download, response, partial)

        if download.size is None or partial.size < download.size:
            self.retries.call(download.what, attempt, lambda: partial.size)

    def _receive(
        self, download: Download, response: urllib3.BaseHTTPResponse, partial: Partial
    ) -> None:
        """Appends the bytes of an answer.

        Raises:
            AttemptFailed: fewer or more bytes than announced.
            PolicyError: a decompression bomb.
            Stopped: `stop` was set.
        """
        if response.status == 200 and partial.size:
            partial.restart()
        check_span(download, response, partial.size)
        received, size = 0, download.size
        encoded = is_unpacked(download, response)
        for piece in response.stream(PIECE, decode_content=encoded):
            if self.stop.is_set():
                raise Stopped
            if size is not None and partial.size + len(piece) > size:
                raise AttemptFailed(f"more than the {size} bytes announced")
            partial.append(piece)
            received += len(piece)
            if encoded and received > MAX_UNPACKED + MAX_RATIO * response.tell():
                raise PolicyError(
                    f"{download.what}: the server sends a compressed answer that unpacks to "
                    f"over {MAX_RATIO} times its size: a decompression bomb.",
                    "Download it yourself, look at it, and name it with `path:`.",
                )
        if size is not None and partial.size < size:
            raise AttemptFailed(f"the answer ended after {partial.size} of {size} bytes")

    def _open(self, download: Download, offset: int) -> urllib3.BaseHTTPResponse:
        """Requests the bytes from `offset` and follows redirects.

        The token and the login go to `download.url`'s own origin only.
        """
        url = download.url
        for _ in range(MAX_REDIRECTS):
            headers = {"User-Agent": f"airlift/{__version__}", "Accept-Encoding": "identity"}
            if offset:
                headers["Range"] = f"bytes={offset}-"
                if not download.evidence and download.version:
                    headers["If-Range"] = download.version
            at_home = url == download.url or origin_of(url) == origin_of(download.url)
            if download.token and at_home:
                headers["Authorization"] = f"Bearer {download.token}"
            elif download.login and at_home:
                headers |= urllib3.make_headers(basic_auth=download.login)
            with self.connections.errors(download.what, download.url, url):
                response = self.connections.request("GET", url, headers)
            if response.status in (200, 206):
                return response
            discard(response)
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                url = followed(download, url, location)
            else:
                raise_for_status(download, response, at_home or not download.redirects_expire)
        raise AttemptFailed("redirected in circles")
