"""Where a bundle may not be made: inside another one, and inside a folder that it takes in.

The outer bundle would have files nobody asked for; a folder that holds its own bundle changes with each fetch.
"""

from __future__ import annotations

from pathlib import Path

from stage import bundle as layout
from stage.errors import UsageError
from stage.manifest import Manifest
from stage.request import PathRequest
from stage.sources.listing import local_base
from stage.sources.selection import matches


def refuse_nesting(root: Path, manifest: Manifest) -> None:
    """Looks at where a bundle is going to be.

    Args:
        root: the bundle's folder, which need not exist.

    Raises:
        UsageError: that place lies in a bundle, or in what a `path:` entry takes.
    """
    here = root.resolve()
    for outer in here.parents:
        if layout.holds_bundle(outer):
            raise UsageError(
                f"{root}: lies inside the bundle {outer}, which would have files then that are not of it.",
                f"Give another folder with -o, for instance {outer.parent / manifest.name}.",
            )
    for name, request in manifest.requests.items():
        if not isinstance(request, PathRequest) or request.path.startswith("~"):
            continue
        try:
            base = local_base(request.path, manifest).resolve()
        except (ValueError, RuntimeError):  # no path at all, or links in circles: `resolve_path` has the words
            continue
        if base.is_file() or (base != here and base not in here.parents):
            continue  # nothing lies inside a file: `workfolder` has the words
        inside = f"{here.relative_to(base).as_posix()}/{layout.LOCK}"
        if not any(matches(inside, pattern) for pattern in request.exclude):
            raise UsageError(
                f"{manifest.place(name, 'path')}: `{name}`: the bundle {root} would lie inside {request.path}, which "
                "it takes in: it would change with each fetch.",
                f'Choose an -o outside of it, or exclude it: exclude: ["{inside.partition("/")[0]}/**"]',
            )
