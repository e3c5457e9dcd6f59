"""A Hub's API over our own connections: its answers on a repository, in huggingface_hub's types.

huggingface_hub reads the answers and knows the classes of errors. It sends nothing itself: it has
one HTTP client for the whole process, which belongs to the program that calls `stage` (a notebook).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from urllib.parse import quote

import httpx2
from huggingface_hub import DatasetInfo, ModelInfo, RepoFile, SpaceInfo
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it re-exports without `as`
    hf_raise_for_status,
    validate_repo_id,
)

from stage.download.http import Connections, origin_of
from stage.download.retry import check_status
from stage.errors import without_secrets
from stage.paths import problem_with_address
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
            self._connections.errors(without_secrets(self._endpoint), self._endpoint, url),
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
    `stage.hub.refusals.MALFORMED` for an answer that no Hub gives.

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
