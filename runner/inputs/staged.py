"""What a manifest asks for, and the bundle that it became on this machine, for `runner.remote`."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.from_stage import UsageError, as_shown, quoted, reading_yaml
from stage.bundle.bundle import TAG_MANIFEST, Bundle, finish_bundle, holds_bundle
from stage.bundle.verifier import state_folder
from stage.carry.clusters import Cluster
from stage.carry.push import push, run_rsync
from stage.carry.ssh import PushTarget, RemoteShell, connected
from stage.environment.spec.conda_lock import lock_beside
from stage.environment.spec.profile import Profile
from stage.files import hash_file
from stage.lock.manifest import Manifest
from stage.lock.model import Lockfile
from stage.lock.reader import Lines
from stage.lock.requests import EnvironmentRequest, PathRequest
from stage.progress import Reporter
from stage.staging.resolve import read_previous, unanswered
from stage.staging.working_folder import lock_in


@dataclass(frozen=True)
class Here:
    """A manifest and its bundle on this machine.

    Attributes:
        bundle: the folder; a finished bundle only where `id` says so.
    """

    manifest: Manifest
    bundle: Path

    @staticmethod
    def of_nothing(folder: Path) -> Here:
        """A bundle with nothing in it, which is made in a folder."""
        lock = Lockfile(name="nothing", assets={})
        path, bundle, text = folder / "nothing.yaml", folder / "bundle", b"assets: {}\n"
        bundle.mkdir()
        finish_bundle(bundle, lock, text, ())
        manifest = Manifest(path=path, text=text, name=lock.name, requests={}, lines=Lines(path))
        manifest.lock_path.write_bytes(lock.to_json())
        return Here(manifest, bundle)

    @property
    def is_locked(self) -> bool:
        """Whether the lock answers the manifest, and no file of this machine changed since.

        A file whose ctime is newer than the lock may have changed: `stage lock` compares it.
        """
        lock = read_previous(self.manifest)
        if lock is None or unanswered(self.manifest, lock, frozenset()):
            return False
        if lock.assets.keys() != self.manifest.requests.keys():  # one left the manifest
            return False
        written = self.manifest.lock_path.stat().st_mtime_ns
        return all(path.stat().st_ctime_ns <= written for path in self._files() if path.exists())

    @property
    def made(self) -> list[Path]:
        """The files that `stage lock` writes."""
        folder, requests = self.manifest.path.parent, self.environments().values()
        return [self.manifest.lock_path, *(lock_beside(folder / r.environment) for r in requests)]

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
    def locked_id(self) -> str:
        """The id of the bundle that the lock describes; empty: it is not locked."""
        path = self.manifest.lock_path
        return hash_file(path).sha256 if path.is_file() else ""

    @property
    def id(self) -> str | None:
        """The id of the finished bundle that the lock describes; None: it is not here."""
        is_sealed = holds_bundle(self.bundle) and (self.bundle / TAG_MANIFEST).is_file()
        found = Bundle.open(self.bundle).id if is_sealed else None
        return found if found == self.locked_id else None

    @property
    def size(self) -> int:
        """Bytes of the finished bundle's payload."""
        return Bundle.open(self.bundle).lock.size

    def environments(self) -> dict[str, EnvironmentRequest]:
        """The environment assets of the manifest."""
        requests = self.manifest.requests.items()
        return {name: r for name, r in requests if isinstance(r, EnvironmentRequest)}

    def env_facts(self, asset: str) -> dict[str, Any]:
        """The env.json of an environment: `tree`, `size`. Empty: it is not fetched yet."""
        path = self.bundle / "data" / "envs" / asset / "env.json"
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return found

    def send(
        self, remote: RemoteShell, folder: str, copy: str | None, damaged: set[str], quiet: bool
    ) -> None:
        """Sends the bundle, and removes what left it; it is not verified there.

        Args:
            folder: there.
            copy: a host for large copies with the same folder; None: that of `remote`.
            damaged: paths in the bundle that a verification found there; whatever their size and
                date, their bytes are compared.
        """
        target = PushTarget(copy or remote.target.host, folder)
        locked = Bundle.open(self.bundle).lock.files
        opened = connected(target) if copy else nullcontext(remote)
        with Reporter(quiet=quiet) as reporter, opened as there:
            push(
                self.bundle,
                target,
                ssh="ssh",
                delete="payload",  # what left the bundle; go.sh there would not find it sound
                reporter=reporter,
                quiet=quiet,
                state=state_folder(os.environ),
                remote=there,
                verify_there=False,
            )
            if names := [file.path for file in locked if file.path in damaged]:
                there = replace(there, target=target)
                run_rsync(there, self.bundle, "--checksum", names=names, quiet=quiet)

    def check_fits(self, cluster: Cluster) -> None:
        """Refuses a folder with the bundle of another manifest, and an environment for other nodes.

        Raises:
            UsageError: with the folder that it can have; as `check_profile`.
        """
        self._check_not_another()
        self.check_profile(cluster)

    def _check_not_another(self) -> None:
        lock = lock_in(self.bundle)
        if lock is None or lock.name == self.manifest.name:
            return
        beside = self.bundle.parent / self.manifest.name
        raise UsageError(
            f"{self.bundle}: another bundle is here: {as_shown(lock.name)}; {self.manifest.path} "
            f"makes {self.manifest.name}. Nothing was changed.",
            "Give it a folder of its own. The same command with: --bundle "
            f"{quoted(beside if beside != self.bundle else f'{beside}-2')}",
        )

    def check_profile(self, cluster: Cluster) -> None:
        """Refuses an environment that is for other nodes than the cluster's.

        Raises:
            UsageError: with both lines.
        """
        theirs = cluster.profile
        if theirs is None or cluster.file is None:
            return
        for name, request in self.environments().items():
            if request.profile is None:
                continue
            ours = self.manifest.path.parent / request.profile
            if ours.resolve() == theirs.resolve() or _facts(ours) == _facts(theirs):
                continue
            with reading_yaml(cluster.file) as (_, lines):
                place = lines.place(cluster.name, "profile")
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
