"""An environment as an asset: a manifest's `environment:` entry and its lock -> what is fetched.

Packages are fetched as they are published, each with its URL and sha256 in the lock. They do not
travel: `stage.environment.image.image` makes the files of the asset's folder from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.download.http import together
from stage.environment.check.imports import check_imports
from stage.environment.image.image import FILES, assemble, check_holds_airlift
from stage.environment.solve.advice import Target
from stage.environment.solve.lock import is_stale, lock_environment
from stage.environment.solve.uv import build_wheel, private_address
from stage.environment.spec.conda_lock import (
    LOCK_NAME,
    EnvironmentLock,
    Package,
    lock_beside,
    made_by_stage,
)
from stage.environment.spec.profile import MACHINES, Profile
from stage.errors import DamageError, IncompleteError, UsageError, about, suggest_relative
from stage.file_kinds import ENVIRONMENT, MAX_START, check_kind
from stage.files import FileDigests, hash_file, human_count, read_start, sha256_of_bytes
from stage.installation import check_libraries
from stage.lock.model import (
    Ingredient,
    LockedAsset,
    LockedEnvironment,
    LockedFile,
    PackageEntry,
)
from stage.lock.requests import EnvironmentRequest
from stage.paths import check_path
from stage.staging.sources.local import bring_local
from stage.staging.sources.source import AssetSource, FetchRun, Made, Progress
from stage.staging.sources.url import download_of

_AT_ONCE = 8  # requests for sizes: an environment has hundreds of packages on few servers
_TOOLS = ("conda-lock", "py-rattler", "uv", "packaging", "installer", "deflate")
MADE_BY = "environment"


class EnvironmentSource(AssetSource[EnvironmentRequest]):
    """An environment file with its lock; the packages come from their indexes and channels."""

    what_decides_bytes = (
        "An environment holds airlift itself, and built wheels depend on their build tools"
    )

    def __init__(self, name: str, request: EnvironmentRequest, run: FetchRun) -> None:
        super().__init__(name, request, run)
        folder = run.manifest.path.parent
        self._spec = folder / request.environment
        self._lock = lock_beside(self._spec)
        self._profile = folder / request.profile if request.profile is not None else None

    def resolve(self) -> LockedAsset:
        """Reads the lock beside the environment file; makes it if there is none that matches.

        Asks the servers for the size of each package.

        Raises:
            UsageError: no profile, no solution, a lock without the requirements of airlift, or a
                tool that makes the environment is not installed here.
            PolicyError: as for `EnvironmentLock.parse`.
            IncompleteError: an index or a channel cannot be reached.
        """
        check_libraries("making an environment", *_TOOLS)
        text = self._matching_lock()
        profile = Profile.load(self._profile) if self._profile else None
        lock = EnvironmentLock.parse(text, str(self._lock), profile.platform if profile else None)
        check_holds_airlift(lock, str(self._lock))
        sizes = together(self._size, lock.packages, _AT_ONCE)
        asset = self.new_asset("environment")
        own = LockedFile(
            f"{asset.folder}/{LOCK_NAME}", len(text), sha256_of_bytes(text), None, self._lock.name
        )
        return replace(
            asset,
            files=(own,),
            made_from=tuple(
                Ingredient(package.url, size, package.sha256)
                for package, size in zip(lock.packages, sizes, strict=True)
            ),
            environment=LockedEnvironment(
                lock.platform,
                profile.virtual_packages() if profile else {},
                tuple(PackageEntry(p.name, p.version, p.manager, p.url) for p in lock.packages),
            ),
        )

    def _matching_lock(self) -> bytes:
        """The text of the lock; made as by `stage env lock` if needed."""
        manifest, reporter, lock, spec = (
            self.run.manifest,
            self.run.reporter,
            self._lock,
            self._spec,
        )
        what = f"{manifest.place(self.name, 'environment')}: `{self.name}`"
        named = [("profile", self._profile)] if self._profile else []
        named += [] if lock.is_file() else [("environment", spec)]
        for key, path in named:
            if not path.is_file():
                raise UsageError(
                    f"{manifest.place(self.name, key)}: `{self.name}`: there is no {path}.",
                    suggest_relative(getattr(self.request, key), path, "the manifest's folder"),
                )
        if not lock.is_file():
            with about(manifest.place(self.name, "environment")), about(str(spec)):
                check_kind(spec, read_start(spec, MAX_START), ENVIRONMENT)
        if lock.is_file() and not made_by_stage(lock):
            reporter.note(f"{what}: {lock} was made by another tool, and is used unchanged")
        elif self._profile is not None:
            write = not self.run.options.dry_run
            made, changed = lock_environment(
                spec, self._profile, reporter=reporter, output=lock, write=write
            )
            if changed:
                return made.to_yaml()
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
        return lock.read_bytes()

    def _size(self, package: Package) -> int:
        what = f"{self.name}: {package.file_name}"
        if package.url.startswith("file:"):
            path = _local(package.url)
            if not path.is_file():
                raise UsageError(f"{what}: {path} is not there.", "Lock the environment again.")
            return path.stat().st_size
        download = download_of(what, Ingredient(package.url, None, None), None, what)
        url, login = private_address(package.url, self._spec)
        size, _ = self.run.downloader.probe(replace(download, url=url, login=login))
        if size is None:
            raise IncompleteError(
                f"{what}: the server does not say how large it is.", "Try a mirror."
            )
        return size

    def check_unchanged(self, asset: LockedAsset) -> None:
        """Checks that the lock beside the environment file, if any, is the one that was resolved.

        Raises:
            UsageError: it changed, or its environment file did.
        """
        manifest, lock, spec = self.run.manifest, self._lock, self._spec
        if not lock.is_file():
            return
        update = manifest.update_command(self.name)
        if self._profile and spec.is_file() and is_stale(lock, spec, self._profile):
            raise UsageError(
                f"{self.what}: {spec.name}, its profile or the requirements of airlift changed "
                f"since {lock.name} was written.",
                f"To lock it again: {update}",
            )
        own = f"{asset.folder}/{LOCK_NAME}"
        if hash_file(lock).sha256 not in [f.sha256 for f in asset.files if f.path == own]:
            raise UsageError(
                f"{self.what}: {lock.name} changed since {manifest.lock_path.name} was written.",
                f"To use it as it is now: {update}",
            )

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        """Fetches a package, or the lock."""
        update = self.run.manifest.update_command(self.name)
        if isinstance(file, LockedFile):
            return bring_local(
                self._lock, file, target, progress, f"To use it as it is now: {update}"
            )
        if file.origin.startswith("file:"):
            return bring_local(
                _local(file.origin),
                file.at(""),
                target,
                progress,
                f"Lock it as it is now: stage env lock {self._spec} --profile FILE --update "
                f"PACKAGE, then: {update}",
            )
        url, login = private_address(file.origin, self._spec)
        download = replace(download_of(self.name, file, None), url=url, login=login)
        return self.run.downloader.fetch(download, target, progress)

    def input_name(self, origin: str) -> str:
        """The name of a package's file, which says what it is."""
        name = _local(origin).name
        with about(self.name):
            check_path(name)
        return name

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        """Makes the files that travel.

        Raises:
            DamageError: the two locks name different packages.
            UsageError: the wheel of an sdist is for one platform only; packages that cannot be one
                environment, or that cannot be imported together.
            IncompleteError: a build, py-rattler or installer failed.
        """
        assert asset.environment is not None
        reporter, lock_path = self.run.reporter, root / asset.folder / LOCK_NAME
        lock = EnvironmentLock.load(lock_path, asset.environment.platform)
        if {p.url: p.sha256 for p in lock.packages} != {
            i.origin: i.sha256 for i in asset.made_from
        }:
            raise DamageError(
                f"{LOCK_NAME} and {self.run.manifest.lock_path.name} name different packages.",
                f"To lock it again: {self.run.manifest.update_command(self.name)}",
            )
        out.mkdir(parents=True)
        pinned = (p.version for p in lock.of("pip") if p.name == "torch")
        torch = lock.provides.get("torch") or next(pinned, None)
        target = Target(lock.python, MACHINES[lock.platform], torch)
        built = {
            p.url: build_wheel(inputs[p.url], p, out / "built", target, reporter)
            for p in lock.packages
            if p.is_sdist
        }

        def check(folder: Path) -> None:
            if lock.provides:
                reporter.note(
                    f"{self.name}: it is on a site's own torch, so its packages are imported when "
                    "bootstrap.sh makes it there"
                )
            elif self.run.options.offline_check:
                names = [package.name for package in lock.packages]
                check_imports(self.name, folder, names, lock.platform, reporter)

        facts, notes = assemble(
            self.name,
            lock,
            hash_file(lock_path).sha256,
            {**inputs, **built},
            asset.environment.virtual_packages,
            out,
            check,
        )
        reporter.note(
            f"{self.name}: {len(lock.of('conda'))} conda and {len(lock.of('pip'))} pip packages, "
            f"Python {lock.python} for {lock.platform}, glibc {facts['glibc'] or 'any'}; "
            f"{human_count(facts['files'] + facts['modules'], 'file')} once created; tree "
            f"{facts['tree'][:16]}"
        )
        for note in notes:
            reporter.warn(f"{self.name}: {note}")
        files = [
            (LockedFile(f"{asset.folder}/{name}", 0, None, None, LOCK_NAME, MADE_BY), out / name)
            for name in FILES
        ]
        return replace(asset, environment=replace(asset.environment, tree=facts["tree"])), files


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
