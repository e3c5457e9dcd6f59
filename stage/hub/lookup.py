"""Looks up a name on the Hub: a model or a dataset, with the facts that a manifest entry needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from stage.errors import UsageError
from stage.hub import parquet_layout
from stage.hub.client import Hub, Repository
from stage.hub.data_files_layout import loading_script, originals
from stage.hub.datasets import find_conversion
from stage.hub.errors import CHECK_NAME, RefusedToken


@dataclass(frozen=True)
class RepositoryLookup:
    """A repository as the Hub describes it today.

    Attributes:
        kind: `model` or `dataset`.
        repository: its name today.
        configs: of a dataset: the configs that can be fetched, in the card's order.
        default_config: the config of an entry that names none; None if that is ambiguous.
        also: whether a dataset has the same name as this model.
        revision: the one in a page's address; None: `main`.
    """

    kind: str
    repository: str
    licence: str | None
    gated: bool
    configs: tuple[str, ...] = ()
    default_config: str | None = None
    also: bool = False
    revision: str | None = None


@dataclass(frozen=True)
class RepositoryName:
    """A repository as a user names it; kind and revision are None where the name has none."""

    id: str
    kind: str | None = None
    revision: str | None = None

    @staticmethod
    def parse(text: str) -> RepositoryName:
        """Reads `org/name`, `datasets/org/name`, `models/org/name`, or a page's address."""
        is_address = text.startswith(("https://", "http://"))
        path = unquote(urlsplit(text).path) if is_address else text.removeprefix("hf://")
        parts = path.strip("/").split("/")
        kind = {"datasets": "dataset", "models": "model"}.get(parts[0]) if len(parts) > 1 else None
        if kind == "dataset" or (kind == "model" and len(parts) > 2):
            parts = parts[1:]
        else:
            kind = None
        if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
            # A branch name may contain slashes; a folder's address does not show where it ends.
            revision = "/".join(parts[3:6]) if parts[3] == "refs" else parts[3]
            return RepositoryName(
                "/".join(parts[:2]), kind, None if revision == "main" else revision
            )
        return RepositoryName("/".join(parts), kind)


def look_up(hub: Hub, name: str) -> RepositoryLookup:
    """Requests a model with this name, and a dataset; `datasets/org/name`: only a dataset.

    Raises:
        UsageError: neither exists, or a token is needed.
        IncompleteError: the Hub cannot be reached.
    """
    asked = RepositoryName.parse(name)
    model, dataset = (
        _find(hub, kind, asked.id, asked.revision or "main") if asked.kind in (None, kind) else None
        for kind in ("model", "dataset")
    )
    if isinstance(model, Repository):
        also = isinstance(dataset, Repository)
        return RepositoryLookup(
            "model", model.id, model.licence, model.gated, also=also, revision=asked.revision
        )
    if isinstance(dataset, Repository):
        configs, default = _configs(hub, dataset)
        return RepositoryLookup(
            "dataset",
            dataset.id,
            dataset.licence,
            dataset.gated,
            configs,
            default,
            revision=asked.revision,
        )
    if asked.kind is not None and (error := model or dataset) is not None:
        raise error
    raise UsageError(
        f"{name}: {hub.name} shows no model and no dataset with that name.",
        CHECK_NAME,
    )


def _find(hub: Hub, kind: str, id: str, revision: str) -> Repository | UsageError:
    try:
        return hub.repository(id, kind, id, revision)
    except RefusedToken:
        raise
    except UsageError as error:
        return error


def layouts(hub: Hub, dataset: Repository) -> dict[str, Mapping[str, list[str]]]:
    """Config -> split -> paths of its files, for each config that can be fetched.

    They are published as parquet, converted by the Hub, or in a format that `fetch` converts.

    Raises:
        StageError: as for `Hub.files`.
    """
    configs, what = dataset.card.get("configs"), dataset.id
    declared = parquet_layout.entries(configs)
    paths = list(hub.files(what, dataset))
    layout = {c: splits for c, splits in parquet_layout.published(configs, paths).items() if splits}
    if conversion := find_conversion(hub, dataset, what):
        layout = {**parquet_layout.from_conversion(list(conversion.files), what, ""), **layout}
    own = {} if loading_script(dataset.id, paths) else originals(configs, paths)
    other = {config: found.splits for config, found in own.items() if found.problem is None}
    return {**other, **layout} if declared or not layout else {**layout}


def _configs(hub: Hub, dataset: Repository) -> tuple[tuple[str, ...], str | None]:
    """The configs that can be fetched, in the card's order, and the default one."""
    configs = dataset.card.get("configs")
    declared = parquet_layout.entries(configs)
    every = layouts(hub, dataset)
    infos = parquet_layout.entries(dataset.card.get("dataset_info"))
    in_card = [*map(parquet_layout.config_name, declared)]
    in_card += [str(info.get("config_name")) for info in infos]
    order = {config: index for index, config in reversed(list(enumerate(in_card)))}
    names = sorted(every, key=lambda config: (order.get(config, len(order)), config))
    return tuple(names), parquet_layout.default_config(configs, every)
