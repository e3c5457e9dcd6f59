"""Where the assets of a manifest come from: one `AssetSource` each; and the files made of them.

`resolve` turns an entry into a `LockedAsset`, `fetch` brings the bytes of one of its files, and
`make` makes files from what was fetched: unpacked or converted. Only sources use the network in a
fetch. All sources of one run share its options and connections (`FetchRun`).

`build_asset` makes the files that a bundle holds in another form than published. What they are made
from (an archive, CSV files, pickles, packages) is fetched to the workshop, a folder beside the
payload. The asset's source makes the files there; they go to the payload when they have the digests
of a complete lock. A new lock learns the digests. The workshop is emptied then, so a file that is
damaged later is made again from new downloads.
"""

from __future__ import annotations

import math
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from stage.bundle.inspect import parquet_footer
from stage.convert.convert import CONFIG, Split, convert, made_with
from stage.download.downloader import Downloader
from stage.download.http import Connections, timeout_s, tls_context, together
from stage.download.retry import RetryPolicy
from stage.errors import DamageError, Mistakes, UsageError, about, quoted
from stage.files import FileDigests, MismatchError, hash_file, human_count, sha256_of_bytes
from stage.hub.client import Hub
from stage.hub.layout import splits_of_names
from stage.lock.manifest import Manifest
from stage.lock.model import Ingredient, LockedAsset, LockedFile, LockedSplit, Source
from stage.lock.requests import AssetRequest, as_lock_request
from stage.progress import Reporter
from stage.staging.working_folder import WORKSHOP, SharedStore, Sharing, WorkFolder

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
R = TypeVar("R", bound=AssetRequest)


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
class FetchRun:
    """What all sources of one run share."""

    manifest: Manifest
    options: FetchOptions
    reporter: Reporter
    hub: Hub
    downloader: Downloader

    @staticmethod
    def connected(manifest: Manifest, options: FetchOptions, reporter: Reporter) -> FetchRun:
        """A run with connections of its own.

        Raises:
            UsageError: the endpoint is not an address.
        """
        hub, downloader = connect(options.endpoint, reporter, options.jobs)
        return FetchRun(manifest, options, reporter, hub, downloader)


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

    def __init__(self, name: str, request: R, run: FetchRun) -> None:
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
            StageError: what the tools refuse; the caller names the asset.
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

        splits = convert(how, inputs, splits_of_names, out, separator, note)
        return in_config(asset, CONFIG, how, splits)

    def new_asset(self, kind: str) -> LockedAsset:
        """The asset, without its files."""
        request = as_lock_request(self.request)
        source = Source(self.request.source_type, self.request.location)
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


_SHOWN_COLUMNS = 8


def build_asset(
    asset: LockedAsset, source: AssetSource[Any], folder: WorkFolder, sharing: Sharing
) -> tuple[LockedAsset, dict[str, FileDigests]]:
    """Makes the files of an asset that are not as published, and puts them in place.

    Returns:
        The asset with all its files; the digests of those made.

    Raises:
        StageError: what the source refuses.
        DamageError: the results differ from the lock.
    """
    root, reporter = folder.root, source.run.reporter
    workdir = root / WORKSHOP / asset.name
    out = workdir / "made"
    if out.exists():
        shutil.rmtree(out)
    inputs, ingredients = _fetch_inputs(asset, source, workdir / "originals", sharing)
    place = source.run.manifest.entry(asset.name)
    with reporter.at_work(f"make {asset.name}"), about(place):
        made, files = source.make(replace(asset, made_from=ingredients), inputs, out, root)
    where = {file.path: path for file, path in files}
    made = with_rows(made, where.__getitem__)
    _print_rows(made, source, is_csv=any(file.made_by == "csv" for file, _ in files))
    size = sum(path.stat().st_size for _, path in files)
    with reporter.bytes_bar(f"hash {asset.name}", size) as progress:
        digests = {file.path: hash_file(path, progress=progress) for file, path in files}
    known = [replace(f, size=digests[f.path].size, sha256=digests[f.path].sha256) for f, _ in files]
    complete = replace(made, files=(*(f for f in asset.files if not f.made_by), *known))
    _check_as_locked(asset, complete, source)
    folder.mark_unfinished({file.path for file, _ in files})
    for file, path in files:
        folder.put(file.path, path)
    shutil.rmtree(workdir, ignore_errors=True)
    return complete, digests


def _fetch_inputs(
    asset: LockedAsset, source: AssetSource[Any], folder: Path, sharing: Sharing
) -> tuple[dict[str, Path], tuple[Ingredient, ...]]:
    """Fetches what the files are made from: the paths by origin, and the digests of all."""
    run = source.run
    wanted = {i.origin: i for i in asset.made_from}  # a file may be in two splits
    with run.reporter.bytes_bar(
        f"fetch {asset.name}", sum(i.size or 0 for i in wanted.values())
    ) as progress:

        def fetch(ingredient: Ingredient) -> tuple[Path, FileDigests]:
            target = folder / source.input_name(ingredient.origin)
            if asset.environment is not None and not target.is_file():
                taken = sharing.take(ingredient.at(_in_bundle(target)), progress)
                if taken is not None:
                    return target, taken
            return source.fetch_input(asset, ingredient, folder, progress)

        stop, jobs = run.downloader.stop.set, run.options.jobs
        fetched = dict(zip(wanted, together(fetch, wanted.values(), jobs, stop), strict=True))
    digests = {origin: digests for origin, (_, digests) in fetched.items()}
    known = tuple(
        replace(i, size=digests[i.origin].size, sha256=digests[i.origin].sha256)
        for i in asset.made_from
    )
    count = human_count(len(fetched), "fetched or local file")
    run.reporter.detail(f"{asset.name}: made from {count}")
    if asset.environment is not None:  # the next image of it needs most of them again
        sharing.keep({_in_bundle(path): digests for path, digests in fetched.values()})
    return {origin: path for origin, (path, _) in fetched.items()}, known


def _in_bundle(path: Path) -> str:
    """The path in the bundle's folder of a file in `WORKSHOP/ASSET/originals`."""
    return "/".join(path.parts[-4:])


def with_rows(asset: LockedAsset, where: Callable[[str], Path]) -> LockedAsset:
    """The asset with the rows and the schema of each split whose lock has none yet.

    Args:
        where: path in the bundle of a shard -> its file.

    Raises:
        DamageError: a shard is no parquet file, shards differ in schema, or the card declares
            another number of rows.
    """
    configs = {
        config: {
            name: split
            if split.rows is not None and split.schema is not None
            else _with_footers(split, where, f"{asset.name}: {config}/{name}")
            for name, split in splits.items()
        }
        for config, splits in asset.configs.items()
    }
    return replace(asset, configs=configs)


def _with_footers(split: LockedSplit, where: Callable[[str], Path], what: str) -> LockedSplit:
    """A split with the rows and the schema that the footers of its shards state."""
    footers = [parquet_footer(where(shard)) for shard in split.shards]
    for shard, footer in zip(split.shards, footers, strict=True):
        if footer.schema != footers[0].schema:
            raise DamageError(
                f"{what}: {shard} has other columns than {split.shards[0]}.",
                "Try another revision.",
            )
    rows = sum(footer.rows for footer in footers)
    if split.declared_rows not in (None, rows):
        raise DamageError(
            f"{what}: {rows} rows in {human_count(len(footers), 'file')}; "
            f"the card says {split.declared_rows}.",
            "Files are missing from the repository, or its card is out of date: "
            "try another revision.",
        )
    return replace(split, rows=rows, schema=footers[0].schema)


def _print_rows(asset: LockedAsset, source: AssetSource[Any], *, is_csv: bool) -> None:
    """Prints rows and columns: one column instead of five must be seen here, not in a training run.

    Raises:
        UsageError: no row at all.
    """
    reporter, every = source.run.reporter, 0
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            rows, columns = split.rows or 0, split.schema or ()
            every += rows
            shown = ", ".join(f"{c.name} {c.type}" for c in columns[:_SHOWN_COLUMNS])
            more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
            split_of = f"{asset.name}: {config}/{name}"
            reporter.note(
                f"{split_of}: {human_count(rows, 'row')}, "
                f"{human_count(len(columns), 'column')}: {shown}{more}"
            )
            if rows == 0:
                reporter.warn(f"{split_of}: has no row")
            elif is_csv and (value := next((c.name for c in columns if _is_value(c.name)), "")):
                reporter.warn(
                    f"{split_of}: a column is called {value!r}: the first line of a CSV is the "
                    "names; if it is a row here, write a line of names above it"
                )
            elif is_csv and len(columns) == 1:
                reporter.warn(
                    f"{split_of}: one column, called {columns[0].name!r}: "
                    "if this is text, write `convert: text`"
                )
    if asset.configs and every == 0:
        raise UsageError(
            f"{source.what}: not one row came out of {human_count(len(asset.made_from), 'file')}.",
            "Is it the right file, and the right `convert`? A CSV begins with a line of names; "
            "plain text is `convert: text`.",
        )


def _is_value(name: str) -> bool:
    """Whether a column's name is a number or a sentence: the line of names may be missing."""
    with suppress(ValueError):
        return math.isfinite(float(name))
    return " " in name.strip() and name.rstrip().endswith((".", "!"))


def _check_as_locked(before: LockedAsset, after: LockedAsset, source: AssetSource[Any]) -> None:
    """Checks that the same bytes result as the lock states."""
    locked = {file.path: file.sha256 for file in before.files if file.made_by}
    made = {file.path: file.sha256 for file in after.files if file.made_by}
    different = sorted(path for path in {*locked, *made} if locked.get(path) != made.get(path))
    if locked and different:
        manifest = source.run.manifest
        raise DamageError(
            f"{before.name}: made again, {different[0]} differs from {manifest.lock_path.name} "
            f"({len(different)} of {len(made)} files).",
            f"{source.what_decides_bytes}: use the versions that the lock was made with, or accept "
            f"new digests: {manifest.update_command(before.name)}",
        )
