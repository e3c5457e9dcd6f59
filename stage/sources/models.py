"""A model request -> the files of a repository at a commit, one weight format, each with the Hub's evidence."""

from __future__ import annotations

from stage.errors import UsageError
from stage.lockfile import LockedAsset, Source
from stage.manifest import ModelRequest, as_lock_request
from stage.names import check_path
from stage.sources.hub import Hub
from stage.sources.selection import locked_file, select_by_patterns, select_model


def resolve_model(name: str, request: ModelRequest, hub: Hub, what: str) -> LockedAsset:
    """Pins the commit, lists the tree, and chooses.

    Raises:
        UsageError: no such repository, revision or file.
        PolicyError: pickles only, or a path that may not be in a bundle.
    """
    repository = hub.repository(what, "model", request.repository, request.revision)
    files = hub.files(what, repository)
    if request.include:
        taken, left_out = select_by_patterns(files, request.include, request.exclude, what)
    else:
        taken, left_out = select_model(files, request.exclude, what, tokenizer_only=request.tokenizer_only)
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
        left_out=tuple(left_out),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
    )
