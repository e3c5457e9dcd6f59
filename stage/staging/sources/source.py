"""`Sources` resolves requests and fetches files. Only it uses the network in a fetch.

`resolve` turns a manifest's request into a `LockedAsset`. `bring` fetches the bytes of a
`LockedFile`, hashes them and compares them with the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stage.digests import Expected, FileDigests, hash_file, is_hex
from stage.download.retry import RetryPolicy
from stage.errors import IncompleteError, UsageError
from stage.lock.manifest import Manifest
from stage.lock.model import Code, Ingredient, LockedAsset, LockedFile
from stage.lock.requests import (
    DatasetRequest,
    EnvironmentRequest,
    MetricRequest,
    ModelRequest,
    PathRequest,
    Request,
    UrlRequest,
)
from stage.progress import Reporter

_OF_A_HUB = (ModelRequest, DatasetRequest, MetricRequest)
_HUB_KINDS = {"dataset": "dataset", "metric": "space"}
"""Kind of an asset -> kind of its repository, where that is not `model`."""

if TYPE_CHECKING:
    from stage.environment.solve.indexes import PrivateAddresses
    from stage.hub.client import Hub
    from stage.hub.lookup import RepositoryLookup
    from stage.staging.sources.listing import Listing


class Sources:
    """The sources of assets: the Hub, URLs, files beside the manifest, package indexes.

    Args:
        endpoint: URL of the Hub; None: $HF_ENDPOINT, else the public Hub.
        at_once: downloads at the same time.
        allow_pickle: take models that have only pickles, to be converted to safetensors
        (`stage.convert.pickled_weights`).
        keep_locks: write the lock of a newly locked environment beside it (not in a dry run).
    """

    def __init__(
        self,
        endpoint: str | None,
        reporter: Reporter,
        *,
        at_once: int = 4,
        allow_pickle: bool = False,
        keep_locks: bool = True,
    ) -> None:
        from stage.download.downloader import Downloader
        from stage.download.http import Connections, timeout_s, tls_context
        from stage.hub.client import Hub

        connections = Connections(read_timeout_s=timeout_s(), at_once=at_once, trust=tls_context())
        self._downloader = Downloader(connections, reporter, RetryPolicy())
        self._hub = Hub(endpoint, self._downloader)
        self._reporter = reporter
        self._private: PrivateAddresses | None = None
        self._listings: Mapping[str, Listing] = {}
        self._lock = threading.Lock()
        self.allow_pickle, self.at_once, self._keep_locks = allow_pickle, at_once, keep_locks

    @property
    def endpoint(self) -> str:
        """The URL of the Hub, without credentials."""
        return self._hub.name

    @property
    def hub(self) -> Hub:
        """The Hub itself, for `stage trace`."""
        return self._hub

    @property
    def taken_over(self) -> int:
        """Bytes that an earlier run had downloaded already."""
        return self._downloader.taken_over

    def stop(self) -> None:
        """Ends all downloads soon; their bytes are kept for the next run."""
        self._downloader.stop.set()

    def resolve(self, name: str, request: Request, manifest: Manifest) -> LockedAsset:
        """Resolves one entry of a manifest to exact files.

        Raises:
            StageError: as in `stage.hub.models`, `stage.hub.datasets` and `stage.local`.
        """
        try:
            return self._resolve(name, request, manifest, f"{manifest.place(name)}: `{name}`")
        except (UsageError, IncompleteError) as error:
            if not isinstance(request, ModelRequest | DatasetRequest):
                raise
            id = request.repository
            if not (manifest.path.parent / id).is_dir():
                raise
            hint = f"A folder {id} lies beside the manifest: if that is meant, write `path: {id}`."
            raise type(error)(error.message, f"{hint} Else: {error.remedy}") from None

    def _resolve(self, name: str, request: Request, manifest: Manifest, what: str) -> LockedAsset:
        from stage.hub.datasets import resolve_dataset
        from stage.hub.models import resolve_model
        from stage.staging.sources.files import resolve_path
        from stage.staging.sources.url import resolve_url

        match request:
            case ModelRequest():
                return resolve_model(
                    name,
                    request,
                    self._hub,
                    self._reporter,
                    what,
                    allow_pickle=self.allow_pickle,
                )
            case MetricRequest():
                from stage.hub.metrics import resolve_metric

                return resolve_metric(name, request, self._hub, self._reporter, what)
            case DatasetRequest():
                return resolve_dataset(name, request, self._hub, self._reporter, what)
            case PathRequest():
                return resolve_path(name, request, self._listing(name, request, manifest), manifest)
            case UrlRequest():
                return resolve_url(name, request, self._downloader, manifest)
            case EnvironmentRequest():
                from stage.staging.sources.environment import resolve_environment

                return resolve_environment(
                    name,
                    request,
                    manifest,
                    self._downloader,
                    self._private_addresses(),
                    self._reporter,
                    write=self._keep_locks,
                )

    def look_at_local(self, manifest: Manifest, required: Collection[str]) -> Mapping[str, Listing]:
        """Lists the files of all `path:` entries. `resolve` then hashes the same files.

        Raises:
            StageError: as for `stage.staging.sources.listing.look`.
        """
        from stage.staging.sources.listing import look

        self._listings = look(manifest, required, self._reporter.note)
        return self._listings

    def _listing(self, name: str, request: PathRequest, manifest: Manifest) -> Listing:
        from stage.staging.sources.listing import list_path

        return self._listings.get(name) or list_path(name, request, manifest)

    def _private_addresses(self) -> PrivateAddresses:
        from stage.environment.solve.indexes import PrivateAddresses

        with self._lock:
            self._private = self._private or PrivateAddresses()
            return self._private

    def look_up(self, name: str) -> RepositoryLookup:
        """Finds out whether a name is a model or a dataset.

        Raises:
            StageError: as for `stage.hub.lookup`.
        """
        from stage.hub.lookup import look_up

        return look_up(self._hub, name)

    def check_unchanged(self, asset: LockedAsset, request: Request, manifest: Manifest) -> None:
        """Checks that local files, if they exist, are still the files that the lock pins.

        Raises:
            UsageError: a file changed, came or went since it was locked.
        """
        from stage.staging.sources.files import resolve_path
        from stage.staging.sources.listing import local_base

        _check_answers(asset, request, manifest)
        if isinstance(request, EnvironmentRequest):
            from stage.staging.sources.environment import check_lock_unchanged

            check_lock_unchanged(asset, request, manifest)
        if isinstance(request, PathRequest) and local_base(request.path, manifest).exists():
            listing = self._listing(asset.name, request, manifest)
            now, then = (
                _digests(resolve_path(asset.name, request, listing, manifest)),
                _digests(asset),
            )
            if now != then:
                path = min(path for path in {*now, *then} if now.get(path) != then.get(path))
                how = (
                    "changed"
                    if path in now and path in then
                    else "is new"
                    if path in now
                    else "is gone"
                )
                named = path.removeprefix(f"{asset.folder}/")
                raise UsageError(
                    f"{manifest.place(asset.name)}: `{asset.name}`: {named} {how} since "
                    f"{manifest.lock_path.name} was written.",
                    f"To take the files of `{asset.name}` as they are now: "
                    f"{manifest.update_command(asset.name)}",
                )

    def bring(
        self,
        asset: LockedAsset,
        file: LockedFile,
        manifest: Manifest,
        target: Path,
        progress: Callable[[int], None],
    ) -> FileDigests:
        """Fetches one file into its place.

        Raises:
            DamageError, UsageError: its bytes are not as locked.
            IncompleteError: the network failed; run again.
        """
        from stage.staging.sources.files import bring_local, local_file, take_as_it_is

        if asset.source.type == "path":
            source = local_file(asset, file.origin, manifest)
            return bring_local(source, file, target, progress, take_as_it_is(asset, manifest))
        if asset.source.type == "environment":
            from stage.staging.sources.environment import fetch_package

            private = self._private_addresses()
            return fetch_package(asset, file, manifest, self._downloader, private, target, progress)
        code = next((code for code in asset.code if file.path in code.files), None)
        return self._from_hub(asset, file.expected, target, progress, code)

    def bring_ingredient(
        self,
        asset: LockedAsset,
        ingredient: Ingredient,
        manifest: Manifest,
        target: Path,
        progress: Callable[[int], None],
    ) -> tuple[Path, FileDigests]:
        """Fetches a file that others are made from.

        Returns:
            Its path, which is `target` or that of a local file, and its digests.

        Raises:
            DamageError, UsageError: its bytes are not as locked.
            IncompleteError: the network failed; run again.
        """
        from stage.staging.sources.files import unchanged
        from stage.staging.sources.url import download_of

        if asset.source.type == "path":
            return unchanged(asset, ingredient, manifest, progress)
        if target.is_file():  # an earlier run got this far
            digests = _as_announced(target, ingredient)
            if digests is not None:
                progress(digests.size)
                return target, digests
            target.unlink()
        if asset.source.type == "url":
            download = download_of(asset.name, ingredient, self._downloader)
            return target, self._downloader.fetch(download, target, progress)
        return target, self._from_hub(asset, ingredient.expected, target, progress)

    def _from_hub(
        self,
        asset: LockedAsset,
        expected: Expected,
        target: Path,
        progress: Callable[[int], None],
        code: Code | None = None,
    ) -> FileDigests:
        id, commit = asset.source.repository, asset.source.commit or ""
        if asset.source.parquet_commit and expected.path.endswith(".parquet"):
            commit = asset.source.parquet_commit
        if code is not None:
            id, commit = code.repository, code.commit
        kind = _HUB_KINDS.get(asset.kind, "model")
        what = f"{asset.name}: {expected.path}"
        download = self._hub.download(what, kind, id, commit, expected)
        return self._downloader.fetch(download, target, progress)


def _digests(asset: LockedAsset) -> dict[str, str | None]:
    """The sha256 of each local file of a `path:` asset, by its path beside the manifest."""
    return {i.origin: i.sha256 for i in asset.made_from} or {
        file.path: file.sha256 for file in asset.files
    }


def _as_announced(path: Path, ingredient: Ingredient) -> FileDigests | None:
    """The digests of a file, if it is the locked one; None if not, or if no digest is known."""
    expected = ingredient.expected
    if not expected.evidence:
        return None
    digests = hash_file(path, git=expected.needs_git)
    return digests if expected.mismatch(digests) is None else None


def _check_answers(asset: LockedAsset, request: Request, manifest: Manifest) -> None:
    """Checks that the lock agrees with the pins of the manifest: another user may have written it.

    Raises:
        UsageError: it does not.
    """
    pinned: list[tuple[str, object, object]] = []
    if isinstance(request, UrlRequest):
        pinned = [
            ("url", request.url, i.origin)
            for i in asset.made_from or (Ingredient("nothing", None, None),)
        ]
        pinned += [("sha256", request.sha256, i.sha256) for i in asset.made_from if request.sha256]
    elif isinstance(request, _OF_A_HUB) and is_hex(request.revision, 40):
        pinned = [("revision", request.revision, asset.source.commit)]
    elif isinstance(request, PathRequest):
        pinned = [("path", request.path, asset.source.location)]
    for key, asked, locked in pinned:
        if asked != locked:
            raise UsageError(
                f"{manifest.place(asset.name, key)}: `{asset.name}`: "
                f"{manifest.lock_path.name} pins {locked} instead of {asked}.",
                "Find out where that lock comes from. To resolve again: "
                f"stage lock {manifest.path} --update {asset.name}",
            )
