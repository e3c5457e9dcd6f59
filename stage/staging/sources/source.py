"""Where the assets of a manifest come from: one `AssetSource` for each entry.

`resolve` turns an entry into a `LockedAsset`, `fetch` brings the bytes of one of its files, and
`make` makes files from what was fetched: unpacked or converted. Only sources use the network in a
fetch. All sources of one run share its options and connections (`Run`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from stage.convert.convert import CONFIG, Split, convert, made_with
from stage.digests import FileDigests, MismatchError, sha256_of_bytes
from stage.download.downloader import Downloader
from stage.download.http import Connections, RetryPolicy, timeout_s, tls_context
from stage.errors import Mistakes, UsageError, about, quoted
from stage.hub.client import Hub
from stage.hub.layout import splits_of_names
from stage.lock.manifest import Manifest, Request, as_lock_request
from stage.lock.model import Ingredient, LockedAsset, LockedFile, LockedSplit, Source
from stage.progress import Reporter
from stage.staging.working_folder import SharedStore

ALL = "*"


@dataclass(frozen=True)
class FetchOptions:
    """The options of one run. Those of the command have the same names (`--dry-run`: `dry_run`).

    Attributes:
        endpoint: URL of the Hub; None: $HF_ENDPOINT, else the public Hub.
        jobs: downloads at the same time.
        locked: refuse to move or add any pin.
        update: assets to resolve again, whatever the lock says; `ALL`: all of them.
        dry_run: print the plan; download and write nothing.
        allow_pickle: take models that have only pickles, to be converted to safetensors.
        offline_check: load what came, in a process without network, before the bundle is finished.
        store: the contents that bundles of this machine share; None: nothing is shared.
    """

    endpoint: str | None = None
    jobs: int = 8
    locked: bool = False
    update: Collection[str] = ()
    dry_run: bool = False
    allow_pickle: bool = False
    offline_check: bool = True
    store: SharedStore | None = None


Progress = Callable[[int], None]
Made = tuple[LockedAsset, list[tuple[LockedFile, Path]]]
"""An asset with files that were made, and where each of them is now; their digests are unknown."""
R = TypeVar("R", bound=Request)


def connect(endpoint: str | None, reporter: Reporter, at_once: int = 4) -> tuple[Hub, Downloader]:
    """The Hub and the downloader of one run.

    Args:
        at_once: downloads at the same time.

    Raises:
        UsageError: the endpoint is not an address.
    """
    connections = Connections(read_timeout_s=timeout_s(), at_once=at_once, trust=tls_context())
    downloader = Downloader(connections, reporter, RetryPolicy())
    return Hub(endpoint, downloader), downloader


@dataclass(frozen=True)
class Run:
    """What all sources of one run share."""

    manifest: Manifest
    options: FetchOptions
    reporter: Reporter
    hub: Hub
    downloader: Downloader

    @staticmethod
    def connected(manifest: Manifest, options: FetchOptions, reporter: Reporter) -> Run:
        """A run with connections of its own.

        Raises:
            UsageError: the endpoint is not an address.
        """
        hub, downloader = connect(options.endpoint, reporter, options.jobs)
        return Run(manifest, options, reporter, hub, downloader)


class AssetSource(ABC, Generic[R]):
    """The source of one asset.

    Attributes:
        what: names the asset in messages, with `file:line`.
        is_pinned_when_resolved: whether the lock keeps what was resolved before the bundle is
            finished.
        what_decides_bytes: why files that are made again may differ.
    """

    is_pinned_when_resolved = True
    what_decides_bytes = (
        "Parquet and safetensors bytes depend on the version of pyarrow, torch and safetensors"
    )

    def __init__(self, name: str, request: R, run: Run) -> None:
        self.name, self.request, self.run = name, request, run
        self.what = f"{run.manifest.place(name)}: `{name}`"

    def look(self, mistakes: Mistakes, *, required: bool) -> Mapping[str, int]:
        """Looks at files on this machine, before anything is hashed or requested.

        Args:
            mistakes: keeps the errors.
            required: the files must be there; else a lock pins them and the bundle may hold them.

        Returns:
            Payload path -> bytes of the files that will be copied.
        """
        return {}

    @abstractmethod
    def resolve(self) -> LockedAsset:
        """Resolves the entry to exact files.

        Raises:
            StageError: the source refuses, or cannot be reached.
        """

    def check_unchanged(self, asset: LockedAsset) -> None:
        """Checks that a lock pins what the manifest asks for: another user may have written it.

        Raises:
            UsageError: it does not, or a local file changed since it was locked.
        """

    @abstractmethod
    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        """Fetches one file to `target`.

        Raises:
            DamageError, UsageError: its bytes are not as locked.
            IncompleteError: the network failed; run again.
        """

    def fetch_input(
        self, asset: LockedAsset, ingredient: Ingredient, folder: Path, progress: Progress
    ) -> tuple[Path, FileDigests]:
        """Fetches a file that others are made from, unless an earlier run did.

        Returns:
            Its path, in `folder` or on this machine, and its digests.

        Raises:
            StageError: as for `fetch`.
        """
        target, expected = folder / self.input_name(ingredient.origin), ingredient.expected
        if target.is_file() and expected.evidence:
            try:
                return target, expected.verify(target, progress)
            except MismatchError as error:
                progress(-error.found.size)
        target.unlink(missing_ok=True)
        return target, self.fetch(asset, ingredient, target, progress)

    def input_name(self, origin: str) -> str:
        """The name of such a file in the workshop. Names of a Hub may differ in case only."""
        endings = re.search(r"(\.[A-Za-z0-9]{1,10}){0,2}$", origin)
        return sha256_of_bytes(origin.encode())[:24] + (endings[0] if endings else "")

    def check_can_be_fetched(self, asset: LockedAsset) -> None:
        """Checks before any download that the source serves all files of an asset.

        Raises:
            UsageError: it does not; with another way.
        """

    def check_can_make(self, asset: LockedAsset) -> None:
        """Checks before any download that `make` may run, and can make the locked bytes.

        Raises:
            PolicyError: an option is missing.
            UsageError: the lock was made with other versions.
        """
        here, manifest = made_with(), self.run.manifest
        if not asset.made_with or asset.made_with == here:
            return
        then, now = (
            ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
            for versions in (asset.made_with, here)
        )
        raise UsageError(
            f"{self.what}: {manifest.lock_path.name} was made with {then}. Here are {now}, which "
            "may write other bytes of the same rows.",
            f"Fetch with the versions of the lock, or make it anew: "
            f"{manifest.update_command(asset.name)}",
        )

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        """Makes the files of an asset that are not as published.

        Args:
            inputs: by origin, the files that `asset.made_from` names.
            out: a folder that does not exist yet.
            root: the bundle, with the asset's other files.

        Raises:
            StageError: what the tools refuse.
        """
        return asset, []

    def converted(
        self,
        asset: LockedAsset,
        how: str,
        separator: str | None,
        inputs: Mapping[str, Path],
        out: Path,
    ) -> Made:
        """The asset with files converted to parquet, whose names say which split they are of.

        Raises:
            StageError: as for `convert`.
        """

        def note(said: str) -> None:
            self.run.reporter.note(f"{self.name}: {said}")

        with about(self.what):
            splits = convert(how, inputs, splits_of_names, out, separator, note)
        return in_config(asset, CONFIG, how, splits)

    def new_asset(self, kind: str, source: Source) -> LockedAsset:
        """The asset, without its files."""
        request = as_lock_request(self.request)
        return LockedAsset(name=self.name, kind=kind, request=request, source=source, files=())

    def check_pin(self, key: str, asked: object, locked: object) -> None:
        """Checks that the lock has the value of a key of the manifest."""
        if asked != locked:
            manifest = self.run.manifest
            raise UsageError(
                f"{manifest.place(self.name, key)}: `{self.name}`: "
                f"{manifest.lock_path.name} pins {locked} instead of {asked}.",
                "Find out where that lock comes from. To resolve again: "
                f"stage lock {quoted(manifest.path)} --update {self.name}",
            )


def in_config(asset: LockedAsset, config: str, how: str, splits: Mapping[str, Split]) -> Made:
    """The asset with converted splits as one config of it."""
    folder = f"{asset.folder}/{config}"
    before = asset.configs.get(config, {})
    locked = {
        name: LockedSplit(
            tuple(f"{folder}/{shard.name}" for shard in split.shards),
            declared_rows=before[name].declared_rows if name in before else None,
        )
        for name, split in splits.items()
    }
    files = [
        (LockedFile(f"{folder}/{shard.name}", 0, None, None, split.origin, how), shard)
        for split in splits.values()
        for shard in split.shards
    ]
    return replace(asset, configs={config: locked}, made_with=made_with()), files
