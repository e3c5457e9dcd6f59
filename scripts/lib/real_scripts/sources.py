"""Files of other people's repositories at a commit, from git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class NoSource(Exception):
    """GitHub, or what git reads instead of it, does not have it."""


class Sources:
    """Folders of repositories. Clones are kept in `cache`, one commit each, without history."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def export(self, repository: str, commit: str, folder: str, target: Path) -> Path:
        """Writes all files of `folder` at that commit below `target`, and returns `target`.

        Raises:
            NoSource: the commit cannot be had here.
        """
        where = self._cache / "git" / repository
        if not (where / "HEAD").exists():
            where.mkdir(parents=True, exist_ok=True)
            _git(where, "init", "--bare", "--quiet")
        try:
            _git(where, "cat-file", "-e", f"{commit}^{{commit}}")
        except NoSource:
            _git(where, "fetch", "-q", "--depth=1", f"https://github.com/{repository}", commit)
        archive = _git(where, "archive", "--format=tar", f"{commit}:{folder}")
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-xf", "-", "-C", target], input=archive, check=True)
        return target


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "--git-dir", folder, *arguments],
            capture_output=True,
            timeout=600,
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSource(str(error)) from None
    if done.returncode:
        raise NoSource(done.stderr.decode(errors="replace").strip())
    return done.stdout
