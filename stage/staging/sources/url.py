"""One file at an http or https address: unchanged, unpacked or converted.

The lock pins the file at the address (size, sha256), and the files of the asset are made from it.
Without a `sha256` in the manifest, the first fetch pins the bytes that it received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.convert.archives import unpack
from stage.download.downloader import Download, Downloader
from stage.errors import IncompleteError, StageError, UsageError, about, without_secrets
from stage.files import FileDigests, hash_file
from stage.lock.model import Ingredient, LockedAsset, LockedFile
from stage.lock.requests import UrlRequest, way_without
from stage.paths import check_path
from stage.staging.sources.source import AssetSource, Made, Progress


class UrlSource(AssetSource[UrlRequest]):
    """A file at an address."""

    def resolve(self) -> LockedAsset:
        """Asks the server for the size of the file."""
        url, what = self.request.url, f"{self.run.manifest.place(self.name, 'url')}: `{self.name}`"
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise UsageError(
                f"{what}: the address has a user name or password in it, and the bundle would hold "
                "it.",
                "Download the file yourself and name it with `path:`.",
            )
        asset = self.new_asset("dataset" if self.request.convert else "files")
        with about(what):
            _check_name(asset, file_name(url))
        unknown = Ingredient(url, None, self.request.sha256)
        size, _ = self.run.downloader.probe(download_of(self.name, unknown, None, what))
        return replace(asset, made_from=(replace(unknown, size=size),))

    def check_unchanged(self, asset: LockedAsset) -> None:
        for ingredient in asset.made_from or [Ingredient("nothing", None, None)]:
            self.check_pin("url", self.request.url, ingredient.origin)
            self.check_pin("sha256", self.request.sha256 or ingredient.sha256, ingredient.sha256)

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        download = download_of(self.name, file, self.run.downloader)
        return self.run.downloader.fetch(download, target, progress)

    def fetch_input(
        self, asset: LockedAsset, ingredient: Ingredient, folder: Path, progress: Progress
    ) -> tuple[Path, FileDigests]:
        """As in the base class. A file without a known digest is taken over from an earlier run
        if the server says that its version is the same."""
        if ingredient.sha256 is not None:
            return super().fetch_input(asset, ingredient, folder, progress)
        download = download_of(self.name, ingredient, self.run.downloader)
        name = f"{download.identity.value[:12]}-{self.input_name(ingredient.origin)}"
        if download.version and (folder / name).is_file():
            return folder / name, hash_file(folder / name, progress=progress)
        return folder / name, self.run.downloader.fetch(download, folder / name, progress)

    def input_name(self, origin: str) -> str:
        """As in the base class. The lock may come from another person, and `%2F..` leads out."""
        with about(self.what):
            name = file_name(origin)
            check_path(name)
        return name

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        request, how = self.request, "download"
        files = {file_name(origin): path for origin, path in inputs.items()}
        for name in files:
            _check_name(asset, name)
        if request.unpack:
            (archive,), how = files.values(), "unpack"
            folder = out / "unpacked"
            files = {name: folder / name for name in unpack(archive, folder)}
        if request.convert:
            parquet = out / "parquet"
            return self.converted(asset, request.convert, request.separator, files, parquet)
        return asset, [
            (LockedFile(f"{asset.folder}/{name}", 0, None, None, name, how), path)
            for name, path in files.items()
        ]


def _check_name(asset: LockedAsset, name: str) -> None:
    check_path(f"{asset.folder}/{name}", way_without(asset.request))


def file_name(url: str) -> str:
    """The last part of the path of an address.

    Raises:
        UsageError: it is empty.
    """
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not name:
        raise UsageError(
            "the address ends in `/`, so the file has no name.",
            "Give the address of a file.",
        )
    return name


def download_of(
    name: str,
    file: LockedFile | Ingredient,
    downloader: Downloader | None,
    what: str | None = None,
) -> Download:
    """The download of the file at an address.

    Args:
        name: of the asset.
        downloader: where no digest is known, asks the server for a version (ETag or date), so that
            all parts are of one version; None: the server is not asked.
        what: names the asset in errors.
    """
    url = file.origin
    what = what or f"{name}: {without_secrets(url)}"
    download = Download(
        what=what,
        url=url,
        expected=file.expected,
        refused=lambda status, code: _refused(url, status),
        redirects_expire=False,
        pin="The file at that address changed, or the sha256 is of another file: check both. "
        "To accept the new file, write its `sha256` into the manifest; if the manifest has none: "
        f"--update {name}",
    )
    if downloader is not None and (file.sha256 is None or file.size is None):
        size, version = downloader.probe(download)
        expected = replace(download.expected, size=size)
        download = replace(download, expected=expected, version=version)
    return download


def _refused(url: str, status: int) -> StageError:
    shown = without_secrets(url)
    if status in (401, 403, 404, 410):
        problem = "does not exist" if status in (404, 410) else "is not public"
        return UsageError(f"{shown} {problem} (HTTP {status}).", "Check the address in a browser.")
    return IncompleteError(f"HTTP {status} from {shown}.", "Try again later.")
