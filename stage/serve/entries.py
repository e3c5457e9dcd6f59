"""From what a script asked for to entries of a manifest: one per repository and revision.

An entry names the revision as the script did, and the files that were read.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from stage.digests import is_hex
from stage.errors import StageError
from stage.files import human_count, human_size
from stage.hub.client import Hub
from stage.hub.metrics import OWNERS
from stage.hub.model_files import PICKLE_SUFFIXES, RemoteFile, is_document
from stage.lock.yaml_lines import scalar
from stage.paths import problem_with_path
from stage.serve.address import MAIN
from stage.serve.names import ENTRY_KEYS
from stage.serve.record import Asked
from stage.staging.new_manifest import asset_names

_HUB_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_CARD = "README.md"


@dataclass
class Entry:
    """An entry of the manifest.

    Attributes:
        name: of the repository, with the revision if that is not main, for the asset's name.
        lines: below the asset's name; empty: there is no entry.
        note: a comment in its place, or above it; what the command prints about it.
        cannot_travel: files that were read and that a bundle does not take, each with the reason.
    """

    name: str
    lines: list[str] = field(default_factory=list)
    note: str = ""
    cannot_travel: list[str] = field(default_factory=list)


def entries_of(found: Iterable[Asked], hub: Hub, *, allow_code: bool) -> list[Entry]:
    """The entries of all repositories.

    Args:
        allow_code: write `allow_code: true` where code was used; else a comment that says so.
    """
    entries: list[Entry] = []
    for asked in found:
        what = f"{ENTRY_KEYS[asked.kind]} {asked.name}"
        if not asked.exists:
            entries.append(Entry(asked.name, note=f"{what}: the Hub does not show it"))
            continue
        kind = _HUB_KINDS[asked.kind]
        # Clients may get a commit from an answer's body, and ask for files of this commit alone.
        for revision in [r for r, commit in asked.commits.items() if commit is None]:
            with suppress(StageError):  # it comes again below
                asked.commits[revision] = hub.repository(what, kind, asked.name, revision).commit
        for revision, read in asked.revisions():
            try:
                repository = hub.repository(what, kind, asked.name, revision)
                listing = hub.files(what, repository)
            except StageError as error:
                lost = f"{what} at {revision}: {error.message}"
                entries.append(Entry(asked.name, note=lost, cannot_travel=[lost]))
                continue
            entry = _entry(asked, read, listing, what, allow_code=allow_code)
            if entry.lines:
                pin = f"revision: {scalar(revision)}"
                comment = "" if revision == repository.commit else f"   # {repository.commit}"
                entry.lines.insert(1, pin + comment)
                if revision != MAIN:
                    entry.name += f"-{revision[:12] if is_hex(revision, 40) else revision}"
            files = [listing[path] for path in read if path in listing]
            size = human_size(sum(file.size for file in files))
            seen = f"{what} at {revision}: {human_count(len(files), 'file')} read, {size}"
            entry.note = f"{seen}; {entry.note}" if entry.note else seen
            entries.append(entry)
    return entries


def _entry(
    asked: Asked, read: set[str], listing: Mapping[str, RemoteFile], what: str, *, allow_code: bool
) -> Entry:
    entry = Entry(asked.name)
    code = sorted(path for path in read if path.endswith(".py"))
    if asked.kind == "spaces":
        owner, _, name = asked.name.rpartition("/")
        if f"{name}.py" not in read:
            entry.note = "no metric of `evaluate`, so a bundle cannot have it"
            return entry
        entry.lines.append(f"metric: {scalar(name if owner in OWNERS else asked.name)}")
        code = [f"{name}.py"]
    elif asked.kind == "models" and code and len(code) == len(read):
        entry.note = "only code of it was read; it comes with the model it is for"
        return entry
    else:
        entry.lines.append(f"{ENTRY_KEYS[asked.kind]}: {scalar(asked.name)}")
        reasons = {path: reason for path in sorted(read) if (reason := _why_not(path))}
        entry.cannot_travel = [f"{what}: {path}: {why}" for path, why in reasons.items()]
        taken = {path for path in read if path in listing and path not in reasons}
        # A revision that was only asked about must exist too: its card stands for it.
        if not taken:
            taken = {_CARD} & set(listing) or {p for p in sorted(listing)[:1] if not _why_not(p)}
        if not taken:
            return Entry(asked.name, [], "no file of it can travel", entry.cannot_travel)
        entry.lines += _include(_patterns(taken, listing))
    if code:
        line = f"allow_code: true   # the script ran {', '.join(code)}"
        entry.lines.append(line if allow_code else f"# {line}: read it, then remove the first `#`")
    return entry


def _why_not(path: str) -> str:
    """Why a bundle does not take a file of a repository; empty if it does."""
    if path.lower().endswith(PICKLE_SUFFIXES):
        return (
            "a pickle, which can run code when loaded. For a model's weights, remove `include` "
            "from its entry and fetch with --allow-pickle: they travel as safetensors"
        )
    return problem_with_path(path) or ""


def _include(patterns: list[str]) -> list[str]:
    together = f"include: [{', '.join(map(scalar, patterns))}]"
    if len(together) <= 90:
        return [together]
    return ["include:", *(f"  - {scalar(pattern)}" for pattern in patterns)]


def _patterns(taken: Collection[str], every: Iterable[str], inside: str = "") -> list[str]:
    """The shortest patterns that match these files in a folder, and no other file."""
    here = [path for path in every if path.startswith(inside)]
    # The card and licences come anyway; `.gitattributes` is part of no data.
    needed = {path for path in here if not is_document(path) and path != ".gitattributes"}
    wanted = {path for path in here if path in taken}
    if wanted and (needed or wanted) <= wanted:
        return [glob.escape(inside) or "*"]
    patterns = [
        glob.escape(path)
        for path in sorted(wanted & needed or wanted)
        if "/" not in path.removeprefix(inside)
    ]
    below = {path for path in wanted if "/" in path.removeprefix(inside)}
    for folder in sorted({path[: path.index("/", len(inside)) + 1] for path in below}):
        patterns += _patterns(taken, here, folder)
    return patterns


def names_of(entries: Iterable[Entry]) -> list[str]:
    """The names of the assets, in the order of the entries that have lines."""
    own = (entry.name.split("/", 1) for entry in entries if entry.lines)
    return asset_names("/".join([*words[:-1], words[-1].replace("/", "-")]) for words in own)


def asset_lines(entries: Iterable[Entry]) -> list[str]:
    """All entries as lines of a manifest below `assets:`."""
    several = list(entries)
    names = iter(names_of(several))
    lines: list[str] = []
    for entry in several:
        lines.append(f"  # {' '.join(entry.note.split())}")
        if entry.lines:
            lines += [f"  {scalar(next(names))}:", *(f"    {line}" for line in entry.lines)]
    return lines
