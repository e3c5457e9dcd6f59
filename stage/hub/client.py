"""A Hub's API: a repository and a revision become a commit, a listing, and the files' addresses.

huggingface_hub's `HfApi` knows the addresses, the pages and the classes of errors. Its requests go
over our own connections (`_Transport`), which have a time limit, the site's certificates and
proxies; our retries are around it, because it has none for `repo_info` (docs/adr/0003).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import (
    HfApi,
    RepoFile,
    constants,
    get_token,
    is_offline_mode,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from stage.digests import Digest, Expected, is_hex
from stage.download.downloader import Downloader
from stage.download.http import Connections, origin_of, without_credentials
from stage.download.request import Download
from stage.download.retry import check_status
from stage.errors import IncompleteError, UsageError
from stage.files import MAX_NUMBER, human_size
from stage.hub.errors import DEFAULT_ENDPOINT, MALFORMED, HubErrors
from stage.hub.model_files import RemoteFile
from stage.lock.licences import stated
from stage.paths import printable, problem_with_address
from stage.version import __version__

MAX_ANSWER = 128 * 2**20  # bytes, unpacked: the names and digests of half a million files
MAX_REQUESTS = 5_000  # per client: pages of a thousand files
MAX_FILES = 1_000_000  # per repository: ten times what the Hub advises
MAX_CONFIG = 32 * 2**20  # bytes: ten times the largest known tokenizer config
MAX_CODE = 4 * 2**20  # bytes: parsing takes a hundred times as much memory
_PIECE = 2**16  # bytes read at a time: deflate makes at most a thousand times as many of them
_ABOUT_THE_BODY = ("content-encoding", "content-length", "transfer-encoding")

T = TypeVar("T")


class _Transport(httpx2.BaseTransport):
    """Sends huggingface_hub's requests over our connections, and bounds their answers.

    Args:
        endpoint: the only origin that gets the token: a listing's next page may have an address
            on any server.
    """

    def __init__(self, endpoint: str, connections: Connections) -> None:
        self._endpoint, self._connections = endpoint, connections
        self._sent = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a GET.

        Raises:
            AttemptFailed: no answer, or the server is busy.
            IncompleteError: no trusted TLS connection.
            UsageError: the environment names a proxy that cannot be used.
            ValueError: an address or an answer that no Hub gives.
        """
        url, headers = str(request.url), {**request.headers, "accept-encoding": "gzip"}
        self._sent += 1
        if problem := problem_with_address(url):
            raise ValueError(f"{url[:200]!a}: {problem}")
        if self._sent > MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS} requests")
        if origin_of(url) != origin_of(self._endpoint):
            headers.pop("authorization", None)
        with (
            self._connections.errors(without_credentials(self._endpoint)),
            closing(self._connections.request("GET", url, headers)) as response,
        ):
            check_status(response.status, response.headers)
            if response.headers.get("Content-Encoding", "gzip") not in ("gzip", "identity"):
                raise ValueError("an answer compressed in an unknown way")
            body = bytearray()
            for piece in response.stream(_PIECE, decode_content=True):
                body += piece
                if len(body) > MAX_ANSWER:
                    raise ValueError(f"an answer of more than {MAX_ANSWER} bytes")
        kept = [(k, v) for k, v in response.headers.items() if k.lower() not in _ABOUT_THE_BODY]
        return httpx2.Response(response.status, headers=kept, content=bytes(body), request=request)


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
        downloader: has the connections and the retries for metadata too.

    Raises:
        UsageError: the endpoint is not an address, or no header can carry the token.
    """

    def __init__(self, endpoint: str | None, downloader: Downloader) -> None:
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if problem := problem_with_address(self.endpoint):
            raise UsageError(
                f"the endpoint `{self.endpoint}` is not an address: {problem}.",
                f"For example: {DEFAULT_ENDPOINT}",
            )
        self._downloader, self._token = downloader, get_token()
        if not re.fullmatch(r"[!#-&(-_a-~]*", self._token or ""):  # not printed: it is a secret
            raise UsageError(
                "the token of the Hub has a space, a quote or a letter that no token has.",
                "Copy it again: export HF_TOKEN=hf_...; or look at the file that `hf auth login` "
                f"wrote, {constants.HF_TOKEN_PATH}",
            )
        # With telemetry, the client asks huggingface.co (whatever our endpoint is) for parts of its
        # User-Agent, and behind a firewall it waits for the answer.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        self._api = HfApi(
            self.endpoint,
            token=self._token or False,
            library_name="airlift",
            library_version=__version__,
        )
        transport = _Transport(self.endpoint, downloader.connections)
        set_client_factory(lambda: httpx2.Client(transport=transport, follow_redirects=True))
        self._errors = HubErrors(self.name, bool(self._token), self._api)

    @property
    def name(self) -> str:
        """The endpoint for messages and for `bag-info.txt`, without credentials."""
        return without_credentials(self.endpoint)

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
            info: Any = self._api.repo_info(id, repo_type=kind, revision=revision)
            card = vars(info.card_data) if info.card_data else {}
            if not is_hex(info.sha, 40):
                raise ValueError(f"it does not say which commit `{revision}` is")
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", info.id) or ".." in info.id:
                raise ValueError(f"the repository is called {info.id[:80]!a}")
            tagged = [t.partition(":")[2] for t in info.tags or [] if t.startswith("license:")]
            declared = card.get("license")
            licences = tagged or ([declared] if isinstance(declared, str) else declared or [])
            return Repository(
                kind=kind,
                id=info.id,
                commit=info.sha,
                licence=stated(licences, card.get("license_name")),
                gated=bool(getattr(info, "gated", False)),
                card=card,
            )

        return self._call(what, kind, id, revision, pin)

    def files(self, what: str, repository: Repository) -> dict[str, RemoteFile]:
        """Path -> file, for all files of a repository at its commit.

        Reads the tree, with one request per thousand files.

        Raises:
            StageError: as for `repository`.
        """
        kind, id, commit = repository.kind, repository.id, repository.commit

        def listing() -> dict[str, RemoteFile]:
            files: dict[str, RemoteFile] = {}
            for entry in self._api.list_repo_tree(
                id, recursive=True, revision=commit, repo_type=kind
            ):
                if isinstance(entry, RepoFile):
                    file = _file(entry)
                    if file.path in files:  # a page that links to itself lists files again
                        raise ValueError(f"{file.path!a} is listed twice")
                    files[file.path] = file
                if len(files) > MAX_FILES:
                    raise ValueError(f"there are more than {MAX_FILES:,} files")
            return files

        return self._call(what, kind, id, commit, listing)

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

    def read(self, repository: Repository, file: RemoteFile, what: str) -> bytes:
        """The bytes of a config or a module at the repository's commit, checked like all files.

        Raises:
            UsageError: the file is larger than any known config or module.
            StageError: as for `Downloader.fetch`.
        """
        limit = MAX_CODE if file.path.endswith(".py") else MAX_CONFIG
        if file.size > limit:
            raise UsageError(
                f"{what}: {printable(file.path)} of {repository.id} has "
                f"{human_size(file.size)}. It must be read to know what else is needed, and "
                f"the limit is {human_size(limit)}.",
                "Try another revision: configs, tokenizers and modules in use are smaller.",
            )
        download = self.download(
            f"{what}: {file.path}", repository.kind, repository.id, repository.commit, file
        )
        with TemporaryDirectory(prefix="airlift-") as folder:
            target = Path(folder, "file")
            self._downloader.fetch(download, target, lambda count: None)
            return target.read_bytes()

    def _call(self, what: str, kind: str, id: str, revision: str, ask: Callable[[], T]) -> T:
        """What `ask` returns, with retries. Raises as `repository`."""
        if is_offline_mode():
            raise UsageError(
                f"{what}: HF_HUB_OFFLINE is set, so no request to the Hub is allowed.",
                "unset HF_HUB_OFFLINE",
            )
        try:
            return self._downloader.retries.call(
                f"{what}: {self.name}",
                ask,
                advice=" Behind a firewall, name a mirror with --endpoint.",
            )
        except (HFValidationError, HfHubHTTPError) as error:
            raise self._errors.api_error(what, kind, id, revision, error) from None
        except MALFORMED as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            raise IncompleteError(
                f"{what}: the answer of {self.name} makes no sense ({problem}).",
                "Is it a Hub? Open the address in a browser; "
                "behind a proxy or a login page, name another --endpoint.",
            ) from None


def _file(entry: RepoFile) -> RemoteFile:
    """A listing's entry with the Hub's evidence: sha256 for an LFS file, else the git blob id.

    The git blob id of an LFS file is no evidence: it hashes the pointer.

    Raises:
        LookupError, TypeError, ValueError: no valid path, size or digest.
    """
    path, size, lfs = entry.path, entry.size, entry.lfs
    if not isinstance(path, str) or not 0 < len(path) <= 4096:  # git's own limit, PATH_MAX
        raise ValueError(f"{str(path)[:80]!a} is not a path")
    if type(size) is not int or not 0 <= size <= MAX_NUMBER:
        raise ValueError(f"{path!a} has no size")
    if lfs is None:
        return RemoteFile(path, size, upstream=Digest("git-sha1", entry.blob_id))
    return RemoteFile(path, size, lfs["sha256"], Digest("lfs-sha256", lfs["sha256"]))
