"""A Hub's API: a repository and a revision become a commit, a listing, and the files' addresses.

huggingface_hub gives tokens, headers, pages, the rules of names and the classes of errors. This
module adds retries, because huggingface_hub gives up at the first 429 or reset on metadata, and a
client whose answers are bounded in time and size. Two requests are enough; they use the addresses
of `HfApi.repo_info` and `list_repo_tree` (hf_api.py), because the import of `HfApi` itself takes
as long as the download of fifty small files (docs/adr/0003).
"""

from __future__ import annotations

import os
import re
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, is_offline_mode, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its names are found on first use
    build_hf_headers,
    get_session,
    get_token,
    hf_raise_for_status,
    paginate,
    validate_repo_id,
)

from stage.digests import Digest, Expected, is_hex
from stage.download.downloader import Downloader
from stage.download.http import check_proxies, origin_of, without_credentials
from stage.download.request import Download
from stage.download.responses import untrusted
from stage.download.retry import AttemptFailed, Patience, RetryPolicy, check_status
from stage.errors import IncompleteError, UsageError
from stage.files import MAX_NUMBER, human_size
from stage.hub.errors import DEFAULT_ENDPOINT, MALFORMED, HubErrors
from stage.hub.model_files import RemoteFile
from stage.lock.licences import stated
from stage.paths import printable, problem_with_address
from stage.progress import Reporter
from stage.version import __version__

MAX_ANSWER = 128 * 2**20  # bytes, unpacked: the names and digests of half a million files
MAX_REQUESTS = 5_000  # per client: pages of a thousand files
MAX_FILES = 1_000_000  # per repository: ten times what the Hub advises
MAX_CONFIG = 32 * 2**20  # bytes: ten times the largest known tokenizer config
MAX_CODE = 4 * 2**20  # bytes: parsing takes a hundred times as much memory
DEFAULT_TIMEOUT_S = 10.0  # huggingface_hub's own default for a read

T = TypeVar("T")


def timeout_s() -> float:
    """Seconds a server may stay silent: $HF_HUB_DOWNLOAD_TIMEOUT, as for huggingface_hub."""
    try:
        return float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")) or DEFAULT_TIMEOUT_S
    except ValueError:
        return DEFAULT_TIMEOUT_S


def guarded_client(endpoint: str, timeout_s: float, trust: ssl.SSLContext) -> httpx2.Client:
    """The HTTP client that huggingface_hub uses, with four limits added.

    It trusts the same certificates as our downloads (not certifi alone), waits at most `timeout_s`
    seconds, sends the token to `endpoint` only, and reads at most `MAX_ANSWER` bytes per answer.

    Raises:
        UsageError: the environment names a proxy that cannot be used.
    """
    check_proxies()
    sent = 0

    def before(request: httpx2.Request) -> None:
        nonlocal sent
        if is_offline_mode():
            raise OfflineModeIsEnabled(f"Cannot reach {request.url}: offline mode is enabled.")
        sent += 1
        if sent > MAX_REQUESTS:
            raise httpx2.TooManyRedirects(f"more than {MAX_REQUESTS} requests", request=request)
        # The next page of a listing may have an address on any server.
        if origin_of(str(request.url)) != origin_of(endpoint):
            request.headers.pop("authorization", None)

    return httpx2.Client(
        verify=trust,
        event_hooks={"request": [before], "response": [_read_bounded]},
        follow_redirects=True,
        timeout=httpx2.Timeout(timeout_s),
        headers={"Accept-Encoding": "gzip"},
    )


def _check_token(token: str) -> None:
    """Refuses a token that no header can carry, before a library fails with it.

    Raises:
        UsageError: a space, a quote or a letter beyond ASCII. The token itself is not printed.
    """
    if not re.fullmatch(r"[!-~]*", token) or re.search(r"[\"'`]", token):
        raise UsageError(
            "the token of the Hub has a space, a quote or a letter that no token has.",
            "Copy it again: export HF_TOKEN=hf_...; or look at the file that `hf auth login` "
            "wrote, ~/.cache/huggingface/token",
        )


def _read_bounded(response: httpx2.Response) -> None:
    """Reads the whole body and replaces it by its unpacked bytes.

    Raises:
        httpx2.DecodingError: the body is larger than `MAX_ANSWER`, or compressed in another way
            than the request allows.
    """
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise httpx2.DecodingError(
            f"an answer compressed by {encoding[:40]!a}", request=response.request
        )
    unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    whole = bytearray()
    source = response.stream
    assert isinstance(source, httpx2.SyncByteStream)
    try:
        for chunk in source:
            whole += (
                chunk if unpack is None else unpack.decompress(chunk, MAX_ANSWER + 1 - len(whole))
            )
            if len(whole) > MAX_ANSWER:
                raise httpx2.DecodingError(
                    f"an answer of more than {MAX_ANSWER} bytes", request=response.request
                )
    except zlib.error as error:
        raise httpx2.DecodingError(str(error), request=response.request) from None
    finally:
        source.close()
    response.stream = httpx2.ByteStream(bytes(whole))


@dataclass(frozen=True)
class Repository:
    """A repository at a commit.

    Attributes:
        kind: `model`, `dataset` or `space`.
        id: its name today; it differs from the requested name if that redirects.
        commit: 40 hex digits.
        licence: its SPDX id or name as the Hub states it.
        gated: whether files need an account that accepted the terms.
        card: the front matter of its README (YAML), as the Hub parsed it.
    """

    kind: str
    id: str
    commit: str
    licence: str | None
    gated: bool
    card: dict[str, Any]


class Hub:
    """The read side of a Hub at one endpoint.

    Args:
        endpoint: `--endpoint`; None: $HF_ENDPOINT, else the public Hub.
        stop: ends waits, as for `Downloader`.
        trust: the trusted certificates, as for `Connections`.

    Raises:
        UsageError: the endpoint is not an address.
    """

    def __init__(
        self,
        endpoint: str | None,
        reporter: Reporter,
        policy: RetryPolicy,
        stop: threading.Event,
        trust: ssl.SSLContext,
    ) -> None:
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if "://" not in self.endpoint:
            raise UsageError(
                f"the endpoint `{self.endpoint}` is not an address: "
                "it does not begin with https:// or http://.",
                f"For example: https://{self.endpoint}",
            )
        if problem := problem_with_address(self.endpoint):
            raise UsageError(
                f"the endpoint `{self.endpoint}` is not an address: {problem}.",
                "For example: https://hf.co",
            )
        self._reporter, self._policy, self._stop = reporter, policy, stop
        self._token = get_token()
        _check_token(self._token or "")
        self._errors = HubErrors(self.endpoint, bool(self._token), self._info)
        self._answered = False  # whether it ever answered
        # With telemetry, the client asks huggingface.co (whatever our endpoint is) for parts of its
        # User-Agent, and behind a firewall it waits for the answer.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        self._headers = build_hf_headers(
            token=self._token or False, library_name="airlift", library_version=__version__
        )
        set_client_factory(lambda: guarded_client(self.endpoint, timeout_s(), trust))

    def repository(self, what: str, kind: str, id: str, revision: str) -> Repository:
        """Pins a revision (branch, tag, commit, `refs/...`) to a commit.

        Args:
            what: the asset's name in messages.
            kind: `model`, `dataset` or `space`.

        Raises:
            UsageError: the repository or revision does not exist, is gated, or is disabled.
            IncompleteError: the Hub cannot be reached.
        """

        def pin() -> Repository:
            info = self._info(kind, id, f"/revision/{quote(revision, safe='')}")
            commit, name, card = info.get("sha"), info["id"], info.get("cardData") or {}
            if commit is None or not is_hex(commit, 40):
                raise IncompleteError(
                    f"{what}: {self.name} does not say which commit `{revision}` is.",
                    "Try another --endpoint.",
                )
            if not isinstance(card, dict):
                raise ValueError("its card is not a mapping")
            tagged = [
                t.partition(":")[2] for t in info.get("tags") or [] if t.startswith("license:")
            ]
            declared = card.get("license")
            licences = tagged or ([declared] if isinstance(declared, str) else declared or [])
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or ".." in name:
                raise ValueError(f"the repository is called {name[:80]!a}")
            return Repository(
                kind=kind,
                id=name,
                commit=commit,
                licence=stated(licences, card.get("license_name")),
                gated=bool(info.get("gated", False)),
                card=card,
            )

        return self._call(what, kind, id, revision, pin)

    def files(self, what: str, repository: Repository) -> dict[str, RemoteFile]:
        """Path -> file, for all files of a repository at its commit.

        Reads the tree, with one request per thousand files.

        Raises:
            StageError: as for `repository`.
        """

        def listing() -> dict[str, RemoteFile]:
            validate_repo_id(repository.id)
            address = f"{self._address(repository.kind, repository.id)}/tree/{repository.commit}"
            params = {"recursive": True, "expand": False}
            files: dict[str, RemoteFile] = {}
            pages = paginate(address, params=params, headers=self._headers, timeout=timeout_s())
            for entry in pages:
                if entry["type"] == "file":
                    file = _remote_file(entry, what)
                    if file.path in files:  # a page that links to itself lists files again
                        raise ValueError(f"{file.path!a} is listed twice")
                    files[file.path] = file
                if len(files) > MAX_FILES:
                    raise ValueError(f"there are more than {MAX_FILES:,} files")
            return files

        return self._call(what, repository.kind, repository.id, repository.commit, listing)

    def download(self, what: str, kind: str, id: str, commit: str, expected: Expected) -> Download:
        """The download of one file of a repository at a commit."""
        path = expected.path
        prefix = "" if kind == "model" else f"{kind}s/"
        return Download(
            what=what,
            url=f"{self.endpoint}/{prefix}{quote(id)}/resolve/{commit}/{quote(path)}",
            expected=expected,
            token=self._token,
            refused=lambda status, code: self._errors.file_error(
                what, kind, id, path, status, code
            ),
        )

    def _address(self, kind: str, id: str) -> str:
        return f"{self.endpoint}/api/{kind}s/{id}"

    def _info(self, kind: str, id: str, part: str = "") -> dict[str, Any]:
        """The API's answer about a repository, or about a part of it.

        Args:
            part: empty, or `/refs` and the like.

        Raises:
            HFValidationError, HfHubHTTPError, httpx2.HTTPError: as from `HfApi`.
            TypeError, ValueError: the answer is not a JSON mapping.
        """
        validate_repo_id(id)
        response = get_session().get(self._address(kind, id) + part, headers=self._headers)
        hf_raise_for_status(response)
        answer = response.json()
        if not isinstance(answer, dict):
            raise TypeError(f"{type(answer).__name__} instead of a mapping")
        return answer

    @property
    def name(self) -> str:
        """The endpoint for messages and for `bag-info.txt`, without credentials."""
        return without_credentials(self.endpoint)

    def _call(self, what: str, kind: str, id: str, revision: str, ask: Callable[[], T]) -> T:
        """What `ask` returns, with retries.

        Raises:
            StageError: as for `repository`.
        """
        patience = Patience(self._policy, self._stop, self._reporter)
        while True:
            try:
                answer = self._attempt(what, kind, id, revision, ask)
                self._answered = True
                return answer
            except AttemptFailed as failed:
                try:
                    patience.wait(f"{what}: {self.name}", failed)
                except IncompleteError as error:
                    raise IncompleteError(
                        error.message,
                        f"{error.remedy} Behind a firewall, name a mirror with --endpoint.",
                    ) from None

    def _attempt(self, what: str, kind: str, id: str, revision: str, ask: Callable[[], T]) -> T:
        """What `ask` returns; the errors of the libraries below it become ours."""
        try:
            return ask()
        except (OfflineModeIsEnabled, HFValidationError, HfHubHTTPError) as error:
            if (response := getattr(error, "response", None)) is not None:
                check_status(response.status_code, response.headers)
            raise self._errors.api_error(what, kind, id, revision, error) from None
        except httpx2.UnsupportedProtocol as error:
            raise self._errors.malformed(what, error) from None
        except httpx2.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise untrusted(f"{what}: {self.name}", error) from None
            not_connected = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            raise AttemptFailed(
                self._errors.transport_problem(error),
                unreached=not_connected and not self._answered,
            ) from None
        except MALFORMED as error:
            raise self._errors.malformed(what, error) from None


def _remote_file(entry: Mapping[str, Any], what: str) -> RemoteFile:
    """A listing's entry with the Hub's evidence: sha256 for an LFS file, else the git blob id.

    The git blob id of an LFS file is no evidence: it hashes the pointer.

    Raises:
        IncompleteError: the entry has no valid digest or size.
        LookupError, TypeError, ValueError: this is not an entry, or its path is not a path.
    """
    path, size, lfs = entry["path"], entry["size"], entry.get("lfs")
    if not isinstance(path, str) or not 0 < len(path) <= 4096:  # git's own limit, PATH_MAX
        raise ValueError(f"{str(path)[:80]!a} is not a path")
    try:
        evidence = Digest("lfs-sha256", lfs["oid"]) if lfs else Digest("git-sha1", entry["oid"])
    except ValueError as error:
        raise IncompleteError(
            f"{what}: the listing of {path!a} makes no sense: {error}.", "Try another --endpoint."
        ) from None
    if type(size) is not int or not 0 <= size <= MAX_NUMBER:
        raise IncompleteError(
            f"{what}: the listing gives {path!a} no size.", "Try another --endpoint."
        )
    return RemoteFile(path, size, evidence)


class SmallFiles:
    """Reads configs and code into memory, checked against the Hub's digests like all files."""

    def __init__(self, hub: Hub, downloader: Downloader) -> None:
        self._hub, self._downloader = hub, downloader

    def read(self, repository: Repository, file: RemoteFile, what: str) -> bytes:
        """The bytes of a file at the repository's commit.

        Raises:
            UsageError: the file is larger than any known config or module.
            StageError: as for `Downloader.fetch`.
        """
        limit = MAX_CODE if file.path.endswith(".py") else MAX_CONFIG
        if file.size > limit:
            raise UsageError(
                f"{what}: {printable(file.path)} of {repository.id} has {human_size(file.size)}. "
                f"It must be read to know what else is needed, and the limit is "
                f"{human_size(limit)}.",
                "Try another revision: configs, tokenizers and modules in use are smaller.",
            )
        download = self._hub.download(
            f"{what}: {file.path}",
            repository.kind,
            repository.id,
            repository.commit,
            Expected(file.path, file.size, upstream=file.evidence),
        )
        with TemporaryDirectory(prefix="airlift-") as folder:
            target = Path(folder, "file")
            self._downloader.fetch(download, target, lambda count: None)
            return target.read_bytes()
