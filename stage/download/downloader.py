"""Downloads one file over as many connections as it takes, and checks its digests.

`Partial` grows the file and hashes it. Bytes that an earlier run left are hashed again before the
rest is requested, because a CDN's ETag says nothing about content (docs/adr/0003). Only bytes that
match the upstream's evidence are renamed to the target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import urllib3

from stage.digests import PIECE, FileDigests
from stage.download.http import Connections, origin_of
from stage.download.partial_file import Partial, partial_path
from stage.download.request import Download
from stage.download.responses import (
    NOT_CONNECTED,
    announced,
    check_span,
    describe,
    discard,
    followed,
    is_unpacked,
    mismatch_error,
    raise_for_status,
    untrusted,
)
from stage.download.retry import AttemptFailed, Patience, RetryPolicy
from stage.errors import DamageError, PolicyError, UsageError
from stage.files import human_size, is_pointer
from stage.progress import Reporter
from stage.threads import Stopped

MAX_REDIRECTS = 8
MAX_RATIO = 1000  # deflate reaches 1032:1
MAX_UNPACKED = 64 * 2**20  # bytes that are accepted whatever the ratio


class Downloader:
    """Downloads files; several threads may call it at the same time."""

    def __init__(self, connections: Connections, reporter: Reporter, policy: RetryPolicy) -> None:
        self._connections, self._reporter, self._policy = connections, reporter, policy
        self.stop = threading.Event()
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
            if is_pointer(partial, digests.size):
                partial.unlink()
                raise _pointer_error(download)
            problem = download.expected.mismatch(digests)
            if problem is None:
                with self._counting:
                    self.taken_over += taken_over
                partial.replace(target)
                return digests
            partial.unlink()
            progress(-digests.size)
            if download.pin and at_once:
                break  # TCP and TLS exclude damage on the way, so the pin is out of date
            if not last_chance:
                self._reporter.warn(
                    f"{download.what}: {problem}; fetching it once more from the start"
                )
        raise mismatch_error(download, str(problem))

    def probe(self, download: Download) -> tuple[int | None, str | None]:
        """The size in bytes and the version (ETag, date) that a server announces for a file.

        Sends a GET and does not read the body: many servers refuse HEAD or answer it wrongly.

        Raises:
            IncompleteError: the network failed.
        """
        patience = Patience(self._policy, self.stop, self._reporter)
        while True:
            try:
                with self._network_errors(download), closing(self._open(download, 0)) as response:
                    return announced(download, response)
            except AttemptFailed as failed:
                patience.wait(download.what, failed)

    def _complete(
        self, download: Download, path: Path, progress: Callable[[int], None]
    ) -> tuple[FileDigests, bool, int]:
        """Receives the whole partial file, over as many connections as it takes.

        Returns:
            Its digests, whether one connection was enough, and the bytes of an earlier run in it.
        """
        patience = Patience(self._policy, self.stop, self._reporter)
        with Partial(path, download.size, download.expected.needs_git, progress) as partial:
            connections = 1 if partial.size else 0
            if partial.size:
                of = f" of {human_size(download.size)}" if download.size else ""
                self._reporter.note(f"{download.what}: resuming at {human_size(partial.size)}{of}")
            while not partial.is_whole:
                before, connections = partial.size, connections + 1
                try:
                    self._receive(download, partial)
                    partial.has_ended = True
                    if download.size is not None and partial.size < download.size:
                        raise AttemptFailed(
                            f"the answer ended after {partial.size} of {download.size} bytes"
                        )
                except AttemptFailed as failed:
                    if partial.size > before:
                        patience.progress()
                    patience.wait(download.what, failed)
            return partial.finish(), connections == 1, partial.taken_over

    @contextmanager
    def _network_errors(self, download: Download) -> Iterator[None]:
        """Turns urllib3's errors into ours.

        Raises:
            IncompleteError: no trusted TLS connection.
            AttemptFailed: any other network error.
        """
        try:
            yield
        except urllib3.exceptions.SSLError as error:
            raise untrusted(download.what, error) from None
        except urllib3.exceptions.HTTPError as error:
            cause = (
                error.original_error if isinstance(error, urllib3.exceptions.ProxyError) else error
            )
            unreached = isinstance(cause, NOT_CONNECTED) and not self._connections.answered
            raise AttemptFailed(describe(error), unreached=unreached) from None

    def _receive(self, download: Download, partial: Partial) -> None:
        """Sends one request and appends the answer's bytes."""
        if download.size is None and partial.size:
            partial.restart()
        with (
            self._network_errors(download),
            closing(self._open(download, partial.size)) as response,
        ):
            if response.status == 200 and partial.size:
                partial.restart()
            check_span(download, response, partial.size)
            received = 0
            encoded = is_unpacked(download, response)
            for chunk in response.stream(PIECE, decode_content=encoded):
                self._append(chunk, download, partial)
                received += len(chunk)
                if encoded and received > MAX_UNPACKED + MAX_RATIO * response.tell():
                    raise PolicyError(
                        f"{download.what}: the server sends a compressed answer that unpacks to "
                        f"over {MAX_RATIO} times its size: a decompression bomb.",
                        "Download it yourself, look at it, and name it with `path:`.",
                    )

    def _append(self, piece: bytes, download: Download, partial: Partial) -> None:
        """Appends the next bytes.

        Raises:
            AttemptFailed: more bytes than announced.
            Stopped: `stop` was set.
        """
        if self.stop.is_set():
            raise Stopped
        if download.size is not None and partial.size + len(piece) > download.size:
            raise AttemptFailed(f"more than the {download.size} bytes announced")
        partial.append(piece)

    def _open(self, download: Download, offset: int) -> urllib3.BaseHTTPResponse:
        """Requests the bytes from `offset` and follows redirects.

        The token and the login go to `download.url`'s own origin only.
        """
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
        raise AttemptFailed("redirected in circles")


def _pointer_error(download: Download) -> UsageError:
    return UsageError(
        f"{download.what}: the address gives a Git LFS pointer, not the file itself.",
        "Run git clone and git lfs pull, and name the file with `path:`; "
        "or find the file's own address.",
    )
