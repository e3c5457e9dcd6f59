"""An environment as an asset: a manifest's `environment:` entry with its `conda-lock.yml` -> which files travel.

Packages and tools travel as they are published (each with its address and sha256 in the lock); everything else in the
asset's folder is made here once they are there, by `stage.environment.assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.asset import Ingredient, LockedAsset, LockedEnvironment, LockedFile, PackageEntry, Source
from stage.digest import FileDigests, hash_file, sha256_of_bytes
from stage.environment.assemble import Assembly, assemble, check_holds_airlift
from stage.environment.lockfile import made_by_stage
from stage.environment.packages import LOCK_NAME, LockedPackages, lock_beside, read_packages
from stage.environment.profile import Profile
from stage.errors import IncompleteError, UsageError
from stage.manifest import Manifest
from stage.progress import Reporter
from stage.request import EnvironmentRequest, as_lock_request
from stage.sources.download import Downloader
from stage.sources.environment.lock import is_stale, lock_environment
from stage.sources.environment.private import Asked, PrivateAddresses
from stage.sources.environment.sdists import build_wheel
from stage.sources.environment.tools import lock_tools
from stage.sources.local import bring_local
from stage.sources.web import download_of

_AT_ONCE = 8


def resolve_environment(
    name: str,
    request: EnvironmentRequest,
    manifest: Manifest,
    downloader: Downloader,
    private: PrivateAddresses,
    reporter: Reporter,
    *,
    write: bool = True,
) -> LockedAsset:
    """Reads the lock beside the environment file, which is made now if none there answers it.

    The servers are asked how large each package is, and which tools travel with it.

    Args:
        write: whether a lock that had to be made is kept beside the environment file.

    Raises:
        UsageError: nothing to lock for, no solution, or a lock that lacks what airlift needs.
        PolicyError: as for `read_packages`.
        IncompleteError: an index or a channel cannot be reached.
    """
    lock, text = _lock_that_answers(name, request, manifest, reporter, write=write)
    profile_path = _profile(request, manifest)
    profile = Profile.load(profile_path) if profile_path else None
    locked = read_packages(text, str(lock), profile.platform if profile else None)
    check_holds_airlift(locked, str(lock))
    asset = LockedAsset(
        name=name,
        kind="environment",
        request=as_lock_request(request),
        source=Source("environment", request.environment),
        files=(),
        environment=LockedEnvironment(
            platform=locked.platform,
            virtual_packages=profile.virtual_packages() if profile else {},
            packages=tuple(PackageEntry(p.name, p.version, p.manager, p.path) for p in locked.packages),
        ),
    )
    addresses = {package.path: (package.url, package.sha256) for package in locked.packages}
    addresses |= {f"tools/{tool.file}": (tool.url, tool.sha256) for tool in lock_tools(locked.platform, reporter)}
    spec = manifest.path.parent / request.environment
    asked = {url: (f"{name}: {_shown(url)}", private.of(url, spec)) for url, _ in addresses.values()}
    sizes = _sizes(asked, downloader)
    files = [
        LockedFile(f"{asset.folder}/{path}", sizes[url], sha256, None, url) for path, (url, sha256) in addresses.items()
    ]
    digest = sha256_of_bytes(text)
    files.append(LockedFile(f"{asset.folder}/{LOCK_NAME}", len(text), digest, None, lock.name))
    made_from = [Ingredient(lock.name, len(text), digest)]
    made_from += [Ingredient(p.url, sizes[p.url], p.sha256) for p in locked.packages if p.is_sdist]
    return replace(asset, files=tuple(files), made_from=tuple(made_from))


def _lock_that_answers(
    asset: str, request: EnvironmentRequest, manifest: Manifest, reporter: Reporter, *, write: bool
) -> tuple[Path, bytes]:
    """The lock beside the environment file, and its text; made as by `stage env lock`, unless another tool made it."""
    what = f"{manifest.place(asset, 'environment')}: `{asset}`"
    lock, spec = lock_path(request, manifest), manifest.path.parent / request.environment
    for key, named in (("environment", spec), ("profile", _profile(request, manifest))):
        if named is not None and not named.is_file() and not (key == "environment" and lock.is_file()):
            raise UsageError(
                f"{manifest.place(asset, key)}: `{asset}`: there is no {named}.",
                "Paths are relative to the manifest's folder.",
            )
    if lock.is_file() and not made_by_stage(lock):
        reporter.note(f"{what}: {lock} was made by another tool, and is taken as it is")
    elif (profile := _profile(request, manifest)) is not None:
        made = lock_environment(spec, profile, reporter=reporter, output=lock, write=write)
        if made.changed:
            return lock, made.lock.to_yaml()
    elif not lock.is_file():
        raise UsageError(
            f"{what}: there is no {lock}, and no `profile` to make it for.",
            "Name the cluster's profile, such as `profile: profiles/a800.yml` (stage env probe prints one there).",
        )
    else:
        reporter.note(
            f"{what}: {lock} is taken as it is: without `profile:` nobody can tell whether it still answers {spec.name}"
        )
    return lock, lock.read_bytes()


def _profile(request: EnvironmentRequest, manifest: Manifest) -> Path | None:
    return manifest.path.parent / request.profile if request.profile is not None else None


def lock_path(request: EnvironmentRequest, manifest: Manifest) -> Path:
    """Where the lock of an environment is expected."""
    return lock_beside(manifest.path.parent / request.environment)


def check_lock_unchanged(asset: LockedAsset, request: EnvironmentRequest, manifest: Manifest) -> None:
    """The lock beside the environment file must still be the one that the asset was resolved from, if it is there.

    Raises:
        UsageError: it changed.
    """
    path = lock_path(request, manifest)
    pinned = next((i.sha256 for i in asset.made_from if i.origin == path.name), None)
    spec = manifest.path.parent / request.environment
    if (
        path.is_file()
        and request.profile is not None
        and spec.is_file()
        and is_stale(path, spec, manifest.path.parent / request.profile)
    ):
        raise UsageError(
            f"{manifest.place(asset.name)}: `{asset.name}`: {spec.name}, its profile or what airlift itself needs "
            f"changed since {path.name} was written.",
            f"To lock it anew: stage fetch {manifest.path} --update {asset.name} -o ...",
        )
    if path.is_file() and hash_file(path).sha256 != pinned:
        raise UsageError(
            f"{manifest.place(asset.name)}: `{asset.name}`: {path.name} changed since "
            f"{manifest.lock_path.name} was written.",
            f"To take it as it is now: stage fetch {manifest.path} --update {asset.name} -o ...",
        )


def bring_package(
    asset: LockedAsset,
    file: LockedFile,
    manifest: Manifest,
    downloader: Downloader,
    private: PrivateAddresses,
    target: Path,
    progress: Callable[[int], None],
) -> FileDigests:
    """Brings a package, a tool or the lock into place.

    Raises:
        DamageError: its bytes are not the ones locked.
        UsageError: a local file is gone or changed.
        IncompleteError: the network does not let us; run again.
    """
    if urlsplit(file.origin).scheme in ("http", "https"):
        ingredient = Ingredient(file.origin, file.size, file.sha256)
        asked = private.of(file.origin, manifest.path.parent / asset.source.location)
        download = replace(download_of(asset.name, ingredient, None), url=asked.url, login=asked.login)
        return downloader.fetch(download, target, progress)
    if file.origin.startswith("file:"):
        source = _local(file.origin)
    else:
        source = (manifest.path.parent / asset.source.location).with_name(file.origin)
    spec = manifest.path.parent / asset.source.location
    remedy = (
        f"Lock it as it is now: stage env lock {spec} --profile FILE --update PACKAGE, then: "
        f"stage fetch {manifest.path} --update {asset.name} -o ..."
    )
    return bring_local(source, file, target, progress, remedy)


def make_environment(
    asset: LockedAsset, folder: Path, out: Path, reporter: Reporter
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """Makes what travels beside the packages, all of which are in `folder`.

    Raises:
        UsageError: an sdist that gives no wheel for any platform; packages that cannot be one environment.
        IncompleteError: a build, py-rattler or installer failed.
    """
    assert asset.environment is not None
    lock = (folder / LOCK_NAME).read_bytes()
    locked = read_packages(lock, str(folder / LOCK_NAME), asset.environment.platform)
    built = {
        package.path: build_wheel(folder / package.path, package, out / "wheels", reporter)
        for package in locked.pip
        if package.is_sdist
    }
    done = assemble(asset.name, folder, locked, built, asset.environment.virtual_packages, out)
    _tell(asset, locked, done, reporter)
    files = [
        (LockedFile(f"{asset.folder}/{made.path}", 0, None, None, made.origin, made.made_by), made.file)
        for made in done.made
    ]
    return replace(asset, environment=replace(asset.environment, tree=done.facts.tree)), files


def _tell(asset: LockedAsset, locked: LockedPackages, done: Assembly, reporter: Reporter) -> None:
    facts = done.facts
    reporter.note(
        f"{asset.name}: {len(locked.conda)} conda and {len(locked.pip)} pip packages, Python {facts.python} for "
        f"{facts.platform}, glibc {facts.glibc or 'any'}; {facts.files + facts.modules:,} files once created; "
        f"tree {facts.tree[:16]}"
    )
    for note in done.notes:
        reporter.warn(f"{asset.name}: {note}")


def _sizes(addresses: dict[str, tuple[str, Asked]], downloader: Downloader) -> dict[str, int]:
    """Bytes of the file at each address.

    Args:
        addresses: address -> how to call it in messages, and how to ask for it.
    """

    def size(address: tuple[str, tuple[str, Asked]]) -> int:
        url, (what, asked) = address
        if url.startswith("file:"):
            path = _local(url)
            if not path.is_file():
                raise UsageError(f"{what}: {path} is not there.", "Lock the environment again.")
            return path.stat().st_size
        download = download_of(what, Ingredient(url, None, None), None, what)
        found, _ = downloader.probe(replace(download, url=asked.url, login=asked.login))
        if found is None:
            raise IncompleteError(f"{what}: {_shown(url)}: the server does not say how large it is.", "Try a mirror.")
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(addresses, pool.map(size, addresses.items()), strict=True))


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _shown(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])
