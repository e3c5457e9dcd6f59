"""A model request -> the files of a repository at a commit, one weight format, each with the Hub's evidence.

What the configs among them name is looked up here too: the base of an adapter, and Python code, which travels only by
leave of the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stage.asset import Base, Code, LeftOut, LockedAsset, LockedFile, Source
from stage.errors import UsageError
from stage.names import check_path
from stage.progress import Reporter
from stage.request import ModelRequest, as_lock_request, way_without
from stage.sources import adapters
from stage.sources.code import made_local, may_name_code, references
from stage.sources.codefiles import CodeFile, gather, needed_references
from stage.sources.hub import Hub, Repository
from stage.sources.selection import (
    RemoteFile,
    ingredient_of,
    locked_file,
    pickled_weights,
    select_by_patterns,
    select_model,
)
from stage.sources.smallfiles import SmallFiles


@dataclass(frozen=True)
class _Selected:
    repository: Repository
    listing: list[RemoteFile]
    taken: list[RemoteFile]
    left_out: list[LeftOut]
    pickles: frozenset[str]


def resolve_model(
    name: str,
    request: ModelRequest,
    hub: Hub,
    small: SmallFiles,
    reporter: Reporter,
    what: str,
    *,
    allow_pickle: bool = False,
) -> LockedAsset:
    """Pins the commit, lists the tree, chooses, and looks into the configs chosen.

    Args:
        small: reads configs and code.
        allow_pickle: where the only weights are pickles, make safetensors of them.

    Raises:
        UsageError: no such repository, revision or file.
        PolicyError: pickles only, code that is not allowed, or a path that may not be in a bundle.
    """
    selected = _select(request, hub, what, allow_pickle=allow_pickle)
    repository, folder = selected.repository, f"data/models/{name}"
    texts = {file.path: small.read(repository, file, what) for file in selected.taken if may_name_code(file.path)}
    found = [reference for path, text in texts.items() for reference in references(path, text)]
    needed = needed_references(request, repository, selected.listing, found, reporter, what)
    code = gather(needed, repository, selected.listing, hub, small, request, what)
    is_foreign = {reference.config for reference in needed if reference.repository}
    rewritten = {path for path, text in texts.items() if path in is_foreign and made_local(path, text) != text}
    files = {
        f"{folder}/{file.path}": locked_file(file, f"{folder}/{file.path}")
        for file in selected.taken
        if file.path not in rewritten
    }
    files |= {f"{folder}/{c.lands_at}": locked_file(c.file, f"{folder}/{c.lands_at}") for c in code}
    for path in files:
        check_path(path, what, way_without(as_lock_request(request)))
    made_from = [file for file in selected.listing if file.path in selected.pickles | rewritten]
    brought = {*files, *(f"{folder}/{file.path}" for file in made_from)}
    return LockedAsset(
        name=name,
        kind="tokenizer" if request.tokenizer_only else "model",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit),
        files=tuple(files.values()),
        left_out=tuple(o for o in selected.left_out if f"{folder}/{o.path}" not in brought),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        made_from=tuple(ingredient_of(file) for file in made_from),
        base=_base(request, selected, small, reporter, what),
        code=_as_locked(code, files, repository, folder),
    )


def _select(request: ModelRequest, hub: Hub, what: str, *, allow_pickle: bool) -> _Selected:
    repository = hub.repository(what, "model", request.repository, request.revision)
    files = hub.files(what, repository)
    if request.include:
        taken, left_out = select_by_patterns(
            files, request.include, request.exclude, what, allow_code=request.allow_code
        )
    else:
        taken, left_out = select_model(
            files, request.exclude, what, tokenizer_only=request.tokenizer_only, allow_pickle=allow_pickle
        )
    pickles: set[str] = set()
    if allow_pickle and not request.tokenizer_only and not request.include:
        folders = {""} | {file.path.rpartition("/")[0] for file in taken}
        pickles = {path for folder in folders for path in pickled_weights(taken, left_out, folder)}
    if not taken:
        raise UsageError(
            f"{what}: none of the {len(files)} files of {repository.id} is left to take.",
            "Is it the right repository? A tokenizer has a tokenizer.json, vocab.txt, or the like at its top."
            if request.tokenizer_only
            else "Check `include` and `exclude`; or is it the wrong repository?",
        )
    return _Selected(repository, files, taken, left_out, frozenset(pickles))


def _base(request: ModelRequest, selected: _Selected, small: SmallFiles, reporter: Reporter, what: str) -> Base | None:
    """The model that an adapter needs, unless the manifest does without."""
    file = next((file for file in selected.taken if file.path == adapters.CONFIG), None)
    if file is None or request.tokenizer_only or not request.base:
        return None
    base, elsewhere = adapters.base_of(small.read(selected.repository, file, what))
    if elsewhere:
        reporter.warn(
            f"{what}: an adapter whose base model is named by a path of its author's ({elsewhere}), so it is not "
            "brought: ask for that model in the manifest, too"
        )
    return base


def _as_locked(
    code: Sequence[CodeFile], files: Mapping[str, LockedFile], own: Repository, folder: str
) -> tuple[Code, ...]:
    """All Python among the files, by the repository it comes from."""
    sources = {f"{folder}/{c.lands_at}": c.repository for c in code}
    repositories: dict[str, Repository] = {}
    paths: dict[str, list[str]] = {}
    for path in files:
        if path.endswith(".py"):
            repository = sources.get(path, own)
            repositories[repository.id] = repository
            paths.setdefault(repository.id, []).append(path)
    return tuple(Code(id, repositories[id].commit, repositories[id].licence, tuple(paths[id])) for id in paths)
