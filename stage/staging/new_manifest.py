"""`stage init`: makes a first manifest, commented and valid as it is.

Names are looked up on the Hub, and paths of this machine become entries too; facts from the Hub
(licence, configs) become comments.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.convert.convert import chosen
from stage.convert.formats import conversion_of, is_model
from stage.errors import UsageError, about, as_shown, quoted, suggest_path
from stage.files import human_count
from stage.hub import layout
from stage.hub.client import CHECK_NAME, Hub, RefusedToken, Repository
from stage.hub.datasets import find_configs
from stage.lock.licences import identifiers
from stage.lock.manifest import FORMAT, is_repository_id
from stage.lock.yaml_lines import scalar
from stage.paths import folded, problem_with_asset_name
from stage.walk import Walk


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
                with about(asked.id):
                    found[kind] = hub.repository(kind, asked.id, asked.revision or "main")
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
    card = dataset.card
    with about(dataset.id):
        found = find_configs(hub, dataset, hub.files(dataset))
    entries = layout.entries(card.get("configs")) + layout.entries(card.get("dataset_info"))
    in_card = [layout.config_name(entry) for entry in entries]
    usable = sorted(name for name in found if found[name].problem is None)
    names = sorted(usable, key=lambda c: in_card.index(c) if c in in_card else len(in_card))
    return tuple(names), layout.default_config(card.get("configs"), names)


ENVIRONMENT = "environment.yml"
"""The environment file of a new manifest, beside it."""
_SHOWN_CONFIGS = 12
_WHAT = {
    "csv": "a table",
    "json": "rows in JSON",
    "jsonl": "rows in JSON",
    "text": "lines of text",
    "arrow": "a table",
    "parquet": "a table",
    "imagefolder": "images",
}


@dataclass(frozen=True)
class LocalEntry:
    """A `path:` entry.

    Attributes:
        path: as the user gave it.
        what: in words; `a model`, for one.
        convert: None: a model, or files that are taken as they are.
        separator: between the cells of its CSV, where that is no comma.
    """

    path: Path
    what: str
    convert: str | None = None
    separator: str | None = None

    @property
    def name(self) -> str:
        """For the asset's name: without the suffixes."""
        return self.path.absolute().name.partition(".")[0]

    def lines(self, manifest: Path) -> list[str]:
        """The lines below the asset's name; a relative path becomes relative to the manifest."""
        path = str(self.path) if self.path.is_absolute() else _seen_from(manifest, self.path)
        lines = [f"path: {scalar(path)}"]
        lines += [f"convert: {self.convert}   # {self.what}"] if self.convert else []
        lines += [f"separator: {json.dumps(self.separator)}"] if self.separator else []
        return lines if self.convert else [f"# {self.what}", *lines]


def _seen_from(manifest: Path, path: Path) -> str:
    """A path relative to a manifest, whose folder may not be there yet; links are followed."""
    return os.path.relpath(path.parent.resolve() / path.name, manifest.parent.resolve())


def look_at(path: Path) -> LocalEntry:
    """Finds out what a file or folder is.

    Raises:
        UsageError: there is none, or no file in it.
        OSError: it cannot be read.
    """
    if not path.exists():
        remedy = "Check the path."
        if path.parent != Path() and is_repository_id(str(path)):
            remedy += f" A repository of the Hub: by its address, https://huggingface.co/{path}"
        raise UsageError(f"{path}: there is no such file or folder.", suggest_path(path, remedy))
    walk = Walk(path, ())
    if path.is_file():
        walk.sizes[path.name] = path.stat().st_size
    else:
        walk.run()
    names = sorted(walk.sizes)
    if not names:
        raise UsageError(f"{path}: has no file to take.", "Check the path.")
    if is_model(names):
        return LocalEntry(path, "a model")
    convert = conversion_of(names)
    if convert is None:
        return LocalEntry(path, f"{human_count(len(names), 'file')}, as they are")
    with about(str(path)):
        read = chosen(convert, names)
    what = _WHAT[convert]
    what += f", {len(read)} of {len(names)} files" if len(read) < len(names) else ""
    separator = None
    if convert == "csv":
        with suppress(OSError, ValueError):  # `fetch` says what is wrong with it
            from stage.convert.csv_files import other_separator  # pyarrow takes a while

            separator = other_separator(path if path.is_file() else path / read[0])
    return LocalEntry(path, what, convert, separator)


def new_manifest(
    path: Path, found: Sequence[RepositoryLookup | LocalEntry], profile: Path | None = None
) -> str:
    """The text of a manifest with one entry for each repository, file or folder.

    Args:
        profile: of a cluster's nodes: an environment for them is an entry too.
    """
    hub = [item for item in found if isinstance(item, RepositoryLookup)]
    names = asset_names(
        item.repository if isinstance(item, RepositoryLookup) else item.name for item in found
    )
    bundle = names[0] if path.stem == "manifest" else path.stem
    stated = dict.fromkeys(word for item in hub for word in identifiers(item.licence))
    lines = [
        f"# Next: stage fetch {comment(quoted(path))} -o {place_for_bundle(found)}   "
        "(--dry-run first shows the sizes)",
        f"format: {FORMAT}",
        f"name: {scalar(bundle)}",
    ]
    if hub:
        licences = ", ".join(_flow(comment(licence)) for licence in stated)
        lines.append(f"# policy: {{licences: [{licences}]}}   # refuses others")
    lines.append("assets:")
    for name, item in zip(names, found, strict=True):
        entry = item.lines(path) if isinstance(item, LocalEntry) else _entry(item)
        lines += [f"  {scalar(name)}:", *(f"    {line}" for line in entry)]
    if profile is not None:
        (name,) = asset_names(["train-env"], names)
        lines += [f"  {name}:   # Python, torch, stage and runner"]
        lines += [
            f"    environment: {ENVIRONMENT}",
            f"    profile: {scalar(_seen_from(path, profile))}",
        ]
    return "\n".join(lines) + "\n"


def place_for_bundle(found: Iterable[RepositoryLookup | LocalEntry]) -> Path:
    """Where the bundle can be made: in no folder that it takes in."""
    here = Path.cwd()
    taken = [item.path.resolve() for item in found if isinstance(item, LocalEntry)]
    outer = next((path for path in taken if path in (here, *here.parents)), None)
    return Path("bundle") if outer is None else outer.with_name(f"{outer.name}-bundle")


def _entry(found: RepositoryLookup) -> list[str]:
    notes = [f"licence: {found.licence or 'none stated'}"]
    if found.gated:
        notes.append("gated: accept its terms on the Hub, and set HF_TOKEN")
    if found.also:
        notes.append("a dataset has this name too: `dataset:` in place of `model:`")
    lines = [f"# {comment('; '.join(notes))}", f"{found.kind}: {scalar(found.repository)}"]
    lines.append(
        f"revision: {scalar(found.revision)}"
        if found.revision
        else "# revision: main   # or a tag or a commit; the .lock pins the commit"
    )
    if found.kind == "model":
        lines.append(
            '# include: ["*.safetensors", "*.json"]   # by default, what from_pretrained needs'
        )
        return lines
    if found.configs:
        chosen = found.default_config or found.configs[0]
        others = [config for config in found.configs if config != chosen]
        if others and found.default_config is None:
            lines.append(
                "# several configs and no default: the first is taken; "
                f"choose (of {len(found.configs)})"
            )
        more = ", ..." if len(others) > _SHOWN_CONFIGS else ""
        also = f"   # also: {comment(', '.join(others[:_SHOWN_CONFIGS]))}{more}" if others else ""
        lines.append(f"config: {scalar(chosen)}{also}")
    lines.append("# splits: [train, validation]   # all by default")
    return lines


def asset_names(repositories: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """A name for each: the repository's name; if taken, with its owner's name, or with a number."""
    used = {folded(name) for name in taken}
    result = []
    for repository in repositories:
        own = _usable(repository.rpartition("/")[2])
        candidates = [
            own,
            _usable(repository.replace("/", "-")),
            *(f"{own}-{n}" for n in range(2, len(used) + 3)),
        ]
        name = next(c for c in candidates if folded(c) not in used)
        used.add(folded(name))
        result.append(name)
    return result


def _usable(name: str) -> str:
    return (
        name
        if problem_with_asset_name(name) is None
        else (re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "asset")
    )


def _flow(text: str) -> str:
    """Text as a member of a YAML list in brackets."""
    return (
        text
        if re.fullmatch(r"[\w. ()-]+", text) and text[0].isalnum()
        else json.dumps(text, ensure_ascii=False)
    )


def comment(text: str) -> str:
    """Text fit for one line behind a `#`."""
    return as_shown(" ".join(text.split()))
