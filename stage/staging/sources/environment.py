"""An environment as an asset: a manifest's `environment:` entry and its lock -> the files to fetch.

Packages travel as they are published, each with its URL and sha256 in the lock. When they are here,
`stage.environment.image.assemble` makes all other files in the asset's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.digests import FileDigests, hash_file, sha256_of_bytes
from stage.download.downloader import Downloader
from stage.environment.image.assemble import Assembly, assemble, check_holds_airlift
from stage.environment.image.image import check_tools
from stage.environment.image.try_imports import check_imports
from stage.environment.solve.advice import Target
from stage.environment.solve.indexes import AuthenticatedUrl, PrivateAddresses
from stage.environment.solve.lock import is_stale, lock_environment
from stage.environment.solve.sdists import build_wheel
from stage.environment.spec.conda_lock import made_by_stage
from stage.environment.spec.packages import LOCK_NAME, LockedPackages, lock_beside, read_packages
from stage.environment.spec.profile import MACHINES, Profile
from stage.errors import IncompleteError, UsageError, suggest_relative
from stage.lock.manifest import Manifest
from stage.lock.model import (
    Ingredient,
    LockedAsset,
    LockedEnvironment,
    LockedFile,
    PackageEntry,
    Source,
)
from stage.lock.requests import EnvironmentRequest, as_lock_request
from stage.progress import Reporter
from stage.staging.sources.files import bring_local
from stage.staging.sources.source import AssetSource, Made, Progress, Run
from stage.staging.sources.url import download_of
from stage.threads import together

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
    """Reads the lock beside the environment file; makes it if there is none that matches.

    Asks the servers for the size of each package.

    Args:
        write: whether a new lock is written beside the environment file.

    Raises:
        UsageError: no profile, no solution, a lock without the requirements of airlift, or a tool
            that makes the environment is not installed here.
        PolicyError: as for `read_packages`.
        IncompleteError: an index or a channel cannot be reached.
    """
    lock, text = _matching_lock(name, request, manifest, reporter, write=write)
    profile_path = _profile(request, manifest)
    profile = Profile.load(profile_path) if profile_path else None
    locked = read_packages(text, str(lock), profile.platform if profile else None)
    check_holds_airlift(locked, str(lock))
    check_tools()
    entries = (PackageEntry(p.name, p.version, p.manager, p.path) for p in locked.packages)
    virtual_packages = profile.virtual_packages() if profile else {}
    asset = LockedAsset(
        name=name,
        kind="environment",
        request=as_lock_request(request),
        source=Source("environment", request.environment),
        files=(),
        environment=LockedEnvironment(locked.platform, virtual_packages, tuple(entries)),
    )
    spec = manifest.path.parent / request.environment
    urls = [package.url for package in locked.packages]
    asked = {url: (f"{name}: {_shown(url)}", private.of(url, spec)) for url in urls}
    sizes = _sizes(asked, downloader)
    files = [
        LockedFile(f"{asset.folder}/{p.path}", sizes[p.url], p.sha256, None, p.url)
        for p in locked.packages
    ]
    digest = sha256_of_bytes(text)
    files.append(LockedFile(f"{asset.folder}/{LOCK_NAME}", len(text), digest, None, lock.name))
    made_from = [Ingredient(lock.name, len(text), digest)]
    made_from += [Ingredient(p.url, sizes[p.url], p.sha256) for p in locked.packages if p.is_sdist]
    return replace(asset, files=tuple(files), made_from=tuple(made_from))


def _matching_lock(
    asset: str, request: EnvironmentRequest, manifest: Manifest, reporter: Reporter, *, write: bool
) -> tuple[Path, bytes]:
    """The lock beside the environment file, and its text; made as by `stage env lock` if needed."""
    what = f"{manifest.place(asset, 'environment')}: `{asset}`"
    lock, spec = lock_path(request, manifest), manifest.path.parent / request.environment
    profile = _profile(request, manifest)
    named = [("profile", profile)] if profile else []
    named += [] if lock.is_file() else [("environment", spec)]
    for key, path in named:
        if not path.is_file():
            raise UsageError(
                f"{manifest.place(asset, key)}: `{asset}`: there is no {path}.",
                suggest_relative(getattr(request, key), path, "the manifest's folder"),
            )
    if lock.is_file() and not made_by_stage(lock):
        reporter.note(f"{what}: {lock} was made by another tool, and is used unchanged")
    elif profile is not None:
        made = lock_environment(spec, profile, reporter=reporter, output=lock, write=write)
        if made.changed:
            return lock, made.lock.to_yaml()
    elif not lock.is_file():
        raise UsageError(
            f"{what}: there is no {lock}, and no `profile` to make it for.",
            "Name the cluster's profile, such as `profile: profiles/a800.yml` (stage env probe "
            "prints one there).",
        )
    else:
        reporter.note(
            f"{what}: {lock} is used unchanged: without `profile:` it is not known whether it "
            f"still matches {spec.name}"
        )
    return lock, lock.read_bytes()


def _profile(request: EnvironmentRequest, manifest: Manifest) -> Path | None:
    return manifest.path.parent / request.profile if request.profile is not None else None


def lock_path(request: EnvironmentRequest, manifest: Manifest) -> Path:
    """The path of the lock of an environment."""
    return lock_beside(manifest.path.parent / request.environment)


def check_lock_unchanged(
    asset: LockedAsset, request: EnvironmentRequest, manifest: Manifest
) -> None:
    """Checks that the lock beside the environment file, if any, is the one that was resolved.

    Raises:
        UsageError: it changed, or its environment file did.
    """
    path = lock_path(request, manifest)
    pinned = next((i.sha256 for i in asset.made_from if i.origin == path.name), None)
    spec = manifest.path.parent / request.environment
    profile, what = _profile(request, manifest), f"{manifest.place(asset.name)}: `{asset.name}`"
    update = manifest.update_command(asset.name)
    if not path.is_file():
        return
    if profile and spec.is_file() and is_stale(path, spec, profile):
        raise UsageError(
            f"{what}: {spec.name}, its profile or the requirements of airlift changed since "
            f"{path.name} was written.",
            f"To lock it again: {update}",
        )
    if hash_file(path).sha256 != pinned:
        raise UsageError(
            f"{what}: {path.name} changed since {manifest.lock_path.name} was written.",
            f"To use it as it is now: {update}",
        )


def fetch_package(
    asset: LockedAsset,
    file: LockedFile,
    manifest: Manifest,
    downloader: Downloader,
    private: PrivateAddresses,
    target: Path,
    progress: Callable[[int], None],
) -> FileDigests:
    """Fetches a package or the lock.

    Raises:
        DamageError: its bytes are not the locked ones.
        UsageError: a local file is missing or changed.
        IncompleteError: the network failed; run again.
    """
    spec = manifest.path.parent / asset.source.location
    if urlsplit(file.origin).scheme in ("http", "https"):
        ingredient = Ingredient(file.origin, file.size, file.sha256)
        asked = private.of(file.origin, spec)
        download = download_of(asset.name, ingredient, None)
        download = replace(download, url=asked.url, login=asked.login)
        return downloader.fetch(download, target, progress)
    is_url = file.origin.startswith("file:")
    source = _local(file.origin) if is_url else spec.with_name(file.origin)
    remedy = (
        f"Lock it as it is now: stage env lock {spec} --profile FILE --update PACKAGE, then: "
        f"{manifest.update_command(asset.name)}"
    )
    return bring_local(source, file, target, progress, remedy)


def make_environment(
    asset: LockedAsset, folder: Path, out: Path, reporter: Reporter, *, try_imports: bool = True
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """Makes the files that travel beside the packages, all of which are in `folder`.

    Args:
        try_imports: whether its large packages are imported once, behind the wall.

    Raises:
        UsageError: the wheel of an sdist is for one platform only; packages that cannot be one
            environment, or that cannot be imported together.
        IncompleteError: a build, py-rattler or installer failed.
    """
    assert asset.environment is not None
    lock = (folder / LOCK_NAME).read_bytes()
    locked = read_packages(lock, str(folder / LOCK_NAME), asset.environment.platform)
    torch = next((package.version for package in locked.pip if package.name == "torch"), None)
    target = Target(locked.python, MACHINES[locked.platform], torch)
    built = {
        package.path: build_wheel(folder / package.path, package, out / "wheels", target, reporter)
        for package in locked.pip
        if package.is_sdist
    }

    def check(root: Path) -> None:
        if try_imports:
            names = [package.name for package in locked.packages]
            check_imports(asset.name, root, names, locked.platform, reporter)

    virtual_packages = asset.environment.virtual_packages
    done = assemble(asset.name, folder, locked, built, virtual_packages, out, check)
    _report(asset, locked, done, reporter)
    files = []
    for made in done.made:
        path = f"{asset.folder}/{made.path}"
        locked_file = LockedFile(path, 0, None, None, made.origin, made.made_by)
        files.append((locked_file, made.file))
    return replace(asset, environment=replace(asset.environment, tree=done.facts.tree)), files


def _report(asset: LockedAsset, locked: LockedPackages, done: Assembly, reporter: Reporter) -> None:
    facts = done.facts
    reporter.note(
        f"{asset.name}: {len(locked.conda)} conda and {len(locked.pip)} pip packages, Python "
        f"{facts.python} for {facts.platform}, glibc {facts.glibc or 'any'}; "
        f"{facts.files + facts.modules:,} files once created; tree {facts.tree[:16]}"
    )
    for note in done.notes:
        reporter.warn(f"{asset.name}: {note}")


def _sizes(
    addresses: dict[str, tuple[str, AuthenticatedUrl]], downloader: Downloader
) -> dict[str, int]:
    """The size in bytes of the file at each URL.

    Args:
        addresses: locked URL -> its name in messages, and the URL to fetch it from.
    """

    def size(address: tuple[str, tuple[str, AuthenticatedUrl]]) -> int:
        url, (what, asked) = address
        if url.startswith("file:"):
            path = _local(url)
            if not path.is_file():
                raise UsageError(f"{what}: {path} is not there.", "Lock the environment again.")
            return path.stat().st_size
        download = download_of(what, Ingredient(url, None, None), None, what)
        found, _ = downloader.probe(replace(download, url=asked.url, login=asked.login))
        if found is None:
            raise IncompleteError(
                f"{what}: {_shown(url)}: the server does not say how large it is.", "Try a mirror."
            )
        return found

    return dict(zip(addresses, together(size, addresses.items(), _AT_ONCE), strict=True))


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _shown(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])


class EnvironmentSource(AssetSource[EnvironmentRequest]):
    """An environment file with its lock; the packages come from their indexes and channels."""

    what_decides_bytes = (
        "An environment holds airlift itself, and built wheels depend on their build tools"
    )

    def __init__(self, name: str, request: EnvironmentRequest, run: Run) -> None:
        super().__init__(name, request, run)
        self._private = PrivateAddresses()

    def resolve(self) -> LockedAsset:
        run = self.run
        return resolve_environment(
            self.name,
            self.request,
            run.manifest,
            run.downloader,
            self._private,
            run.reporter,
            write=not run.options.dry_run,
        )

    def check_unchanged(self, asset: LockedAsset) -> None:
        check_lock_unchanged(asset, self.request, self.run.manifest)

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        assert isinstance(file, LockedFile)
        manifest, downloader = self.run.manifest, self.run.downloader
        return fetch_package(asset, file, manifest, downloader, self._private, target, progress)

    def fetch_input(
        self, asset: LockedAsset, ingredient: Ingredient, folder: Path, progress: Progress
    ) -> tuple[Path, FileDigests]:
        """Every package is a file of the asset: nothing more is fetched."""
        return folder, FileDigests(ingredient.size or 0, ingredient.sha256 or "")

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        out.mkdir(parents=True)
        reporter, try_imports = self.run.reporter, self.run.options.offline_check
        return make_environment(asset, root / asset.folder, out, reporter, try_imports=try_imports)
