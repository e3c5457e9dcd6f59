"""A Hub's API: a repository and a revision become a commit, a listing, and the files' addresses.

huggingface_hub reads the answers and knows the classes of errors. It sends nothing itself: it has
one HTTP client for the whole process, which belongs to the program that calls `stage` (a notebook).
So the requests (`HubApi`) go over our own connections, which have a time limit, the site's
certificates and proxies; our retries are around them (docs/adr/0003).

`HubErrors` makes errors of a Hub's refusals: the asset, the reason and the next step. Where two
causes give the same class of huggingface_hub, one more request to the Hub decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import (
    DatasetInfo,
    ModelInfo,
    RepoFile,
    SpaceInfo,
    constants,
    get_token,
    is_offline_mode,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it re-exports without `as`
    hf_raise_for_status,
    validate_repo_id,
)

from stage.download.downloader import Download, Downloader
from stage.download.http import Connections, origin_of
from stage.download.retry import AttemptFailed, check_status
from stage.errors import IncompleteError, StageError, UsageError, about, suggest, without_secrets
from stage.files import MAX_NUMBER, Digest, Expected, human_size, is_hex
from stage.hub.model_files import RemoteFile
from stage.lock.licences import stated
from stage.paths import printable, problem_with_address
from stage.version import __version__

MAX_ANSWER = 128 * 2**20  # bytes, unpacked: the names and digests of half a million files
MAX_REQUESTS = 5_000  # per client: pages of a thousand files
_PIECE = 2**16  # bytes read at a time: deflate makes at most a thousand times as many of them
_ABOUT_THE_BODY = ("content-encoding", "content-length", "transfer-encoding")

RepositoryInfo = ModelInfo | DatasetInfo | SpaceInfo
_INFOS: dict[str, type[RepositoryInfo]] = {
    "model": ModelInfo,
    "dataset": DatasetInfo,
    "space": SpaceInfo,
}


class _Transport(httpx2.BaseTransport):
    """Sends the requests over our connections, and bounds their answers.

    Args:
        endpoint: the only origin that gets the token: the server may redirect anywhere.
    """

    def __init__(self, endpoint: str, connections: Connections) -> None:
        self._endpoint, self._connections = endpoint, connections
        self._sent = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request without a body.

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
            self._connections.errors(self._endpoint, url),
            closing(self._connections.request(request.method, url, headers)) as response,
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


class HubApi:
    """The questions to one Hub.

    All methods raise what `_Transport.handle_request` raises, `HfHubHTTPError` where the Hub
    refuses, `HFValidationError` for an id that no repository can have, and one of
    `stage.hub.client.MALFORMED` for an answer that no Hub gives.

    Args:
        endpoint: the address of the Hub, without a slash at its end.
        token: sent to the endpoint's own origin only.
    """

    def __init__(self, endpoint: str, token: str | None, connections: Connections) -> None:
        self._endpoint = endpoint
        headers = {"User-Agent": f"airlift/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.Client(
            transport=_Transport(endpoint, connections), headers=headers, follow_redirects=True
        )

    def info(self, kind: str, id: str, revision: str) -> RepositoryInfo:
        """What the Hub states about a repository (`model`, `dataset`, `space`) at a revision."""
        answer = self._ask(kind, id, f"/revision/{quote(revision, safe='')}")
        return _INFOS[kind](**answer.json())

    def exists(self, kind: str, id: str) -> bool:
        """Whether there is such a repository for this user, with or without access to its files."""
        try:
            self._ask(kind, id)
        except RepositoryNotFoundError as error:
            return isinstance(error, GatedRepoError)
        return True

    def revisions(self, kind: str, id: str) -> list[str]:
        """The branches, then the tags of a repository."""
        refs = self._ask(kind, id, "/refs").json()
        return [ref["name"] for ref in [*refs["branches"], *refs["tags"]]]

    def files(self, kind: str, id: str, commit: str) -> Iterator[RepoFile]:
        """The files of a repository at a commit, with one request per thousand files.

        A page names the next one by an address. Only its query is taken: a mirror may pass on the
        Hub's own address, which this machine need not reach.
        """
        query: httpx2.QueryParams | None = httpx2.QueryParams(recursive=True, expand=False)
        while query is not None:
            page = self._ask(kind, id, f"/tree/{commit}", query)
            for entry in page.json():
                if entry["type"] == "file":
                    yield RepoFile(**entry)  # type: ignore[no-untyped-call]
            following = page.links.get("next", {}).get("url")
            query = httpx2.URL(following).params if following else None

    def _ask(
        self, kind: str, id: str, path: str = "", query: httpx2.QueryParams | None = None
    ) -> httpx2.Response:
        validate_repo_id(id)
        answer = self._client.get(f"{self._endpoint}/api/{kind}s/{id}{path}", params=query)
        hf_raise_for_status(answer)
        return answer


# What huggingface_hub raises on a malformed answer.
MALFORMED = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

DEFAULT_ENDPOINT = "https://huggingface.co"
LOG_IN = "run `hf auth login`, or set HF_TOKEN."
CHECK_NAME = f"Check the spelling (org/name). For a private one give a token: {LOG_IN}"


class RefusedToken(UsageError):
    """The Hub does not know the token, so it answers nothing: of public repositories neither."""


class HubErrors:
    """Makes the errors of one Hub, for one user.

    Args:
        name: the Hub's address, for messages.
        has_token: whether requests carry a token.
        api: asks the Hub once more.
    """

    def __init__(self, name: str, has_token: bool, api: HubApi) -> None:
        self._name, self._has_token, self._api = name, has_token, api

    def api_error(
        self,
        kind: str,
        id: str,
        revision: str,
        error: HFValidationError | HfHubHTTPError,
    ) -> StageError:
        """The error of a failed API request that a retry does not fix."""
        if isinstance(error, HFValidationError):
            return UsageError(
                f"`{id}` is not the name of a repository: {error}",
                "Check the spelling (org/name).",
            )
        status, headers = error.response.status_code, error.response.headers
        if status == 401 and self._has_token:
            return self._refused_token()
        match error:
            case GatedRepoError():
                return self._gated(kind, id)
            case RevisionNotFoundError():
                return self._no_revision(kind, id, revision)
            case DisabledRepoError():
                return UsageError(
                    f"the {kind} {id} was disabled by the Hub.", "Use another repository."
                )
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            return self._not_found(kind, id)
        # A Hub answers in JSON, or names its error in a header.
        if "html" in headers.get("Content-Type", "").lower() and "X-Error-Code" not in headers:
            return IncompleteError(
                f"{self._name} does not answer as a Hub: HTTP {status}, a web page.",
                f"Give the address of a Hub or of a mirror: --endpoint {DEFAULT_ENDPOINT}",
            )
        return IncompleteError(
            f"{self._name} answered: {str(error).strip().splitlines()[0]}",
            "Try again, or another --endpoint.",
        )

    def file_error(
        self, kind: str, id: str, path: str, status: int, code: str | None
    ) -> StageError:
        """The error of a refused file whose repository could be listed."""
        if status == 401 and self._has_token:
            return self._refused_token()
        if status in (401, 403) and code not in ("RepoNotFound", "RevisionNotFound"):
            return self._gated(kind, id)
        if status in (401, 403, 404):
            return UsageError(
                f"{path} of {id} is not there any more (HTTP {status}).",
                "Its commit may have been deleted: "
                "run again with --update ASSET to take the repository's current commit.",
            )
        return IncompleteError(
            f"HTTP {status} from {self._name}.", "Try again, or another --endpoint."
        )

    def _refused_token(self) -> RefusedToken:
        names = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)]
        drop = f"unset {' '.join(names)}" if names else "hf auth logout"
        return RefusedToken(
            f"{self._name} refuses your token (HTTP 401): it is mistyped, or has expired.",
            f"Public repositories need none: {drop}. For others, a new one: {LOG_IN}",
        )

    def _gated(self, kind: str, id: str) -> StageError:
        if self._has_token:
            return UsageError(
                f"the {kind} {id} is gated, and the account of your token has no access.",
                f"Accept its terms at {_page(kind, id)} with that account; then run again.",
            )
        return UsageError(
            f"the {kind} {id} is gated: it needs an account that accepted its terms.",
            f"Accept them at {_page(kind, id)}, then give a token: {LOG_IN}",
        )

    def _not_found(self, kind: str, id: str) -> StageError:
        seen = "with your token" if self._has_token else "without a token"
        other = "dataset" if kind == "model" else "model"
        try:
            exists = self._api.exists(other, id)
        except (AttemptFailed, IncompleteError, *MALFORMED):
            exists = False
        if exists:
            return UsageError(f"`{id}` is a {other}, not a {kind}.", f"Write `{other}: {id}`.")
        return UsageError(
            f"{self._name} shows no {kind} `{id}` {seen}: it does not exist or is private.",
            CHECK_NAME,
        )

    def _no_revision(self, kind: str, id: str, revision: str) -> StageError:
        try:
            names = self._api.revisions(kind, id)
        except (AttemptFailed, IncompleteError, *MALFORMED):
            names = []
        hint = f"It has: {', '.join(names[:12])}." if names else f"See {_page(kind, id)}/refs."
        return UsageError(
            f"the {kind} {id} has no revision `{revision}`.",
            suggest(revision, names, hint),
        )


def _page(kind: str, id: str) -> str:
    return f"{DEFAULT_ENDPOINT}/{'' if kind == 'model' else f'{kind}s/'}{id}"


MAX_FILES = 1_000_000  # per repository: ten times what the Hub advises
MAX_CONFIG = 32 * 2**20  # bytes: ten times the largest known tokenizer config
MAX_CODE = 4 * 2**20  # bytes: parsing takes a hundred times as much memory

T = TypeVar("T")


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
        self._api = HubApi(self.endpoint, self._token, downloader.connections)
        self._errors = HubErrors(self.name, bool(self._token), self._api)

    @property
    def name(self) -> str:
        """The endpoint for messages and for `bag-info.txt`, without credentials."""
        return without_secrets(self.endpoint)

    def repository(self, kind: str, id: str, revision: str) -> Repository:
        """Pins a revision (branch, tag, commit, `refs/...`) to a commit.

        Args:
            kind: `model`, `dataset` or `space`.

        Raises:
            UsageError: the repository or revision does not exist, is gated, or is disabled.
            IncompleteError: the Hub cannot be reached.
        """

        def pin() -> Repository:
            info: Any = self._api.info(kind, id, revision)
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

        return self._call(kind, id, revision, pin)

    def files(self, repository: Repository) -> dict[str, RemoteFile]:
        """Path -> file, for all files of a repository at its commit.

        Raises:
            StageError: as for `repository`.
        """
        kind, id, commit = repository.kind, repository.id, repository.commit

        def listing() -> dict[str, RemoteFile]:
            files: dict[str, RemoteFile] = {}
            for entry in self._api.files(kind, id, commit):
                file = _file(entry)
                if file.path in files:  # a page that links to itself lists files again
                    raise ValueError(f"{file.path!a} is listed twice")
                files[file.path] = file
                if len(files) > MAX_FILES:
                    raise ValueError(f"there are more than {MAX_FILES:,} files")
            return files

        return self._call(kind, id, commit, listing)

    def download(self, what: str, kind: str, id: str, commit: str, expected: Expected) -> Download:
        """The download of one file of a repository at a commit; `what` names it in messages."""
        path = expected.path
        prefix = "" if kind == "model" else f"{kind}s/"
        return Download(
            what=what,
            url=f"{self.endpoint}/{prefix}{quote(id)}/resolve/{commit}/{quote(path)}",
            expected=expected,
            token=self._token,
            refused=lambda status, code: self._errors.file_error(kind, id, path, status, code),
        )

    def read(self, repository: Repository, file: RemoteFile) -> bytes:
        """The bytes of a config or a module at the repository's commit, checked like all files.

        Raises:
            UsageError: the file is larger than any known config or module.
            StageError: as for `Downloader.fetch`.
        """
        limit = MAX_CODE if file.path.endswith(".py") else MAX_CONFIG
        if file.size > limit:
            raise UsageError(
                f"{printable(file.path)} of {repository.id} has "
                f"{human_size(file.size)}. It must be read to know what else is needed, and "
                f"the limit is {human_size(limit)}.",
                "Try another revision: configs, tokenizers and modules in use are smaller.",
            )
        download = self.download(file.path, repository.kind, repository.id, repository.commit, file)
        with TemporaryDirectory(prefix="airlift-") as folder:
            target = Path(folder, "file")
            self._downloader.fetch(download, target, lambda count: None)
            return target.read_bytes()

    def _call(self, kind: str, id: str, revision: str, ask: Callable[[], T]) -> T:
        """What `ask` returns, with retries. Raises as `repository`; the caller names the asset."""
        if is_offline_mode():
            raise UsageError(
                "HF_HUB_OFFLINE is set, so no request to the Hub is allowed.",
                "unset HF_HUB_OFFLINE",
            )
        try:
            with about(self.name):
                return self._downloader.retries.call(
                    self.name, ask, advice=" Behind a firewall, name a mirror with --endpoint."
                )
        except (HFValidationError, HfHubHTTPError) as error:
            raise self._errors.api_error(kind, id, revision, error) from None
        except MALFORMED as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            raise IncompleteError(
                f"the answer of {self.name} makes no sense ({problem}).",
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
