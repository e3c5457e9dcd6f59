"""Resolves a model request: the files of a repository at a commit, in one weight format.

Each file has the Hub's evidence. The configs among the files name more: the base model of an
adapter (adapter_config.json of peft), and Python code, which a bundle contains only with
permission of the manifest (docs/adr/0004).
"""

from __future__ import annotations

import json
import re

from stage.errors import UsageError, about
from stage.hub.client import Hub
from stage.hub.model_files import (
    ingredient_of,
    locked_file,
    select_by_patterns,
    select_model,
    select_tokenizer,
)
from stage.hub.remote_code import (
    find_code,
    made_local,
    may_name_code,
    needed_references,
    references,
)
from stage.lock.model import Base, Code, LockedAsset, Source
from stage.lock.requests import ModelRequest, as_lock_request, way_without
from stage.paths import check_path
from stage.progress import Reporter

ADAPTER_CONFIG = "adapter_config.json"


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
    repository = hub.repository(what, "model", request.repository, request.revision)
    listing = hub.files(what, repository)
    every, exclude, folder = list(listing.values()), request.exclude, f"data/models/{name}"
    pickles: list[str] = []
    if request.include:
        taken, left_out = select_by_patterns(
            every, request.include, exclude, what, allow_code=request.allow_code
        )
    elif request.tokenizer_only:
        taken, left_out = select_tokenizer(every, exclude)
    else:
        taken, left_out, pickles = select_model(every, exclude, what, allow_pickle=allow_pickle)
    if not taken:
        raise UsageError(
            f"{what}: no file of {repository.id} is left to take.",
            "Is it the right repository? A tokenizer has a tokenizer.json, vocab.txt, "
            "or the like at its top."
            if request.tokenizer_only
            else "Check `include` and `exclude`; or is it the wrong repository?",
        )
    texts = {
        file.path: hub.read(repository, file, what)
        for file in taken
        if may_name_code(file.path)
        or (file.path == ADAPTER_CONFIG and request.base and not request.tokenizer_only)
    }
    found = [r for path in texts if may_name_code(path) for r in references(path, texts[path])]
    needed = needed_references(request, repository, listing, found, reporter, what)
    code = find_code(needed, repository, listing, hub, what, request.tokenizer_only)
    foreign = {reference.config for reference in needed if reference.repository}
    rewritten = {path for path in foreign if made_local(path, texts[path]) != texts[path]}
    files = {f.path: locked_file(f, f"{folder}/{f.path}") for f in taken if f.path not in rewritten}
    files |= {c.target: locked_file(c.file, f"{folder}/{c.target}") for c in code}
    for file in files.values():
        with about(what):
            check_path(file.path, way_without(as_lock_request(request)))
    made_from = [file for file in every if file.path in rewritten or file.path in pickles]
    base, elsewhere = base_of(texts[ADAPTER_CONFIG]) if ADAPTER_CONFIG in texts else (None, None)
    if elsewhere:
        reporter.warn(
            f"{what}: this adapter names its base model by a path on its author's machine "
            f"({elsewhere}): add that model to the manifest"
        )
    owners = {path: repository for path in files if path.endswith(".py")}
    owners |= {c.target: c.repository for c in code}
    return LockedAsset(
        name=name,
        kind="tokenizer" if request.tokenizer_only else "model",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit),
        files=tuple(files.values()),
        left_out=tuple(o for o in left_out if o.path not in files and o.path not in pickles),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        made_from=tuple(ingredient_of(file) for file in made_from),
        base=base,
        code=tuple(
            Code(
                owner.id,
                owner.commit,
                owner.licence,
                tuple(f"{folder}/{path}" for path in owners if owners[path].id == owner.id),
            )
            for owner in {owner.id: owner for owner in owners.values()}.values()
        ),
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
