"""One file at an http or https address becomes an asset: unchanged, unpacked or converted.

The lock pins the file at the address (size, sha256); `stage.staging.build` makes the files of the
asset from it. Without a `sha256` in the manifest, the first fetch pins the bytes that it received.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import unquote, urlsplit

from stage.download.downloader import Downloader
from stage.download.http import without_credentials
from stage.download.request import Download
from stage.errors import IncompleteError, StageError, UsageError
from stage.lock.manifest import Manifest
from stage.lock.model import Ingredient, LockedAsset, Source
from stage.lock.requests import UrlRequest, as_lock_request, way_without
from stage.paths import check_path


def resolve_url(
    name: str, request: UrlRequest, downloader: Downloader, manifest: Manifest
) -> LockedAsset:
    """Asks the server for the size of the file, and returns the locked asset.

    Args:
        name: of the asset.

    Raises:
        UsageError: an address that cannot be used, or that the server refuses.
        PolicyError: a file name that is not allowed in a bundle.
        IncompleteError: the server cannot be reached.
    """
    what = f"{manifest.place(name, 'url')}: `{name}`"
    parts = urlsplit(request.url)
    if parts.username or parts.password:
        raise UsageError(
            f"{what}: the address has a user name or password in it, and the bundle would hold it.",
            "Download the file yourself and name it with `path:`.",
        )
    asset = LockedAsset(
        name=name,
        kind="dataset" if request.convert else "files",
        request=as_lock_request(request),
        source=Source("url", request.url),
        files=(),
    )
    check_path(f"{asset.folder}/{file_name(request.url, what)}", what, way_without(asset.request))
    unknown = Ingredient(request.url, None, request.sha256)
    size, _ = downloader.probe(download_of(name, unknown, None, what))
    return replace(asset, made_from=(replace(unknown, size=size),))


def file_name(url: str, what: str) -> str:
    """The last part of the path of an address.

    Args:
        what: names the asset in the error.

    Raises:
        UsageError: it is empty.
    """
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not name:
        raise UsageError(
            f"{what}: the address ends in `/`, so the file has no name.",
            "Give the address of a file.",
        )
    return name


def download_of(
    name: str, ingredient: Ingredient, downloader: Downloader | None, what: str | None = None
) -> Download:
    """The download of the file at an address.

    Args:
        name: of the asset.
        downloader: where no digest is known, asks the server for a version (ETag or date), so that
            all parts are of one version; None: the server is not asked.
        what: names the asset in errors.
    """
    what = what or f"{name}: {without_credentials(ingredient.origin)}"
    download = Download(
        what=what,
        url=ingredient.origin,
        expected=ingredient.expected,
        refused=lambda status, code: _refused(what, ingredient.origin, status),
        redirects_expire=False,
        pin="The file at that address changed, or the sha256 is of another file: check both. "
        "To accept the new file, write its `sha256` into the manifest; if the manifest has none: "
        f"--update {name}",
    )
    if downloader is not None and (ingredient.sha256 is None or ingredient.size is None):
        size, version = downloader.probe(download)
        expected = replace(download.expected, size=size)
        download = replace(download, expected=expected, version=version)
    return download


def _refused(what: str, url: str, status: int) -> StageError:
    shown = without_credentials(url)
    if status in (401, 403, 404, 410):
        problem = "does not exist" if status in (404, 410) else "is not public"
        return UsageError(
            f"{what}: {shown} {problem} (HTTP {status}).", "Check the address in a browser."
        )
    return IncompleteError(f"{what}: HTTP {status} from {shown}.", "Try again later.")
