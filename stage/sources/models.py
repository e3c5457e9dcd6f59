"""A model request -> the files of a repository at a commit, one weight format, each with the Hub's evidence."""

from __future__ import annotations

from stage.errors import UsageError
from stage.lockfile import LockedAsset, Source
from stage.manifest import ModelRequest, as_lock_request
from stage.names import check_path
from stage.sources.hub import Hub
from stage.sources.selection import ingredient_of, locked_file, pickled_weights, select_by_patterns, select_model


def resolve_model(name: str, request: ModelRequest, hub: Hub, what: str, *, allow_pickle: bool = False) -> LockedAsset:
    """Pins the commit, lists the tree, and chooses.

    Args:
        allow_pickle: where the only weights are pickles, make safetensors of them.

    Raises:
        UsageError: no such repository, revision or file.
        PolicyError: pickles only, or a path that may not be in a bundle.
    """
    repository = hub.repository(what, "model", request.repository, request.revision)
    files = hub.files(what, repository)
    if request.include:
        taken, left_out = select_by_patterns(files, request.include, request.exclude, what)
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
            "Check `include` and `exclude`; or is it the wrong repository?",
        )
    kind = "tokenizer" if request.tokenizer_only else "model"
    folder = f"data/models/{name}"
    for file in taken:
        check_path(f"{folder}/{file.path}", what)
    return LockedAsset(
        name=name,
        kind=kind,
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit),
        files=tuple(locked_file(file, f"{folder}/{file.path}") for file in taken),
        left_out=tuple(o for o in left_out if o.path not in pickles),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        made_from=tuple(ingredient_of(file) for file in files if file.path in pickles),
    )
