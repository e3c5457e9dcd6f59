"""What the requests of a script ask from a Hub, as entries of a manifest.

There is one entry per repository and revision. It names the revision as the script did, and the
files that were read.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import yaml

from stage.digests import is_hex
from stage.errors import StageError, UsageError
from stage.files import human_count, human_size
from stage.hub.client import Hub
from stage.hub.metrics import OWNERS
from stage.hub.model_files import PICKLE_SUFFIXES, RemoteFile, is_document
from stage.lock.yaml_lines import scalar
from stage.paths import problem_with_path
from stage.serve.answers import MAIN, Address
from stage.serve.catalogue import CARD, ENTRY_KEYS
from stage.staging.new_manifest import asset_names
from stage.staging.prechecks import needed_for_weights

_HUB_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_WITH_ACCESS = (
    "If its name is right: accept its terms on its page, give a token: HF_TOKEN, and trace again"
)


@dataclass(frozen=True)
class Exchange:
    """A request to the Hub, and what its answer says.

    Attributes:
        status: of the answer.
        commit: the commit that a file's answer names.
        location: of a redirect.
    """

    target: str
    status: int
    commit: str | None = None
    location: str | None = None


@dataclass
class Asked:
    """A repository that a script used, by the first name that it used.

    Attributes:
        exists: whether the Hub has it.
        commits: each revision that the script asked for -> its commit; None: no answer named it.
        files: paths whose bytes were there, by revision.
        refused: whether the Hub refused something of it to this account.
    """

    kind: str
    name: str
    exists: bool = False
    commits: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    refused: bool = False

    def note(self, address: Address, exchange: Exchange, *, names_file: bool) -> None:
        """Adds one request; `names_file`: an answer without an error shows that the file exists."""
        is_there = exchange.status < 400
        self.refused |= exchange.status in (401, 403)
        if not is_there and exchange.commit is None:  # with a commit, only the file is missing
            return
        self.exists = True
        revision, path = address.split()
        commit = revision if is_hex(revision, 40) else exchange.commit
        self.commits[revision] = commit or self.commits.get(revision)
        if names_file and is_there:
            self.files.setdefault(revision, set()).add(path)

    def revisions(self) -> Iterator[tuple[str, set[str]]]:
        """Each revision by the name that the script used, with the files that were read.

        Clients ask for a commit where the script named a branch or a tag: that is the same
        revision. If the script named none, it is `main`.
        """
        named = [r for r in self.commits if not is_hex(r, 40)]
        behind = {self.commits[r] for r in named}
        for revision in [*named, *(r for r in self.commits if r not in named and r not in behind)]:
            same = (revision, self.commits[revision] or "")
            yield revision, set().union(*(self.files.get(r, ()) for r in same))


def gather(exchanges: Iterable[Exchange]) -> list[Asked]:
    """The repositories that requests asked for; an old name and its new one are one repository."""
    found: dict[tuple[str, str], Asked] = {}
    for exchange in exchanges:
        address = Address.parse(exchange.target)
        if address is None:
            continue
        asked = found.setdefault((address.kind, address.name), Asked(address.kind, address.name))
        moved = Address.parse(exchange.location) if exchange.location else None
        has_moved = moved is not None and (moved.kind, moved.name) != (address.kind, address.name)
        if moved and has_moved:
            # If the new name was asked for before, its record goes on under the old one.
            other = found.setdefault((moved.kind, moved.name), asked)
            other.name = asked.name
            found[address.kind, address.name] = asked = other
        # The Hub redirects an old name without a look whether the file exists.
        asked.note(address, exchange, names_file=address.is_file and not has_moved)
    return list({id(asked): asked for asked in found.values()}.values())


@dataclass
class ManifestEntry:
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


def entries_of(found: Iterable[Asked], hub: Hub, *, allow_code: bool) -> list[ManifestEntry]:
    """The entries of all repositories.

    Args:
        allow_code: write `allow_code: true` where code was used; else a comment that says so.
    """
    entries: list[ManifestEntry] = []
    for asked in found:
        what = f"{ENTRY_KEYS[asked.kind]} {asked.name}"
        if not asked.exists:
            why = f" to this account. {_WITH_ACCESS}" if asked.refused else ""
            entries.append(ManifestEntry(asked.name, note=f"{what}: the Hub does not show it{why}"))
            continue
        # Clients may get a commit from an answer's body, and ask for files of this commit alone.
        for revision in [r for r, commit in asked.commits.items() if commit is None]:
            with suppress(StageError):  # it comes again below
                repository = hub.repository(what, _HUB_KINDS[asked.kind], asked.name, revision)
                asked.commits[revision] = repository.commit
        for revision, read in asked.revisions():
            try:
                entries.append(_entry(asked, revision, read, hub, what, allow_code=allow_code))
            except StageError as error:
                lost = f"{what} at {revision}: {error.message}"
                entries.append(ManifestEntry(asked.name, note=lost, cannot_travel=[lost]))
    return entries


def _entry(
    asked: Asked, revision: str, read: set[str], hub: Hub, what: str, *, allow_code: bool
) -> ManifestEntry:
    """The entry of one revision.

    Raises:
        StageError: the Hub does not show it any more.
    """
    repository = hub.repository(what, _HUB_KINDS[asked.kind], asked.name, revision)
    if asked.refused and not read:
        raise UsageError(f"the Hub refused its files. {_WITH_ACCESS}")
    listing = hub.files(what, repository)
    files = [listing[path] for path in read if path in listing]
    size = human_size(sum(file.size for file in files))
    seen = f"{what} at {revision}: {human_count(len(files), 'file')} read, {size}"
    reasons = {path: reason for path in sorted(read) if (reason := _why_not(path))}
    entry = ManifestEntry(asked.name, note=seen)
    if asked.kind == "datasets" and "/" not in asked.name and repository.id != asked.name:
        entry.note += f"; write {repository.id} in the script: newer libraries take no shorter name"
    code = sorted(path for path in read if path.endswith(".py"))
    owner, _, metric = asked.name.rpartition("/")
    include: list[str] = []
    key, name = ENTRY_KEYS[asked.kind], asked.name
    if asked.kind == "spaces":
        if f"{metric}.py" not in read:
            entry.note += "; no metric of `evaluate`, so a bundle cannot have it"
            return entry
        name, code = metric if owner in OWNERS else asked.name, [f"{metric}.py"]
    elif asked.kind == "models" and code and len(code) == len(read):
        entry.note += "; only code of it was read; it comes with the model it is for"
        return entry
    else:
        entry.cannot_travel = [f"{what}: {path}: {why}" for path, why in reasons.items()]
        taken = read - reasons.keys()
        if asked.kind == "models":  # timm asks for the weights alone; a fetch wants their config
            taken |= set(needed_for_weights(taken, listing.keys() - taken))
        include = _include(taken, listing)
        if not include:
            entry.note += "; no file of it can travel"
            return entry
    comment = "" if revision == repository.commit else f"   # {repository.commit}"
    entry.lines = [f"{key}: {scalar(name)}", f"revision: {scalar(revision)}{comment}", *include]
    if revision != MAIN:
        entry.name += f"-{revision[:12] if is_hex(revision, 40) else revision}"
    if code:
        line = f"allow_code: true   # the script ran {', '.join(code)}"
        waits = f"# {line}: read it, then remove the first `#`"
        entry.lines.append(line if allow_code else waits)
    return entry


def _why_not(path: str) -> str:
    """Why a bundle does not take a file of a repository; empty if it does."""
    if path.lower().endswith(PICKLE_SUFFIXES):
        return (
            "a pickle, which can run code when loaded. For a model's weights, remove `include` "
            "from its entry and fetch with --allow-pickle: they travel as safetensors"
        )
    return problem_with_path(path) or ""


def _include(read: Collection[str], listing: Mapping[str, RemoteFile]) -> list[str]:
    """The key `include` for the files that were read; no lines: no file can travel."""
    taken = set(listing).intersection(read)
    # A revision that was only asked about must exist too: its card stands for it.
    if not taken:
        taken = {CARD} & set(listing) or {p for p in sorted(listing)[:1] if not _why_not(p)}
    if not taken:
        return []
    patterns = {"include": _patterns(taken, listing)}
    text = yaml.safe_dump(patterns, default_flow_style=None, width=90, allow_unicode=True)
    return str(text).splitlines()


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


def names_of_assets(entries: Iterable[ManifestEntry]) -> list[str]:
    """The names of the assets, in the order of the entries that have lines."""
    own = (entry.name.split("/", 1) for entry in entries if entry.lines)
    return asset_names("/".join([*words[:-1], words[-1].replace("/", "-")]) for words in own)


def asset_lines(entries: Collection[ManifestEntry]) -> list[str]:
    """All entries as lines of a manifest below `assets:`."""
    names = iter(names_of_assets(entries))
    lines: list[str] = []
    for entry in entries:
        lines.append(f"  # {' '.join(entry.note.split())}")
        if entry.lines:
            lines += [f"  {scalar(next(names))}:", *(f"    {line}" for line in entry.lines)]
    return lines
