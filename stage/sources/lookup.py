"""What a name means to the Hub: a model or a dataset, with what a manifest's entry needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

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
        configs: of a dataset, those that can be fetched.
        default_config: the one a person means who names none; None if that is not to be known.
        also: whether a dataset has this name besides a model.
    """

    kind: str
    repository: str
    licence: str | None
    gated: bool
    configs: tuple[str, ...] = ()
    default_config: str | None = None
    also: bool = False


def look_up(hub: Hub, name: str) -> LookedUp:
    """Asks for a model of that name, then for a dataset; `datasets/org/name` asks for a dataset alone.

    Raises:
        UsageError: neither is there, or a token is needed.
        IncompleteError: the Hub cannot be reached.
    """
    bare = name.removeprefix("https://huggingface.co/").removeprefix("hf://").strip("/")
    only_dataset = bare.startswith("datasets/")
    bare = bare.removeprefix("datasets/")
    model = None if only_dataset else _find(hub, "model", bare)
    dataset = _find(hub, "dataset", bare)
    if isinstance(model, Repository):
        return LookedUp("model", model.id, model.licence, model.gated, also=isinstance(dataset, Repository))
    if isinstance(dataset, Repository):
        configs, default = _configs(hub, dataset)
        return LookedUp("dataset", dataset.id, dataset.licence, dataset.gated, configs, default)
    if model is None:
        raise dataset
    raise UsageError(
        f"{name}: {hub.name} shows no model and no dataset of that name.",
        "Check the spelling (org/name). For a private one give a token: run `hf auth login`, or set HF_TOKEN.",
    )


def _find(hub: Hub, kind: str, id: str) -> Repository | UsageError:
    try:
        return hub.repository(id, kind, id, "main")
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
    return tuple(sorted(every)), parquet_layout.default_config(declared, every)


def _find_converted(hub: Hub, dataset: Repository) -> Repository | None:
    try:
        return hub.repository(dataset.id, "dataset", dataset.id, CONVERTED)
    except UsageError:
        return None
