"""Looks up a name on the Hub: a model or a dataset, with the facts that a manifest entry needs."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from stage.errors import UsageError
from stage.hub import layout
from stage.hub.client import Hub, Repository
from stage.hub.datasets import find_configs
from stage.hub.refusals import CHECK_NAME, RefusedToken


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
        parts, kind = path.strip("/").split("/"), None
        if (parts[0] == "datasets" and len(parts) > 1) or (parts[0] == "models" and len(parts) > 2):
            kind = parts.pop(0).removesuffix("s")
        if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
            # A branch name may contain slashes; a folder's address does not show where it ends.
            revision = "/".join(parts[3:6]) if parts[3] == "refs" else parts[3]
            id = "/".join(parts[:2])
            return RepositoryName(id, kind, None if revision == "main" else revision)
        return RepositoryName("/".join(parts), kind)


def look_up(hub: Hub, name: str) -> RepositoryLookup:
    """Requests a model with this name, and a dataset; `datasets/org/name`: only a dataset.

    Raises:
        UsageError: neither exists, or a token is needed.
        IncompleteError: the Hub cannot be reached.
    """
    asked = RepositoryName.parse(name)
    found: dict[str, Repository] = {}
    for kind in ("model", "dataset"):
        if asked.kind in (None, kind):
            try:
                found[kind] = hub.repository(asked.id, kind, asked.id, asked.revision or "main")
            except UsageError as error:
                if asked.kind or isinstance(error, RefusedToken):
                    raise
    if not found:
        raise UsageError(
            f"{name}: {hub.name} shows no model and no dataset with that name.", CHECK_NAME
        )
    kind, repository = next(iter(found.items()))
    configs, default = _configs(hub, repository) if kind == "dataset" else ((), None)
    return RepositoryLookup(
        kind,
        repository.id,
        repository.licence,
        repository.gated,
        configs,
        default,
        also=len(found) > 1,
        revision=asked.revision,
    )


def _configs(hub: Hub, dataset: Repository) -> tuple[tuple[str, ...], str | None]:
    """The configs that can be fetched, in the card's order, and the default one."""
    card, what = dataset.card, dataset.id
    found = find_configs(hub, dataset, hub.files(what, dataset), what)
    entries = layout.entries(card.get("configs")) + layout.entries(card.get("dataset_info"))
    in_card = [layout.config_name(entry) for entry in entries]
    usable = sorted(name for name in found if found[name].problem is None)
    names = sorted(usable, key=lambda c: in_card.index(c) if c in in_card else len(in_card))
    return tuple(names), layout.default_config(card.get("configs"), names)
