"""Resolves a model request: the files of a repository at a commit, in one weight format.

Each file has the Hub's evidence. The configs among the files name more: the base model of an
adapter (adapter_config.json of peft), and Python code, which a bundle contains only with
permission of the manifest (docs/adr/0004).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stage.errors import UsageError
from stage.hub.client import Hub, Repository
from stage.hub.model_files import (
    RemoteFile,
    ingredient_of,
    locked_file,
    pickled_weights,
    select_by_patterns,
    select_model,
)
from stage.hub.remote_code import (
    CodeFile,
    find_code,
    made_local,
    may_name_code,
    needed_references,
    references,
)
from stage.lock.model import Base, Code, LeftOut, LockedAsset, LockedFile, Source
from stage.lock.requests import ModelRequest, as_lock_request, way_without
from stage.paths import check_path
from stage.progress import Reporter

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class _Selected:
    """The files of a repository that are chosen by name, before configs are read."""

    repository: Repository
    listing: Mapping[str, RemoteFile]
    taken: list[RemoteFile]
    left_out: list[LeftOut]
    pickles: frozenset[str]


def resolve_model(
    name: str,
    request: ModelRequest,
    hub: Hub,
    reporter: Reporter,
    what: str,
    *,
    allow_pickle: bool = False,
) -> LockedAsset:
    """Pins the commit, lists the tree, chooses files, and reads the chosen configs.

    Args:
        name: the asset's name.
        what: the asset's name in messages.
        allow_pickle: where the only weights are pickles, convert them to safetensors.

    Raises:
        UsageError: the repository, revision or file does not exist.
        PolicyError: there are only pickles, code that is not allowed, or a path that a bundle does
            not allow.
    """
    selected = _select(request, hub, what, allow_pickle=allow_pickle)
    repository, folder = selected.repository, f"data/models/{name}"
    code, rewritten = _code(request, selected, hub, reporter, what)
    files = {
        f"{folder}/{file.path}": locked_file(file, f"{folder}/{file.path}")
        for file in selected.taken
        if file.path not in rewritten
    }
    files |= {f"{folder}/{c.target}": locked_file(c.file, f"{folder}/{c.target}") for c in code}
    for path in files:
        check_path(path, what, way_without(as_lock_request(request)))
    sources = selected.pickles | rewritten
    made_from = [file for path, file in selected.listing.items() if path in sources]
    fetched = {*files, *(f"{folder}/{file.path}" for file in made_from)}
    return LockedAsset(
        name=name,
        kind="tokenizer" if request.tokenizer_only else "model",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit),
        files=tuple(files.values()),
        left_out=tuple(o for o in selected.left_out if f"{folder}/{o.path}" not in fetched),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        made_from=tuple(ingredient_of(file) for file in made_from),
        base=_base(request, selected, hub, reporter, what),
        code=_as_locked(code, files, repository, folder),
    )


def _select(request: ModelRequest, hub: Hub, what: str, *, allow_pickle: bool) -> _Selected:
    repository = hub.repository(what, "model", request.repository, request.revision)
    listing = hub.files(what, repository)
    files = list(listing.values())
    if request.include:
        taken, left_out = select_by_patterns(
            files, request.include, request.exclude, what, allow_code=request.allow_code
        )
    else:
        taken, left_out = select_model(
            files,
            request.exclude,
            what,
            tokenizer_only=request.tokenizer_only,
            allow_pickle=allow_pickle,
        )
    pickles: set[str] = set()
    if allow_pickle and not request.tokenizer_only and not request.include:
        folders = {""} | {file.path.rpartition("/")[0] for file in taken}
        pickles = {path for folder in folders for path in pickled_weights(taken, left_out, folder)}
    if not taken:
        raise UsageError(
            f"{what}: no file of {repository.id} is left to take.",
            "Is it the right repository? A tokenizer has a tokenizer.json, vocab.txt, "
            "or the like at its top."
            if request.tokenizer_only
            else "Check `include` and `exclude`; or is it the wrong repository?",
        )
    return _Selected(repository, listing, taken, left_out, frozenset(pickles))


def _code(
    request: ModelRequest,
    selected: _Selected,
    hub: Hub,
    reporter: Reporter,
    what: str,
) -> tuple[list[CodeFile], set[str]]:
    """The code that the chosen configs need, and the paths of configs that must be made local."""
    repository, listing = selected.repository, selected.listing
    texts = {
        file.path: hub.read(repository, file, what)
        for file in selected.taken
        if may_name_code(file.path)
    }
    found = [reference for path, text in texts.items() for reference in references(path, text)]
    needed = needed_references(request, repository, listing, found, reporter, what)
    foreign = {reference.config for reference in needed if reference.repository}
    rewritten = {path for path in foreign if made_local(path, texts[path]) != texts[path]}
    return find_code(needed, repository, listing, hub, request, what), rewritten


def _base(
    request: ModelRequest, selected: _Selected, hub: Hub, reporter: Reporter, what: str
) -> Base | None:
    """The base model that an adapter needs, unless the manifest says that it does not."""
    file = next((file for file in selected.taken if file.path == ADAPTER_CONFIG), None)
    if file is None or request.tokenizer_only or not request.base:
        return None
    base, elsewhere = base_of(hub.read(selected.repository, file, what))
    if elsewhere:
        reporter.warn(
            f"{what}: this adapter names its base model by a path on its author's machine "
            f"({elsewhere}): add that model to the manifest"
        )
    return base


def _as_locked(
    code: Sequence[CodeFile], files: Mapping[str, LockedFile], own: Repository, folder: str
) -> tuple[Code, ...]:
    """All Python among the files, by the repository it comes from."""
    sources = {f"{folder}/{c.target}": c.repository for c in code}
    repositories: dict[str, Repository] = {}
    paths: dict[str, list[str]] = {}
    for path in files:
        if path.endswith(".py"):
            repository = sources.get(path, own)
            repositories[repository.id] = repository
            paths.setdefault(repository.id, []).append(path)
    return tuple(
        Code(id, repositories[id].commit, repositories[id].licence, tuple(paths[id]))
        for id in paths
    )


def base_of(text: bytes) -> tuple[Base | None, str | None]:
    """The base model that an adapter_config.json names.

    Returns:
        The Hub repository, or None; and the name where it is not a Hub repository (a path on its
        author's disk), or None.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):  # the load test reports it
        return None, None
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        return None, None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or ".." in name:
        return None, name
    revision = config.get("revision")
    return Base(name, revision if isinstance(revision, str) and revision else "main"), None
