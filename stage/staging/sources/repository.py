"""Repositories of a Hub: models, datasets and metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from stage.convert.convert import convert_splits
from stage.errors import IncompleteError, PolicyError, UsageError, about
from stage.files import FileDigests, human_size, is_hex, join_limited
from stage.hub.datasets import resolve_dataset
from stage.hub.layout import info_of, natural
from stage.hub.models import made_local, resolve_metric, resolve_model
from stage.lock.model import CARD, Ingredient, LockedAsset, LockedFile
from stage.lock.requests import DatasetRequest, MetricRequest, ModelRequest, way_without
from stage.lock.yaml_lines import MAX_SIZE, scalar, split_card
from stage.paths import check_path
from stage.staging.sources.source import AssetSource, Made, Progress, in_config

HTTP_LIMIT = 50 * 10**9  # bytes: the Hub's CDN serves no larger file over plain HTTP
_SHOWN = 3  # names in one line
H = TypeVar("H", bound=ModelRequest | DatasetRequest | MetricRequest)


class HubSource(AssetSource[H]):
    """A repository at a commit. Each file has the digest that the Hub publishes."""

    repository_kind = "model"

    def resolve(self) -> LockedAsset:
        id = self.request.repository
        with about(self.run.manifest.entry(self.name)):
            try:
                return self._resolve()
            except (UsageError, IncompleteError) as error:
                if (self.run.manifest.path.parent / id).is_dir():
                    hint = f"A folder {id} lies beside the manifest: if that is meant, write "
                    error.remedy = f"{hint}`path: {id}`. Else: {error.remedy}"
                raise

    @abstractmethod
    def _resolve(self) -> LockedAsset: ...

    def check_unchanged(self, asset: LockedAsset) -> None:
        if is_hex(self.request.revision, 40):
            self.check_pin("revision", self.request.revision, asset.source.commit)

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        source, path = asset.source, getattr(file, "path", None)
        id, commit = source.repository, source.commit or ""
        if source.parquet_commit and file.origin.endswith(".parquet"):
            commit = source.parquet_commit
        for code in asset.code:
            if path in code.files:
                id, commit = code.repository, code.commit
        what = f"{asset.name}: {file.origin}"
        download = self.run.hub.download(what, self.repository_kind, id, commit, file.expected)
        return self.run.downloader.fetch(download, target, progress)

    def check_can_be_fetched(self, asset: LockedAsset) -> None:
        sizes = {file.origin: file.size for file in asset.files if not file.made_by}
        sizes |= {i.origin: i.size or 0 for i in asset.made_from}
        large = [f"{origin} ({human_size(n)})" for origin, n in sizes.items() if n > HTTP_LIMIT]
        if not large:
            return
        id, commit = asset.source.repository, asset.source.commit
        kind = "--repo-type dataset " if asset.kind == "dataset" else ""
        folder = f"{id.rpartition('/')[2]}-files"
        beside = self.run.manifest.path.parent / folder
        raise UsageError(
            f"{self.what}: {id} has files above {human_size(HTTP_LIMIT)}, which the Hub does not "
            f"serve over plain HTTP: {join_limited(large, _SHOWN)}.",
            f"hf download {kind}{id} --revision {commit} --local-dir {beside}\n"
            "     Then write in the manifest, in place of that entry:\n"
            f"       {scalar(asset.name)}: {{path: {folder}}}",
        )


class ModelSource(HubSource[ModelRequest]):
    """A model or a tokenizer."""

    def _resolve(self) -> LockedAsset:
        run = self.run
        return resolve_model(
            self.name,
            self.request,
            run.hub,
            run.reporter,
            allow_pickle=run.options.allow_pickle,
        )

    def check_can_make(self, asset: LockedAsset) -> None:
        pickles = [i.origin for i in asset.made_from if not i.origin.endswith(".json")]
        if pickles and not self.run.options.allow_pickle:
            raise PolicyError(
                f"{self.what}: its weights are made of pickles "
                f"({pickles[0]}), which have to be fetched again.",
                "Run with --allow-pickle: they are read with torch.load(weights_only=True) and "
                "converted to safetensors.",
            )
        super().check_can_make(asset)

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        """Converts pickles to safetensors, and makes configs refer to code beside them."""
        from stage.convert.pickled_weights import convert_pickles

        configs = [origin for origin in inputs if origin.endswith(".json")]
        pickles = {origin: path for origin, path in inputs.items() if origin not in configs}
        weights = convert_pickles(pickles, out) if pickles else {}
        made = [
            (LockedFile(f"{asset.folder}/{name}", 0, None, None, origin, "safetensors"), out / name)
            for name, origin in weights.items()
        ]
        for origin in configs:
            path, target = f"{asset.folder}/{origin}", out / origin
            check_path(path, way_without(asset.request))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(made_local(origin, inputs[origin].read_bytes()))
            made.append((LockedFile(path, 0, None, None, origin, "auto_map"), target))
        return asset, made


class DatasetSource(HubSource[DatasetRequest]):
    """A dataset: its files as published, or one config by splits."""

    repository_kind = "dataset"

    def _resolve(self) -> LockedAsset:
        run = self.run
        return resolve_dataset(self.name, self.request, run.hub, run.reporter)

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        """Converts files whose splits are known since the dataset was resolved."""
        config = next(iter(asset.configs))
        ordered = sorted(asset.made_from, key=lambda i: natural(i.origin))
        parts = [(i.origin, i.part) for i in ordered if i.part is not None]
        splits: dict[str, list[str]] = {}
        for origin, part in parts:
            path = f"{asset.folder}/{config}/{part.split}.parquet"
            check_path(path, way_without(asset.request))
            splits.setdefault(part.split, []).append(origin)
        _, how = parts[0]  # all parts of a config are converted in one way

        def note(said: str) -> None:
            self.run.reporter.note(f"{asset.name}: {config}: {said}")

        for column in () if how.convert == "imagefolder" else _classes(root, asset, config):
            note(
                f"`{column}` is as in the files: class names of the card are not used; "
                "`load_dataset` would read numbers with these names"
            )
        made = convert_splits(how.convert, inputs, splits, out, how.separator, note)
        return in_config(asset, config, how.convert, made)


class MetricSource(HubSource[MetricRequest]):
    """A metric of `evaluate`."""

    repository_kind = "space"

    def _resolve(self) -> LockedAsset:
        run = self.run
        return resolve_metric(self.name, self.request, run.hub, run.reporter)


def _classes(root: Path, asset: LockedAsset, config: str) -> list[str]:
    """The columns to which the card gives class names."""
    card = next((file for file in asset.files if file.path == f"{asset.folder}/{CARD}"), None)
    if card is None or card.size > MAX_SIZE:
        return []
    metadata, _ = split_card((root / card.path).read_text(encoding="utf-8", errors="replace"))
    features = info_of(metadata.get("dataset_info"), config).get("features")
    return [
        str(feature.get("name"))
        for feature in (features if isinstance(features, list) else [])
        if isinstance(feature, dict) and "class_label" in (feature.get("dtype") or ())
    ]
