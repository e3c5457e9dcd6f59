"""A bundle in the layout of huggingface_hub's cache, as links: nothing is downloaded or copied.

`HubRepository` (from `inputs`) -> `models--org--name/{refs/main, snapshots/<commit>/<file>}`, as in
huggingface_hub's `file_download.py`. Several ranks may write the same cache at the same time: each
file appears atomically.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from runner.errors import write_atomically
from runner.inputs import HubRepository


def folder_name(repository: HubRepository) -> str:
    """The folder `models--org--name`, as in huggingface_hub's `repo_folder_name`."""
    return "--".join([repository.kind, *repository.id.split("/")])


def write_hub_cache(repositories: Iterable[HubRepository], folder: Path) -> None:
    """Writes the cache; existing files stay.

    Args:
        folder: the folder for HF_HUB_CACHE.
    """
    for repository in repositories:
        root = folder / folder_name(repository)
        for commit, files in repository.snapshots.items():
            for name, content in files.items():
                _put(content, root / "snapshots" / commit / name)
        for revision, commit in repository.refs.items():
            _put(commit.encode(), root / "refs" / revision)


def _put(content: Path | bytes, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        write_atomically(target, content)
        return
    # Renamed into place, which replaces the broken link of a bundle that was moved.
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.symlink_to(content)
    aside.replace(target)
