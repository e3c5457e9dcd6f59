"""What a name means to the Hub: a model or a dataset, with what a manifest's entry needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from stage.errors import UsageError
from stage.sources import parquet_layout
from stage.sources.datasets import CONVERTED
from stage.sources.hub import Hub, Repository
from stage.sources.original_layout import loading_script, originals


@dataclass(frozen=True)
class LookedUp:
    """A repository as the Hub describes it today.

    Attributes:
        kind: `model` or `dataset`.
        repository: its name today.
        configs: of a dataset, those that can be fetched, in the card's order.
        default_config: the one a person means who names none; None if that is not to be known.
        also: whether a dataset has this name besides a model.
        revision: the one that was asked for by a page's address; None: `main`.
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
class Asked:
    """What a person named: a repository, of which kind if that was said, at which revision if that was."""

    id: str
    kind: str | None = None
    revision: str | None = None

    @staticmethod
    def parse(text: str) -> Asked:
        """Reads `org/name`, `datasets/org/name`, `models/org/name`, or the address of a page of one on any Hub."""
        is_address = text.startswith(("https://", "http://"))
        path = unquote(urlsplit(text).path) if is_address else text.removeprefix("hf://")
        parts = path.strip("/").split("/")
        kind = {"datasets": "dataset", "models": "model"}.get(parts[0]) if len(parts) > 1 else None
        if kind == "dataset" or (kind == "model" and len(parts) > 2):
            parts = parts[1:]
        else:
            kind = None
        if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
            # a branch may have slashes in it; of an address below a folder nobody can tell where the branch ends
            revision = "/".join(parts[3:6]) if parts[3] == "refs" else parts[3]
            return Asked("/".join(parts[:2]), kind, None if revision == "main" else revision)
        return Asked("/".join(parts), kind)


def look_up(hub: Hub, name: str) -> LookedUp:
    """Asks for a model of that name, then for a dataset; `datasets/org/name` asks for a dataset alone.

    Raises:
        UsageError: neither is there, or a token is needed.
        IncompleteError: the Hub cannot be reached.
    """
    asked = Asked.parse(name)
    model, dataset = (
        _find(hub, kind, asked.id, asked.revision or "main") if asked.kind in (None, kind) else None
        for kind in ("model", "dataset")
    )
    if isinstance(model, Repository):
        also = isinstance(dataset, Repository)
        return LookedUp("model", model.id, model.licence, model.gated, also=also, revision=asked.revision)
    if isinstance(dataset, Repository):
        configs, default = _configs(hub, dataset)
        return LookedUp(
            "dataset", dataset.id, dataset.licence, dataset.gated, configs, default, revision=asked.revision
        )
    if asked.kind is not None and (error := model or dataset) is not None:
        raise error
    raise UsageError(
        f"{name}: {hub.name} shows no model and no dataset of that name.",
        "Check the spelling (org/name). For a private one give a token: run `hf auth login`, or set HF_TOKEN.",
    )


def _find(hub: Hub, kind: str, id: str, revision: str) -> Repository | UsageError:
    try:
        return hub.repository(id, kind, id, revision)
    except UsageError as error:
        return error


def _configs(hub: Hub, dataset: Repository) -> tuple[tuple[str, ...], str | None]:
    """Configs published as parquet or converted by the Hub, and those that `fetch` can convert; and the default."""
    declared = dataset.card.get("configs")
    paths = [file.path for file in hub.files(dataset.id, dataset)]
    layout = parquet_layout.from_card(declared, paths) if declared else parquet_layout.from_names(paths)
    layout = {config: splits for config, splits in layout.items() if splits}
    converted = _find_converted(hub, dataset)
    if converted is not None:
        files = [file.path for file in hub.files(dataset.id, converted)]
        layout = {**parquet_layout.from_conversion(files, dataset.id, ""), **layout}
    own = {} if loading_script(dataset.id, paths) else originals(declared, paths)
    own = {config: found for config, found in own.items() if found.problem is None}
    every = {**own, **layout} if declared or not layout else layout
    in_card = [parquet_layout.config_name(e) for e in parquet_layout.entries(declared)]
    in_card += [str(e.get("config_name")) for e in parquet_layout.entries(dataset.card.get("dataset_info"))]
    order = {config: place for place, config in reversed(list(enumerate(in_card)))}
    configs = sorted(every, key=lambda config: (order.get(config, len(order)), config))
    return tuple(configs), parquet_layout.default_config(declared, every)


def _find_converted(hub: Hub, dataset: Repository) -> Repository | None:
    try:
        return hub.repository(dataset.id, "dataset", dataset.id, CONVERTED)
    except UsageError:
        return None
