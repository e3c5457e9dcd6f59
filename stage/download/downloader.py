"""Downloads one file over as many connections as it takes, and checks its digests.

`Download` says what is asked: the address, the name in messages, and the digests that the bytes
must have. A server's answer is the bytes, a redirect, a temporary failure (`AttemptFailed`), or a
`StageError`.

`Partial` grows the file and hashes it. Bytes that an earlier run left are hashed again before the
rest is requested, because a CDN's ETag says nothing about content (docs/adr/0003). Only bytes that
match the upstream's evidence are renamed to the target.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import urllib3

from stage.download.http import Connections, origin_of
from stage.download.partial_file import Partial, partial_path
from stage.download.retry import AttemptFailed, Retries, RetryPolicy, Stopped, check_status
from stage.errors import DamageError, IncompleteError, PolicyError, UsageError, about
from stage.files import (
    PIECE,
    Digest,
    Expected,
    FileDigests,
    MismatchError,
    human_size,
    is_pointer,
    sha256_of_bytes,
)
from stage.paths import problem_with_address
from stage.progress import Reporter
from stage.version import __version__


@dataclass(frozen=True)
class Download:
    """One file to download.

    Attributes:
        what: its name in messages (`bert: model.safetensors`).
        url: its address; the server may redirect.
        expected: its size (None where the server does not say; then a download cannot be resumed)
            and the digests that the bytes must have; none where this download sets the pin.
        refused: turns a final refusal (401, 403, 404, ...) of `url`'s own origin into an error.
            Its arguments are the status and the Hub's X-Error-Code.
        version: what a server calls this version of the file (an ETag), where there is no
            evidence. A partial file of another version is not resumed, nor is one that has
            neither evidence nor version.
        redirects_expire: whether a refusal by another host means an expired address (of a CDN),
            so that the next attempt asks `url` again.
        token, login: sent to `url`'s own origin only, and kept out of `repr`. `login` is
            `user:password`.
        pin: advice for bytes with another digest, where the evidence comes from a manifest or a
            lock; None where it comes from the server.
    """

    what: str
    url: str
    expected: Expected
    refused: Callable[[int, str | None], Exception]
    token: str | None = field(default=None, repr=False)
    version: str | None = None
    redirects_expire: bool = True
    login: str | None = field(default=None, repr=False)
    pin: str | None = None

    @property
    def size(self) -> int | None:
        """Bytes, as far as known."""
        return self.expected.size

    @property
    def evidence(self) -> tuple[Digest, ...]:
        """The digests that the bytes must have."""
        return self.expected.evidence

    @property
    def identity(self) -> Digest:
        """Names this version of the file, so that only its own partial file is resumed."""
        if self.evidence:
            return self.evidence[0]
        version = f"{self.url}\n{self.size}\n{self.version}"
        return Digest("sha256", sha256_of_bytes(version.encode()))


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
        f"the server redirects to {location.partition('?')[0][:200]}, "
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
            f"HTTP {status}: {origin_of(download.url)[1]} redirects to a storage "
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
            raise AttemptFailed("the server sent another part of the file than was requested")
        total = int(span[2]) if span[2] else None
    if download.size is None:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if total is None and not (chunked or download.evidence):
            raise IncompleteError(
                "the server says neither how long the file is nor where it ends.",
                "Give its `sha256` in the manifest, to recognise a download that is cut.",
            )
    elif total not in (None, download.size):
        if download.pin and download.evidence:  # another attempt would fetch the same file
            raise mismatch_error(download, f"it has {total:,} bytes, not {download.size:,}")
        raise AttemptFailed(f"the server has {total} bytes, the listing says {download.size}")


def mismatch_error(download: Download, problem: str) -> DamageError:
    """The error for bytes that are not the locked ones."""
    return DamageError(
        f"refused: {problem}. Nothing was kept.",
        download.pin
        or "The source changed the file, or a proxy or mirror did. If the source did: --update it "
        "(and its sha256 in the manifest); else try another --endpoint or network.",
    )


def _length(response: urllib3.BaseHTTPResponse) -> int | None:
    """The length that an answer states; None where it states none."""
    text = response.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


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
        with about(download.what):
            while True:
                with Partial(path, download.size, download.expected.needs_git, progress) as partial:
                    self._complete(download, partial)
                    digests = partial.finish()
                if is_pointer(path, digests.size):
                    path.unlink()
                    raise UsageError(
                        "the address gives a Git LFS pointer, not the file itself.",
                        "Run git clone and git lfs pull, and name the file with `path:`; "
                        "or find the file's own address.",
                    )
                try:
                    download.expected.check(digests)
                except MismatchError as error:
                    path.unlink()
                    progress(-digests.size)
                    # TCP and TLS exclude damage on the way: bytes of one answer are as the server
                    # has them, so a pin is out of date, and another attempt would bring the same.
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
                self.connections.errors(download.url),
                closing(self._open(download, 0)) as response,
            ):
                return announced(download, response)

        with about(download.what):
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
                self.connections.errors(download.url),
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
                    f"the server sends a compressed answer that unpacks to "
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
            with self.connections.errors(download.url, url):
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
