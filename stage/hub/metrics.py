"""Resolves a metric: the Space that `evaluate.load("accuracy")` reads, pinned by commit.

A metric is Python code that runs on the cluster, so the manifest must allow it. `evaluate` reads
`<name>.py` and the modules that it imports from its folder; the rest of a Space is its web page.
"""

from __future__ import annotations

import re

from stage.errors import PolicyError, UsageError, about
from stage.hub.client import Hub, Repository
from stage.hub.model_files import is_document, locked_file
from stage.hub.refusals import DEFAULT_ENDPOINT
from stage.hub.remote_code import Reference, find_code
from stage.lock.model import Code, LeftOut, LockedAsset, Source
from stage.lock.requests import MetricRequest, as_lock_request, way_without
from stage.paths import check_path
from stage.progress import Reporter

OWNERS = ("evaluate-metric", "evaluate-comparison", "evaluate-measurement")
"""The owners of the Spaces that `evaluate` asks for a name without an owner, in its order."""
REQUIREMENTS = "requirements.txt"
_GIVE_THE_NAME = "Give the name that your script gives to evaluate.load(...)."
_FROM_ELSEWHERE = re.compile(
    r"^(?:import|from)\s+\.[^#\r\n]*#\s+From:\s+(\S+)", re.MULTILINE | re.ASCII
)


def resolve_metric(
    name: str, request: MetricRequest, hub: Hub, reporter: Reporter, what: str
) -> LockedAsset:
    """Pins the commit and finds the modules of a metric.

    Args:
        name: the asset's name.
        what: the asset's name in messages.

    Raises:
        UsageError: no such Space or revision; it is no metric, or not one that loads offline.
        PolicyError: the manifest does not allow code.
    """
    space = _space(request, hub, what)
    listing = hub.files(what, space)
    main = f"{space.id.rpartition('/')[2]}.py"
    if main not in listing:
        raise UsageError(
            f"{what}: the Space {space.id} has no {main}, so it is no metric of `evaluate`.",
            _GIVE_THE_NAME,
        )
    if not request.allow_code:
        raise PolicyError(
            f"{what}: a metric is Python code, and your script runs it: {main} of {space.id}.",
            f"Read that code ({DEFAULT_ENDPOINT}/spaces/{space.id}/tree/{space.commit}); if it may "
            "run on your cluster: `allow_code: true`.",
        )
    text = hub.read(space, listing[main], what).decode("utf-8", "replace")
    if match := _FROM_ELSEWHERE.search(text):
        raise UsageError(
            f"{what}: {space.id} downloads {match[1]} each time it is loaded, so it never loads "
            "without a network.",
            "Take another metric: sacrebleu for bleu, for example.",
        )
    loaded = Reference(main, "evaluate.load", None, main, space.id)
    modules = find_code([loaded], space, listing, hub, what, tokenizer_only=True)
    code = {module.target for module in modules}
    folder = f"data/metrics/{name}"
    taken = [f for p, f in listing.items() if p in code or p == REQUIREMENTS or is_document(p)]
    for file in taken:
        with about(what):
            check_path(f"{folder}/{file.path}", way_without(as_lock_request(request)))
    if REQUIREMENTS in listing:  # the environment must have them
        lines = hub.read(space, listing[REQUIREMENTS], what).decode("utf-8", "replace").split("\n")
        packages = [line.strip() for line in lines if not line.strip().startswith("#")]
        if others := ", ".join(p for p in packages if p and "evaluate" not in p):
            reporter.note(f"{name}: its {REQUIREMENTS} asks for: {others}")
    own = tuple(f"{folder}/{path}" for path in sorted(code))
    return LockedAsset(
        name=name,
        kind="metric",
        request=as_lock_request(request),
        source=Source("hub", space.id, request.revision, space.commit),
        files=tuple(locked_file(file, f"{folder}/{file.path}") for file in taken),
        left_out=tuple(
            LeftOut(file.path, file.size, "not read by evaluate.load")
            for file in listing.values()
            if file not in taken
        ),
        licence=space.licence,
        code=(Code(space.id, space.commit, space.licence, own),),
    )


def _space(request: MetricRequest, hub: Hub, what: str) -> Repository:
    """The Space of a name; a name without an owner is looked up as `evaluate` does.

    Raises:
        UsageError: there is none.
    """
    if "/" in request.repository:
        return hub.repository(what, "space", request.repository, request.revision)
    tried = [f"{owner}/{request.repository}" for owner in OWNERS]
    refusals = []
    for id in tried:
        try:
            return hub.repository(what, "space", id, request.revision)
        except UsageError as refusal:
            refusals.append(refusal)
    raise UsageError(
        f"{what}: `{request.repository}` is no metric of `evaluate` (looked for "
        f"{', '.join(tried)}): {refusals[0].message}",
        f"{_GIVE_THE_NAME[:-1]}; one of another owner is `metric: owner/name`.",
    )
