"""From what a script asked for to entries of a manifest, with the Hub's listings.

Each entry is pinned: `main` becomes the commit of the day; another branch or tag keeps its name,
because the script asks for it by that name, and the lock pins its commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stage.errors import PolicyError, StageError, UsageError
from stage.fetch.new_manifest import asset_names
from stage.hub.client import Hub, Repository
from stage.hub.lookup import layouts
from stage.hub.metrics import OWNERS
from stage.hub.model_files import RemoteFile, is_document, select_model
from stage.hub.parquet_layout import CONVERSION_BRANCH
from stage.trace.record import Asked
from stage.util.digests import is_hex
from stage.util.yaml_lines import scalar

_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_HOUSEKEEPING = (".gitattributes",)


@dataclass
class Entry:
    """An entry of the manifest: its lines below the asset's name, or what is instead of it.

    Attributes:
        name: of the repository, for the asset's name.
        lines: empty: only the notes are written.
        notes: comments above the lines.
    """

    name: str
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def entries_of(found: Iterable[Asked], hub: Hub, *, allow_code: bool) -> list[Entry]:
    """The entries of all repositories, one per revision that was used.

    Args:
        allow_code: write `allow_code: true` where code was used; else a comment that says so.
    """
    entries: list[Entry] = []
    for asked in found:
        if not asked.exists:
            entries.append(Entry(asked.name, [], [f"{_what(asked)}: the Hub does not show it"]))
            continue
        try:
            entries += _of_repository(asked, hub, allow_code=allow_code)
        except StageError as error:
            entries.append(Entry(asked.name, [], [f"{_what(asked)}: {error.message}"]))
    return entries


def _what(asked: Asked) -> str:
    return f"{_KINDS[asked.kind]} {asked.name}"


def _of_repository(asked: Asked, hub: Hub, *, allow_code: bool) -> list[Entry]:
    """One entry per revision; commits of named revisions are the same as these.

    Raises:
        StageError: the Hub does not answer.
    """
    kind = _KINDS[asked.kind]
    named = [name for name in asked.revisions if name != CONVERSION_BRANCH]
    if not named and not asked.commits:
        named = ["main"]
    pinned = {r: hub.repository(_what(asked), kind, asked.name, r) for r in named}
    alone = asked.commits - {repository.commit for repository in pinned.values()}
    if asked.kind == "datasets":  # the commit of the Hub's conversion is no revision of its own
        alone -= {asked.revisions.get(CONVERSION_BRANCH) or ""}
    pinned |= {c: hub.repository(_what(asked), kind, asked.name, c) for c in sorted(alone)}
    entries = []
    for revision, repository in pinned.items():
        used = (asked.files.get(r, set()) for r in {revision, repository.commit, CONVERSION_BRANCH})
        entry = Entry(asked.name)
        _FILLERS[asked.kind](entry, asked, repository, set().union(*used), hub, allow_code)
        if entry.lines:
            entry.lines.insert(1, _revision(revision, repository.commit))
        entries.append(entry)
    return entries


def _revision(asked: str, commit: str) -> str:
    if asked == "main":
        return f"revision: {scalar(commit)}   # main when it was traced"
    return f"revision: {scalar(asked)}" + (
        "" if is_hex(asked, 40) else f"   # {commit} when it was traced"
    )


def _model(
    entry: Entry, asked: Asked, repository: Repository, files: set[str], hub: Hub, allow_code: bool
) -> None:
    what = _what(asked)
    files = {path for path in files if path not in _HOUSEKEEPING}
    code = sorted(path for path in files if path.endswith(".py"))
    if not files:
        entry.notes.append(f"{what}: asked about, and no file of it was read")
        return
    if len(code) == len(files):
        entry.notes.append(f"{what}: only code of it was read; it comes with the model it is for")
        return
    listing = list(hub.files(what, repository).values())
    key, include, notes = _selection(listing, files - set(code), what)
    entry.notes += notes
    entry.lines.append(f"{key}: {scalar(asked.name)}")
    if include:
        entry.lines.append(f"include: [{', '.join(map(scalar, include))}]")
    if code:
        _permit(entry, f"the script ran {', '.join(code)}", allow_code)


def _selection(
    listing: list[RemoteFile], used: set[str], what: str
) -> tuple[str, list[str], list[str]]:
    """The key of the entry, its `include` (empty: none is needed), and notes.

    The smallest of these that has all files that were used: the tokenizer, what `from_pretrained`
    needs, exactly these files.
    """
    used = {path for path in used if not is_document(path)}
    tokenizer, _ = select_model(listing, (), what, tokenizer_only=True)
    if used <= {file.path for file in tokenizer}:
        return "tokenizer", [], []
    try:
        taken, _ = select_model(listing, (), what)
    except PolicyError as error:
        return "model", [], [f"{error.message} {error.remedy}"]
    except UsageError:
        taken = []
    if used <= {file.path for file in taken}:
        return "model", [], []
    return "model", sorted(used), []


def _dataset(
    entry: Entry, asked: Asked, repository: Repository, files: set[str], hub: Hub, allow_code: bool
) -> None:
    what = _what(asked)
    data = {path for path in files if not is_document(path) and path not in _HOUSEKEEPING}
    layout = layouts(hub, repository)
    config = _config(layout, data)
    entry.lines.append(f"dataset: {scalar(asked.name)}")
    if config is None:
        if layout:
            entry.notes.append(f"{what}: which config was used is not known; it has these")
            entry.lines.append(f"config: {scalar(next(iter(layout)))}   # {', '.join(layout)}")
        return
    if len(layout) > 1:
        entry.lines.append(f"config: {scalar(config)}")
    splits = [split for split, paths in layout[config].items() if data & set(paths)]
    if len(splits) < len(layout[config]):
        entry.lines.append(f"splits: [{', '.join(map(scalar, splits))}]")
    if others := data - {path for paths in layout[config].values() for path in paths}:
        entry.notes.append(f"{what}: also read, and not part of that config: {sorted(others)[:8]}")


def _config(layout: Mapping[str, Mapping[str, list[str]]], data: set[str]) -> str | None:
    """The config with the most of the files that were read; None: none has any."""
    have = {
        config: len(data & {path for paths in splits.values() for path in paths})
        for config, splits in layout.items()
    }
    best = max(have, key=lambda config: have[config], default=None)
    return best if best is not None and have[best] else None


def _space(
    entry: Entry, asked: Asked, repository: Repository, files: set[str], hub: Hub, allow_code: bool
) -> None:
    owner, _, name = asked.name.rpartition("/")
    if f"{name}.py" not in files:
        entry.notes.append(f"{_what(asked)}: no metric of `evaluate`, so a bundle cannot have it")
        return
    entry.lines.append(f"metric: {scalar(name if owner in OWNERS else asked.name)}")
    _permit(entry, f"the script ran {name}.py", allow_code)


def _permit(entry: Entry, why: str, allow_code: bool) -> None:
    if allow_code:
        entry.lines.append(f"allow_code: true   # {why}")
    else:
        entry.lines.append(f"# allow_code: true   # {why}: read it, then remove the first `#`")


_FILLERS = {"models": _model, "datasets": _dataset, "spaces": _space}


def asset_lines(entries: Iterable[Entry]) -> list[str]:
    """All entries as lines of a manifest below `assets:`."""
    several = list(entries)
    names = iter(asset_names(entry.name for entry in several if entry.lines))
    lines: list[str] = []
    for entry in several:
        lines += [f"  # {' '.join(note.split())}" for note in entry.notes]
        if entry.lines:
            lines += [f"  {scalar(next(names))}:", *(f"    {line}" for line in entry.lines)]
    return lines
