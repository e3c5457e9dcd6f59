"""A Hub's API: a repository and a revision become a commit, a listing, and the files' addresses.

The requests (`api`) go over our own connections, which have a time limit, the site's certificates
and proxies; our retries are around them (docs/adr/0003).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import RepoFile, constants, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from stage.digests import Digest, Expected, is_hex
from stage.download.downloader import Downloader
from stage.download.request import Download
from stage.errors import IncompleteError, UsageError, without_secrets
from stage.files import MAX_NUMBER, human_size
from stage.hub.api import HubApi
from stage.hub.model_files import RemoteFile
from stage.hub.refusals import DEFAULT_ENDPOINT, MALFORMED, HubErrors
from stage.lock.licences import stated
from stage.paths import printable, problem_with_address

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

        return self._call(what, kind, id, revision, pin)

    def files(self, what: str, repository: Repository) -> dict[str, RemoteFile]:
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
