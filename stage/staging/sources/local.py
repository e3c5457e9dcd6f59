"""Files of this machine: a `path:` entry becomes an asset of files or a dataset.

`listing` says which files. They are hashed here, and copied if they are still as they were locked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from stage.download.partial_file import copy_verified
from stage.errors import Mistakes, Place, UsageError, about
from stage.files import FileDigests, MismatchError, hash_file
from stage.lock.manifest import Manifest
from stage.lock.model import Ingredient, LockedAsset, LockedFile
from stage.lock.requests import PathRequest, way_without
from stage.paths import check_path, check_paths
from stage.staging.sources.listing import Listing, list_path
from stage.staging.sources.source import AssetSource, FetchRun, Made, Progress


def local_base(path: str, manifest: Manifest) -> Path:
    """The file or folder that a `path:` entry names, relative to the manifest's folder.

    Raises:
        RuntimeError: there is no home folder for `~`.
    """
    return manifest.path.parent / Path(path).expanduser()


def check_csv_headers(
    name: str, request: PathRequest, listing: Listing, manifest: Manifest, mistakes: Mistakes
) -> None:
    """Checks the separator of CSV files before anything is downloaded, which may take hours."""
    from stage.convert.readers import check_csv

    for path in listing.sizes:
        with mistakes, about(manifest.entry(name, "path")):
            or_omit = f', or omit it: exclude: ["{path}"]' if len(listing.sizes) > 1 else ""
            check_csv(path, listing.file(path), request.separator, or_omit)


class PathSource(AssetSource[PathRequest]):
    """A file or folder beside the manifest."""

    # A pin says what a bundle holds. A file that never entered one (its conversion failed, for
    # example) may be corrected: the next run takes it as it is then.
    is_pinned_when_resolved = False

    def __init__(self, name: str, request: PathRequest, run: FetchRun) -> None:
        super().__init__(name, request, run)
        self._digests: dict[tuple[object, ...], FileDigests] = {}

    @cached_property
    def _base(self) -> Path:
        return local_base(self.request.path, self.run.manifest)

    @cached_property
    def _is_one_file(self) -> bool:
        return self._base.is_file()

    @cached_property
    def _listing(self) -> Listing:
        with about(self.run.manifest.entry(self.name, "path")):
            return list_path(self.request, self.run.manifest)

    def look(self, mistakes: Mistakes, *, required: bool) -> Mapping[str, int]:
        if not required and not self._is_there():
            return {}
        with mistakes:
            listing = self._listing
            if listing.left:
                place = self.run.manifest.place(self.name, "path")
                self.run.reporter.note(
                    f"{place}: `{self.name}`: left out: {listing.left} "
                    "(name them in `include` to take them)"
                )
            if self.request.convert is None:
                return {f"data/files/{self.name}/{p}": size for p, size in listing.sizes.items()}
            if self.request.convert == "csv":
                check_csv_headers(self.name, self.request, listing, self.run.manifest, mistakes)
        return {}  # the size of a converted file is not known yet

    def _is_there(self) -> bool:
        try:
            return self._base.exists()
        except RuntimeError:  # no such home folder
            return False

    def resolve(self) -> LockedAsset:
        """Hashes the files that the entry takes."""
        listing, request = self._listing, self.request
        asset = replace(self.new_asset("files"), left_out=listing.left_out)
        targets = {path: f"{asset.folder}/{path}" for path in listing.sizes}
        with about(self.run.manifest.entry(self.name, "path")):
            check_paths([*targets.values()], way_without(asset.request))
        digests = {path: self._hashed(listing.file(path)) for path in targets}
        if request.convert:
            made_from = [Ingredient(path, d.size, d.sha256) for path, d in digests.items()]
            return replace(asset, kind="dataset", made_from=tuple(made_from))
        files = [
            LockedFile(targets[path], d.size, d.sha256, None, path) for path, d in digests.items()
        ]
        return replace(asset, files=tuple(files))

    def check_unchanged(self, asset: LockedAsset) -> None:
        self.check_pin("path", self.request.path, asset.source.location)
        if not self._is_there():
            return
        now, then = _digests(self.resolve()), _digests(asset)
        for path in sorted({*now, *then}):
            if now.get(path) == then.get(path):
                continue
            changed = "is gone" if path not in now else "changed" if path in then else "is new"
            manifest = self.run.manifest
            raise UsageError(
                f"{self.what}: {path} {changed} since {manifest.lock_path.name} was written.",
                f"To take the files of `{self.name}` as they are now: "
                f"{manifest.update_command(self.name)}",
            )

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        return bring_local(self._local(file.origin), file, target, progress, self._remedy)

    def fetch_input(
        self, asset: LockedAsset, ingredient: Ingredient, folder: Path, progress: Progress
    ) -> tuple[Path, FileDigests]:
        """Reads the file where it is: it is not copied."""
        path = self._local(ingredient.origin)
        with _as_locked(path, self._remedy):
            digests = ingredient.expected.check(self._hashed(path))
        progress(digests.size)
        return path, digests

    def _hashed(self, path: Path) -> FileDigests:
        """The digests of a local file, which is read once in a run: a table may be large.

        It is read again if it changed meanwhile: each change moves the ctime.
        """
        status = path.stat()
        key = (path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if key not in self._digests:
            self._digests[key] = hash_file(path)
        return self._digests[key]

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        request = self.request
        return self.converted(asset, request.convert or "", request.separator, inputs, out)

    def _local(self, origin: str) -> Path:
        with about(Place(str(self.run.manifest.lock_path), name=self.name)):
            check_path(origin)
        return self._base if self._is_one_file else self._base / origin

    @property
    def _remedy(self) -> str:
        return f"To take it as it is now: {self.run.manifest.update_command(self.name)}"


def _digests(asset: LockedAsset) -> dict[str, str | None]:
    """The sha256 of each local file, by its path beside the manifest."""
    folder = f"{asset.folder}/"
    return {i.origin: i.sha256 for i in asset.made_from} or {
        file.path.removeprefix(folder): file.sha256 for file in asset.files
    }


def bring_local(
    source: Path, file: LockedFile | Ingredient, target: Path, progress: Progress, remedy: str
) -> FileDigests:
    """Copies a local file to `target`, if it has not changed since it was locked.

    Args:
        remedy: of the error.

    Raises:
        UsageError: it is gone or changed; `target` is as before then.
    """
    with _as_locked(source, remedy):
        return copy_verified(source, target, file.expected, progress)


@contextmanager
def _as_locked(path: Path, remedy: str) -> Iterator[None]:
    """Inside it, a local file is read that must be as a lock has it."""
    if not path.is_file():
        raise UsageError(f"{path}: gone since it was locked.", remedy)
    try:
        yield
    except MismatchError:
        raise UsageError(f"{path}: changed since it was locked.", remedy) from None
