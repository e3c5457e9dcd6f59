"""Files of a repository that have to be read to know what else is needed: configs, and code."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from stage.disk import human_size
from stage.errors import UsageError
from stage.names import printable
from stage.sources.download import Downloader
from stage.sources.hub import Hub, Repository
from stage.sources.selection import RemoteFile

MAX_CONFIG = 32 * 2**20  # bytes: the largest tokenizer's config is a tenth of that
MAX_CODE = 4 * 2**20  # parsing takes a hundred times as much memory


class SmallFiles:
    """Reads single files, checked against the Hub's digests like all others."""

    def __init__(self, hub: Hub, downloader: Downloader) -> None:
        self._hub, self._downloader = hub, downloader

    def read(self, repository: Repository, file: RemoteFile, what: str) -> bytes:
        """The bytes of a file at the repository's commit.

        Raises:
            UsageError: it is larger than any config or module.
            StageError: as for `Downloader.fetch`.
        """
        limit = MAX_CODE if file.path.endswith(".py") else MAX_CONFIG
        if file.size > limit:
            raise UsageError(
                f"{what}: {printable(file.path)} of {repository.id} has {human_size(file.size)}; it has to be read to "
                f"know what else is needed, and may have {human_size(limit)}.",
                "Try another revision: no config, tokenizer or module that is in use is as large.",
            )
        words = f"{what}: {file.path}"
        download = self._hub.download(
            words, repository.kind, repository.id, repository.commit, file.path, file.size, file.evidence
        )
        with TemporaryDirectory(prefix="airlift-") as folder:
            target = Path(folder, "file")
            self._downloader.fetch(download, target, lambda count: None)
            return target.read_bytes()
