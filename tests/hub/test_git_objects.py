"""Our Hub's object ids are git's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts.lib.hub.repositories import LFS_ATTRIBUTES, LFS_THRESHOLD, Repositories


def _git(folder: Path, *arguments: str) -> str:
    identity = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (
            ("NAME", "Ann"),
            ("EMAIL", "ann@example.com"),
            ("DATE", "1700000000 +0000"),
        )
    }
    environment = {
        **os.environ,
        **identity,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_commit_and_tree_ids_are_those_git_computes(tmp_path: Path) -> None:
    files = {
        ".gitattributes": b"",
        "config.json": b"{}\n",
        "a.txt": b"",
        "a/b/c.txt": b"deep\n",
        "a/b/d.txt": "Grüße\n".encode(),
        "a-b": b"sorts between a.txt and a/\n",
        "é.txt": b"not ascii\n",
    }
    work = tmp_path / "work"
    work.mkdir()
    for path, data in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(data)
    _git(work, "init", "--quiet")
    _git(work, "add", "--all")
    _git(work, "commit", "--quiet", "--cleanup=verbatim", "-m", "First")

    repositories = Repositories(tmp_path / "hub")
    sha = repositories.commit(
        "models",
        "acme/m",
        files,
        message="First\n",
        author="Ann <ann@example.com>",
        timestamp=1_700_000_000,
    )

    repository = repositories.get("models", "acme/m")
    assert repository is not None
    commit = repository.find("main")
    assert commit is not None
    assert commit.folders["a/b"] == _git(work, "rev-parse", "HEAD:a/b")
    assert commit.files["é.txt"].git_id == _git(work, "rev-parse", "HEAD:é.txt")
    assert sha == _git(work, "rev-parse", "HEAD")


def test_an_lfs_file_is_known_by_its_pattern_or_its_size(tmp_path: Path) -> None:
    repositories = Repositories(tmp_path)
    big = b"\0" * (LFS_THRESHOLD + 1)
    repositories.commit(
        "models",
        "acme/m",
        {
            ".gitattributes": LFS_ATTRIBUTES.encode(),
            "a/m.safetensors": b"x",
            "big.txt": big,
            "small.txt": b"x",
        },
    )
    repository = repositories.get("models", "acme/m")
    assert repository is not None
    files = repository.commits[repository.refs["refs/heads/main"]].files
    assert {path for path, file in files.items() if file.sha256} == {"a/m.safetensors", "big.txt"}
