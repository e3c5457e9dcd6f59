"""What a manifest asks for, and the bundle that it became on this machine, for `runner.remote`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runner.errors import IncompleteError, UsageError
from stage.bundle.bundle import Bundle, holds_bundle
from stage.bundle.receipt import Receipt
from stage.bundle.receipt import find as find_receipt
from stage.bundle.verifier import TAG_MANIFEST, VERIFIER, state_folder
from stage.carry.push import push as push
from stage.digests import hash_file
from stage.environment.spec.conda_lock import lock_beside
from stage.environment.spec.profile import Profile
from stage.lock.manifest import Manifest as Manifest
from stage.lock.model import LockedAsset
from stage.lock.requests import EnvironmentRequest, PathRequest
from stage.progress import Reporter as Reporter
from stage.staging.resolve import read_previous, unanswered

__all__ = ["TAG_MANIFEST", "VERIFIER", "Here", "Manifest", "Profile", "Reporter", "push"]


@dataclass(frozen=True)
class Here:
    """A manifest and its bundle on this machine.

    Attributes:
        bundle: the folder; a finished bundle only where `id` says so.
    """

    manifest: Manifest
    bundle: Path

    @property
    def is_locked(self) -> bool:
        """Whether the lock answers the manifest, and no file of this machine changed since.

        A file whose ctime is newer than the lock may have changed: `stage lock` compares it.
        """
        lock = read_previous(self.manifest)
        if unanswered(self.manifest, lock, frozenset()):
            return False
        written = self.manifest.lock_path.stat().st_mtime_ns
        return all(path.stat().st_ctime_ns <= written for path in self._files() if path.exists())

    def _files(self) -> list[Path]:
        """The files of this machine that the lock was made from."""
        folder, found = self.manifest.path.parent, list[Path]()
        for request in self.manifest.requests.values():
            if isinstance(request, PathRequest) and request.path:
                path = folder / Path(request.path).expanduser()
                found += [path, *path.rglob("*")] if path.is_dir() else [path]
            elif isinstance(request, EnvironmentRequest):
                spec = folder / request.environment
                found += [spec, lock_beside(spec)]
                found += [folder / request.profile] if request.profile else []
        return found

    @property
    def id(self) -> str | None:
        """The id of the finished bundle that the lock describes; None: it is not here."""
        if not holds_bundle(self.bundle) or not self.manifest.lock_path.is_file():
            return None
        found = Bundle.open(self.bundle).id
        return found if found == hash_file(self.manifest.lock_path).sha256 else None

    @property
    def why_unread(self) -> str | None:
        """Why the bundle here must be read before it is sent; None: a receipt covers it."""
        found = find_receipt(state_folder(os.environ), self.bundle)
        return None if isinstance(found, Receipt) else found

    @property
    def size(self) -> int:
        """Bytes of the finished bundle's payload."""
        return Bundle.open(self.bundle).lock.size

    def environments(self) -> dict[str, EnvironmentRequest]:
        """The environment assets of the manifest."""
        requests = self.manifest.requests.items()
        return {name: r for name, r in requests if isinstance(r, EnvironmentRequest)}

    def locked(self, asset: str) -> LockedAsset | None:
        """An asset as the lock has it; None: it is not locked."""
        lock = read_previous(self.manifest)
        return lock.assets.get(asset) if lock else None

    def check_profile(self, theirs: Path, place: str) -> None:
        """Refuses an environment that is for other nodes than the cluster's.

        Args:
            theirs: the cluster's profile.
            place: where it is named, for the message.

        Raises:
            UsageError: with both lines.
        """
        for name, request in self.environments().items():
            if request.profile is None:
                continue
            ours = self.manifest.path.parent / request.profile
            if ours.resolve() == theirs.resolve() or _facts(ours) == _facts(theirs):
                continue
            raise UsageError(
                f"{self.manifest.place(name, 'profile')}: profile: {request.profile}\n"
                f"{place}: profile: {theirs}\n"
                f"The environment `{name}` would be made for other nodes than those of this "
                "cluster.",
                f"Write the cluster's profile into the manifest: profile: "
                f"{os.path.relpath(theirs, self.manifest.path.parent)}",
            )


def _facts(path: Path) -> tuple[object, ...]:
    """What an environment is made for."""
    found = Profile.load(path)
    return found.virtual_packages(), found.compute_capability, found.provides


def check_fetched(here: Here) -> str:
    """The id of the bundle that was fetched.

    Raises:
        IncompleteError: it is not what the lock describes; the manifest changed meanwhile.
    """
    if here.id is None:
        raise IncompleteError(
            f"{here.bundle}: not the bundle that {here.manifest.lock_path} describes.",
            "Run the same command again.",
        )
    return here.id
