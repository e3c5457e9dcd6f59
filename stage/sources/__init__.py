"""Everything that touches the network, behind one door: `Sources` resolves requests and brings files.

resolve: a manifest's request -> a `LockedAsset`; bring: a `LockedFile` -> bytes in place, hashed and compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stage.digest import Digest, FileDigests, hash_file
from stage.errors import UsageError
from stage.lockfile import Ingredient, LockedAsset, LockedFile
from stage.manifest import DatasetRequest, EnvironmentRequest, Manifest, ModelRequest, PathRequest, Request, UrlRequest
from stage.progress import Reporter
from stage.sources.retry import RetryPolicy

if TYPE_CHECKING:
    from stage.sources.environment.private import PrivateAddresses
    from stage.sources.lookup import LookedUp


class Sources:
    """Where assets come from.

    Args:
        endpoint: of the Hub; None: $HF_ENDPOINT, else the public one.
        at_once: downloads at a time.
        max_rate: bytes a second over all downloads together; None: no limit.
        allow_pickle: take models that have only pickles, to be converted to safetensors (`stage.weights`).
    """

    def __init__(
        self,
        endpoint: str | None,
        reporter: Reporter,
        *,
        at_once: int = 4,
        max_rate: float | None = None,
        allow_pickle: bool = False,
    ) -> None:
        from stage.sources.download import Downloader
        from stage.sources.http import Connections
        from stage.sources.hub import Hub, timeout_s
        from stage.sources.rate import RateLimit

        policy = RetryPolicy()
        connections = Connections(read_timeout_s=timeout_s(), at_once=at_once)
        self._downloader = Downloader(connections, reporter, policy, RateLimit(max_rate))
        self._hub = Hub(endpoint, reporter, policy, self._downloader.stop)
        self._reporter = reporter
        self._private: PrivateAddresses | None = None
        self._lock = threading.Lock()
        self.allow_pickle = allow_pickle

    @property
    def endpoint(self) -> str:
        """The Hub asked, without credentials."""
        return self._hub.name

    def stop(self) -> None:
        """Ends all work under way soon; what came is kept for the next run."""
        self._downloader.stop.set()

    def resolve(self, name: str, request: Request, manifest: Manifest) -> LockedAsset:
        """Finds out exactly what one entry of a manifest means today.

        Raises:
            StageError: of the kind that fits; see `sources.hub`, `sources.selection`, `sources.local`.
        """
        from stage.sources.datasets import resolve_dataset
        from stage.sources.local import resolve_path
        from stage.sources.models import resolve_model
        from stage.sources.web import resolve_url

        self._refuse_what_comes_later(name, request, manifest)
        what = f"{manifest.place(name)}: `{name}`"
        match request:
            case ModelRequest():
                return resolve_model(name, request, self._hub, what, allow_pickle=self.allow_pickle)
            case DatasetRequest():
                return resolve_dataset(name, request, self._hub, self._reporter, what)
            case PathRequest():
                return resolve_path(name, request, manifest)
            case UrlRequest():
                return resolve_url(name, request, self._downloader, manifest)
            case EnvironmentRequest():
                from stage.sources.environment.assets import resolve_environment

                return resolve_environment(
                    name, request, manifest, self._downloader, self._private_addresses(), self._reporter
                )

    def _private_addresses(self) -> PrivateAddresses:
        from stage.sources.environment.private import PrivateAddresses

        with self._lock:
            self._private = self._private or PrivateAddresses()
            return self._private

    def look_up(self, name: str) -> LookedUp:
        """Finds out whether a name is a model or a dataset.

        Raises:
            StageError: as for `sources.lookup`.
        """
        from stage.sources.lookup import look_up

        return look_up(self._hub, name)

    def check_unchanged(self, asset: LockedAsset, request: Request, manifest: Manifest) -> None:
        """Local files may change beside the manifest: what the lock pins must still be what lies there, if it does.

        Raises:
            UsageError: a file changed, came or went since it was locked.
        """
        from stage.sources.local import local_base, resolve_path

        if isinstance(request, EnvironmentRequest):
            from stage.sources.environment.assets import check_lock_unchanged

            check_lock_unchanged(asset, request, manifest)
        if isinstance(request, PathRequest) and local_base(request.path, manifest).exists():
            now, then = (
                {(i.origin, i.sha256) for i in a.made_from} or {(f.path, f.sha256) for f in a.files}
                for a in (resolve_path(asset.name, request, manifest), asset)
            )
            if now != then:
                path = sorted(now ^ then)[0][0].removeprefix(f"{asset.folder}/")
                raise UsageError(
                    f"{manifest.place(asset.name)}: `{asset.name}`: {path} changed since "
                    f"{manifest.lock_path.name} was written.",
                    f"To take it as it is now: stage fetch {manifest.path} --update {asset.name} -o ...",
                )

    def bring(
        self, asset: LockedAsset, file: LockedFile, manifest: Manifest, target: Path, progress: Callable[[int], None]
    ) -> FileDigests:
        """Brings one file into place.

        Raises:
            DamageError: its bytes are not the ones locked.
            IncompleteError: the network does not let us; run again.
        """
        from stage.sources.download import copy_hashed
        from stage.sources.local import local_file

        if asset.source.type == "path":
            source = local_file(asset, file.origin, manifest)
            digests = copy_hashed(source, target, file.size, progress) if source.is_file() else None
            if digests is None or digests.sha256 != file.sha256:
                target.unlink(missing_ok=True)
                raise UsageError(
                    f"{source}: {'changed' if digests else 'gone'} since it was locked.",
                    f"To take it as it is now: stage fetch {manifest.path} --update {asset.name} -o ...",
                )
            return digests
        if asset.source.type == "environment":
            from stage.sources.environment.assets import bring_package

            private = self._private_addresses()
            return bring_package(asset, file, manifest, self._downloader, private, target, progress)
        return self._from_hub(asset, file.origin, file.size, file.upstream, file.sha256, target, progress)

    def bring_ingredient(
        self,
        asset: LockedAsset,
        ingredient: Ingredient,
        manifest: Manifest,
        target: Path,
        progress: Callable[[int], None],
    ) -> tuple[Path, FileDigests]:
        """A file that others are made of: where it lies now (`target`, or where it was), and its digests.

        Raises:
            DamageError, UsageError: its bytes are not the ones locked.
            IncompleteError: the network does not let us; run again.
        """
        from stage.sources.local import unchanged
        from stage.sources.web import download_of

        if asset.source.type == "path":
            return unchanged(asset, ingredient, manifest, progress)
        if ingredient.sha256 and target.is_file():  # an earlier run got this far
            digests = hash_file(target)
            if digests.sha256 == ingredient.sha256:
                progress(digests.size)
                return target, digests
            target.unlink()
        if asset.source.type == "url":
            download = download_of(asset.name, ingredient, self._downloader)
            return target, self._downloader.fetch(download, target, progress)
        size = ingredient.size or 0
        return target, self._from_hub(
            asset, ingredient.origin, size, ingredient.upstream, ingredient.sha256, target, progress
        )

    def _from_hub(
        self,
        asset: LockedAsset,
        origin: str,
        size: int,
        upstream: Digest | None,
        sha256: str | None,
        target: Path,
        progress: Callable[[int], None],
    ) -> FileDigests:
        evidence = [upstream] if upstream else []
        if sha256:
            evidence.append(Digest("sha256", sha256))
        commit = asset.source.commit or ""
        if asset.source.parquet_commit and origin.endswith(".parquet"):
            commit = asset.source.parquet_commit
        kind = "dataset" if asset.kind == "dataset" else "model"
        what = f"{asset.name}: {origin}"
        download = self._hub.download(what, kind, asset.source.repository, commit, origin, size, *evidence)
        return self._downloader.fetch(download, target, progress)

    @staticmethod
    def _refuse_what_comes_later(name: str, request: Request, manifest: Manifest) -> None:
        later = {
            "allow_code": bool(getattr(request, "allow_code", False)),
        }
        for key, asked in later.items():
            if asked:
                raise UsageError(
                    f"{manifest.place(name, key)}: asset `{name}`: this version does not do `{key}` yet.",
                    "Take the entry out for now.",
                )
