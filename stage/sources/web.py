"""Addresses: one file at an http, https or ftp address becomes an asset, as it is, unpacked or converted.

What the lock pins is the file at the address (size, sha256); what travels is made of it by `stage.making`. Without a
`sha256` in the manifest the first fetch pins what it got.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import unquote, urlsplit

from stage.asset import Ingredient, LockedAsset, Source
from stage.digest import Digest
from stage.errors import IncompleteError, StageError, UsageError
from stage.manifest import Manifest
from stage.names import check_path
from stage.request import UrlRequest, as_lock_request, way_without
from stage.sources.download import Downloader
from stage.sources.ftp import FtpFile
from stage.sources.http import without_credentials
from stage.sources.hub import timeout_s
from stage.sources.wanted import Download


def resolve_url(name: str, request: UrlRequest, downloader: Downloader, manifest: Manifest) -> LockedAsset:
    """Asks the server how large the file is, and pins what is known of it.

    Raises:
        UsageError: an address that cannot be used, or that the server refuses.
        PolicyError: a file name that may not be in a bundle.
        IncompleteError: the server cannot be reached.
    """
    what = f"{manifest.place(name, 'url')}: `{name}`"
    parts = urlsplit(request.url)
    if parts.username or parts.password:
        raise UsageError(
            f"{what}: the address has a user name or password in it, and would travel in the bundle.",
            "Fetch the file yourself and name it with `path:`.",
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
    """The last part of an address's path.

    Raises:
        UsageError: it has none.
    """
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not name:
        raise UsageError(f"{what}: the address ends in `/`, so the file has no name.", "Give the address of a file.")
    return name


def download_of(name: str, ingredient: Ingredient, downloader: Downloader | None, what: str | None = None) -> Download:
    """How to get the file at an address.

    Args:
        downloader: asks the server for a version to hold on to, where no digest is known; None: don't.
    """
    what = what or f"{name}: {without_credentials(ingredient.origin)}"
    evidence = (Digest("sha256", ingredient.sha256),) if ingredient.sha256 else ()
    download = Download(
        what=what,
        url=ingredient.origin,
        size=ingredient.size,
        evidence=evidence,
        refused=lambda status, code: _refused(what, ingredient.origin, status),
        redirects_expire=False,
        pin="The file at that address changed, or the sha256 is not its own: look there. If that file is meant, write "
        f"its `sha256` into the manifest; where that has none: --update {name}",
        source=FtpFile(ingredient.origin, what, timeout_s()) if urlsplit(ingredient.origin).scheme == "ftp" else None,
    )
    if downloader is not None and (not evidence or download.size is None):
        size, version = downloader.probe(download)
        download = replace(download, size=size if ingredient.size is None or not evidence else ingredient.size)
        download = replace(download, version=version)
    return download


def _refused(what: str, url: str, status: int) -> StageError:
    shown = without_credentials(url)
    if status in (401, 403, 404, 410):
        words = "is not there" if status in (404, 410) else "is not given to everybody"
        return UsageError(f"{what}: {shown} {words} (HTTP {status}).", "Check the address in a browser.")
    return IncompleteError(f"{what}: HTTP {status} from {shown}.", "Try again later.")
