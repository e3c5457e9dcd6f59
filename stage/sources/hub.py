"""The Hub: a repository and a revision become a commit, a listing, and addresses of files.

Tokens, headers, pages, the rules of names and the meaning of errors are huggingface_hub's; what this room adds is
patience (the client gives up at the first 429 or reset on metadata), and `refusals` the words. The two answers it needs
are asked for by the addresses of `HfApi.repo_info` and `list_repo_tree` (hf_api.py): `HfApi` itself takes as long to
import as fifty small files to bring. (docs/adr/0042)
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, set_client_factory
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

from stage import __version__
from stage.digest import Digest, is_hex
from stage.disk import MAX_NUMBER
from stage.errors import IncompleteError, StageError, UsageError
from stage.licences import stated
from stage.names import problem_with_address
from stage.progress import Reporter
from stage.sources.answers import SENSELESS, guarded_client
from stage.sources.http import without_credentials
from stage.sources.refusals import DEFAULT_ENDPOINT, Refusals
from stage.sources.responses import untrusted
from stage.sources.retry import RETRIED_STATUS, Patience, RetryPolicy, asked_delay
from stage.sources.selection import RemoteFile
from stage.sources.wanted import Download
from stage.sources.xet import XetFile, XetStore

if TYPE_CHECKING:
    from huggingface_hub.file_download import HfFileMetadata

MAX_FILES = 1_000_000  # of a repository: ten times what the Hub advises
DEFAULT_TIMEOUT_S = 10.0  # huggingface_hub's own default for a read

T = TypeVar("T")


@dataclass(frozen=True)
class Repository:
    """A repository at a commit.

    Attributes:
        kind: `model` or `dataset`.
        id: its name today; differs from the one asked for if that redirects.
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
        stop: as for `Downloader`.
        trust: as for `Connections`.
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
                f"the endpoint `{self.endpoint}` is no address: it does not begin with https:// or http://.",
                f"Such as: https://{self.endpoint}",
            )
        if problem := problem_with_address(self.endpoint):
            raise UsageError(f"the endpoint `{self.endpoint}` is no address: {problem}.", "Such as: https://hf.co")
        self._reporter, self._policy, self._stop = reporter, policy, stop
        self._token = get_token()
        self._refusals = Refusals(self.endpoint, bool(self._token), self._info)
        self._answered = False  # whether it ever did
        # Else the client asks huggingface.co, whatever our endpoint is, for things to put into its User-Agent, and
        # behind a firewall waits for that.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        self._headers = build_hf_headers(
            token=self._token or False, library_name="airlift", library_version=__version__
        )
        set_client_factory(lambda: guarded_client(self.endpoint, timeout_s(), trust))

    def repository(self, what: str, kind: str, id: str, revision: str) -> Repository:
        """Pins a revision (branch, tag, commit, `refs/...`) to a commit.

        Raises:
            UsageError: no such repository or revision, gated, or disabled.
            IncompleteError: the Hub cannot be reached.
        """

        def pin() -> Repository:
            info = self._info(kind, id, f"/revision/{quote(revision, safe='')}")
            commit, name, card = info.get("sha"), info["id"], info.get("cardData") or {}
            if commit is None or not is_hex(commit, 40):
                raise IncompleteError(
                    f"{what}: {self.name} does not say which commit `{revision}` is.", "Try another --endpoint."
                )
            if not isinstance(card, dict):
                raise ValueError("its card is no mapping")
            tagged = [t.partition(":")[2] for t in info.get("tags") or [] if t.startswith("license:")]
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

    def files(self, what: str, repository: Repository) -> list[RemoteFile]:
        """Every file of a repository at its commit, from the tree (one request a thousand files)."""

        def listing() -> list[RemoteFile]:
            validate_repo_id(repository.id)
            address = f"{self._address(repository.kind, repository.id)}/tree/{repository.commit}"
            asked = {"recursive": True, "expand": False}
            files: dict[str, RemoteFile] = {}
            for entry in paginate(address, params=asked, headers=self._headers, timeout=timeout_s()):
                if entry["type"] == "file":
                    file = _remote_file(entry, what)
                    if file.path in files:  # no git tree can; pages that lead back to themselves do
                        raise ValueError(f"{file.path!a} is listed twice")
                    files[file.path] = file
                if len(files) > MAX_FILES:
                    raise ValueError(f"there are more than {MAX_FILES:,} files")
            return list(files.values())

        return self._call(what, repository.kind, repository.id, repository.commit, listing)

    def download(self, what: str, kind: str, id: str, commit: str, path: str, size: int, *evidence: Digest) -> Download:
        """How to get one file."""
        prefix = "datasets/" if kind == "dataset" else ""
        return Download(
            what=what,
            url=f"{self.endpoint}/{prefix}{quote(id)}/resolve/{commit}/{quote(path)}",
            size=size,
            evidence=evidence,
            token=self._token,
            refused=lambda status, code: self._refusals.refused(what, kind, id, path, status, code),
        )

    def through_xet(self, download: Download, kind: str, id: str, commit: str, size: int, store: XetStore) -> Download:
        """The same file out of the Xet store, if this Hub announces that it lies there (mirrors do not).

        Raises:
            StageError: as for `repository`.
        """
        token = self._token or False

        def ask() -> HfFileMetadata:
            from huggingface_hub import get_hf_file_metadata

            return get_hf_file_metadata(download.url, token=token, timeout=timeout_s(), endpoint=self.endpoint)

        announced = self._call(download.what, kind, id, commit, ask).xet_file_data
        if announced is None:
            return download
        self._reporter.note(f"{download.what}: from the Hub's Xet store: larger than it serves over HTTP")
        source = XetFile(
            store,
            download.what,
            announced.file_hash,
            size,
            announced.refresh_route,
            self.endpoint,
            self._token,
        )
        return replace(download, source=source, version=announced.file_hash)

    def _address(self, kind: str, id: str) -> str:
        return f"{self.endpoint}/api/{kind}s/{id}"

    def _info(self, kind: str, id: str, part: str = "") -> dict[str, Any]:
        """What the API says of a repository, or of a part of it.

        Raises:
            HFValidationError, HfHubHTTPError, httpx2.HTTPError: as from `HfApi`.
            TypeError, ValueError: no mapping in JSON.
        """
        validate_repo_id(id)
        response = get_session().get(self._address(kind, id) + part, headers=self._headers)
        hf_raise_for_status(response)
        answer = response.json()
        if not isinstance(answer, dict):
            raise TypeError(f"{type(answer).__name__} in place of a mapping")
        return answer

    @property
    def name(self) -> str:
        """The endpoint, fit for messages and for `bag-info.txt`."""
        return without_credentials(self.endpoint)

    def _call(self, what: str, kind: str, id: str, revision: str, ask: Callable[[], T]) -> T:
        patience = Patience(self._policy, self._stop, self._reporter)
        while True:
            unreached = False
            try:
                answer = ask()
                self._answered = True
                return answer
            except (StageError, OfflineModeIsEnabled, HFValidationError, HfHubHTTPError) as error:
                problem, asked_s = self._retried(error)
                if problem is None:
                    raise self._refusals.in_words(what, kind, id, revision, error) from None
            except httpx2.UnsupportedProtocol as error:
                raise self._refusals.senseless(what, error) from None
            except httpx2.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise untrusted(f"{what}: {self.name}", error) from None
                problem, asked_s = self._refusals.transport_problem(error), None
                unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and not self._answered
            except SENSELESS as error:
                raise self._refusals.senseless(what, error) from None
            try:
                patience.wait(f"{what}: {self.name}", problem, asked_s, unreached=unreached)
            except IncompleteError as error:
                raise IncompleteError(
                    error.message, f"{error.remedy} Behind a firewall, name a mirror with --endpoint."
                ) from None

    @staticmethod
    def _retried(error: Exception) -> tuple[str | None, float | None]:
        response = getattr(error, "response", None)
        if isinstance(error, HfHubHTTPError) and response is not None and response.status_code in RETRIED_STATUS:
            return f"HTTP {response.status_code}", asked_delay(response.headers)
        return None, None


def timeout_s() -> float:
    """Seconds a server may say nothing: $HF_HUB_DOWNLOAD_TIMEOUT, as for huggingface_hub."""
    try:
        return float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")) or DEFAULT_TIMEOUT_S
    except ValueError:
        return DEFAULT_TIMEOUT_S


def _remote_file(entry: Mapping[str, Any], what: str) -> RemoteFile:
    """The Hub's evidence: sha256 for an LFS file; else the git blob id (for LFS files that hashes the pointer).

    Raises:
        LookupError, TypeError, ValueError: no entry of a listing; a path that is none.
    """
    path, size, lfs = entry["path"], entry["size"], entry.get("lfs")
    if not isinstance(path, str) or not 0 < len(path) <= 4096:  # git's own limit, PATH_MAX
        raise ValueError(f"{str(path)[:80]!a} is no path")
    try:
        evidence = Digest("lfs-sha256", lfs["oid"]) if lfs else Digest("git-sha1", entry["oid"])
    except ValueError as error:
        raise IncompleteError(
            f"{what}: the listing of {path!a} makes no sense: {error}.", "Try another --endpoint."
        ) from None
    if type(size) is not int or not 0 <= size <= MAX_NUMBER:
        raise IncompleteError(f"{what}: the listing gives {path!a} no size.", "Try another --endpoint.")
    return RemoteFile(path, size, evidence)
