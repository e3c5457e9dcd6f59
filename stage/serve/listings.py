"""What the Hub's API says about one version of a repository: information, files, commits. Pure.

A lock has no dates, so each date is the first second of 1970. Fields are those that
huggingface_hub reads (`hf_api.py`: `ModelInfo`, `RepoFile`, `GitCommitInfo`).
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from stage.serve.answers import Answer, Request, error_answer, json_answer
from stage.serve.catalogue import ServedFile, ServedRepository, Version

NO_DATE = "1970-01-01T00:00:00.000Z"
_TITLE = "The commit that is in this bundle"
_NOT_IN_LISTS = ("siblings", "cardData")


def info(found: ServedRepository, version: Version, request: Request) -> dict[str, Any]:
    """A repository: all fields, or those of `expand`."""
    card = version.metadata
    whole: dict[str, Any] = {
        "_id": found.id,
        "id": found.id,
        "author": found.id.rpartition("/")[0],
        "sha": version.commit,
        "createdAt": NO_DATE,
        "lastModified": NO_DATE,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [*_texts(card.get("tags")), *_licences(card)],
        "downloads": 0,
        "likes": 0,
        "siblings": _siblings(version, with_blobs=request.flag("blobs")),
        "usedStorage": sum(file.size for file in version.files.values() if file.lfs_sha256),
    }
    if card:
        whole["cardData"] = card
    if found.kind == "models":
        whole["modelId"] = found.id
        whole |= {key: card[key] for key in ("pipeline_tag", "library_name") if key in card}
    wanted = request.several("expand")
    return {k: v for k, v in whole.items() if k in ("_id", "id", *wanted)} if wanted else whole


def _texts(value: Any) -> list[str]:
    several = value if isinstance(value, list) else [value]
    return [text for text in several if isinstance(text, str)]


def _licences(card: Mapping[str, Any]) -> list[str]:
    return [f"license:{name}" for name in _texts(card.get("license"))]


def _siblings(version: Version, *, with_blobs: bool) -> list[dict[str, Any]]:
    siblings = []
    for name, file in sorted(version.listed.items()):
        sibling: dict[str, Any] = {"rfilename": name}
        if with_blobs:
            sibling |= {k: v for k, v in _file(name, file).items() if k in ("size", "lfs")}
            sibling["blobId"] = file.git_sha1
        siblings.append(sibling)
    return siblings


def listed(repositories: Iterable[ServedRepository], request: Request) -> Answer:
    """The repositories that fit `search`, `author`, `filter`, ... of a request, by name."""
    rows = []
    for found in sorted(repositories, key=lambda repository: repository.id):
        row = info(found, found.versions[0], request)
        if _fits(found, request):
            without = () if request.flag("full") or request.several("expand") else _NOT_IN_LISTS
            rows.append({key: value for key, value in row.items() if key not in without})
    limit = request.first("limit")
    return json_answer(rows[: int(limit)] if limit.isdecimal() else rows)


def _fits(found: ServedRepository, request: Request) -> bool:
    card = found.versions[0].metadata
    keys = ("pipeline_tag", "library_name", "tags")
    names = {value for key in keys for value in _texts(card.get(key))} | {*_licences(card)}
    wanted = {w for key in ("filter", "pipeline_tag", "library") for w in request.several(key)}
    owner = request.first("author")
    return (
        request.first("search").lower() in found.id.lower()
        and owner in ("", found.id.rpartition("/")[0])
        and {w for several in wanted for w in several.split(",") if w} <= names
    )


def tree(request: Request, version: Version, path: str) -> Answer:
    """The files and folders in a folder; with `recursive`, in all folders below it too."""
    inside = f"{path.strip('/')}/" if path.strip("/") else ""
    names = [name for name in sorted(version.listed) if name.startswith(inside)]
    if not names:
        return error_answer(404, f"{path}: no such folder in this bundle.", "EntryNotFound")
    recursive, expand = request.flag("recursive"), request.flag("expand")
    entries: list[dict[str, Any]] = []
    folders: set[str] = set()
    for name in names:
        parents = name.removeprefix(inside).split("/")[:-1]
        for depth in range(1, len(parents) + 1 if recursive else min(2, len(parents) + 1)):
            folder = inside + "/".join(parents[:depth])
            if folder not in folders:
                folders.add(folder)
                entries.append(_entry(version, folder, expand=expand))
        if recursive or not parents:
            entries.append(_entry(version, name, expand=expand))
    return json_answer(sorted(entries, key=lambda entry: str(entry["path"])))


def paths_info(request: Request, version: Version) -> Answer:
    """The files and folders of the paths in a request's body; others are left out."""
    paths, expand = _asked(request)
    folders = {
        "/".join(parts[:depth])
        for parts in (name.split("/") for name in version.listed)
        for depth in range(1, len(parts))
    }
    known = (path.strip("/") for path in paths)
    return json_answer(
        [
            _entry(version, path, expand=expand)
            for path in known
            if path in version.listed or path in folders
        ]
    )


def commits(version: Version) -> Answer:
    """The history that a bundle has: one commit."""
    author = {"user": "unknown"}  # the lock has no author
    row = {**_last_commit(version), "message": "", "authors": [author]}
    return json_answer([row], {"X-Total-Count": "1"})


def _last_commit(version: Version) -> dict[str, str]:
    return {"id": version.commit, "title": _TITLE, "date": NO_DATE}


def _entry(version: Version, path: str, *, expand: bool) -> dict[str, Any]:
    file = version.listed.get(path)
    if file is None:
        # The Hub has the id of the git tree; a bundle may lack files of it.
        entry: dict[str, Any] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    else:
        entry = _file(path, file)
    if expand:
        entry["lastCommit"] = _last_commit(version)
        if file is not None:
            entry["securityFileStatus"] = None
    return entry


def _file(path: str, file: ServedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": file.git_sha1, "size": file.size}
    if file.pointer is not None:
        entry["lfs"] = {
            "oid": file.lfs_sha256,
            "sha256": file.lfs_sha256,
            "size": file.size,
            "pointerSize": len(file.pointer),
        }
    return entry


def _asked(request: Request) -> tuple[list[str], bool]:
    """The paths in a request's body, which is JSON or a form, and its `expand`."""
    if "json" in request.headers.get("content-type", ""):
        try:
            document = json.loads(request.body)
        except (ValueError, RecursionError):
            return [], False
        if not isinstance(document, dict):
            return [], False
        asked, expand = document.get("paths", []), document.get("expand") is True
    else:
        form = urllib.parse.parse_qs(request.body.decode("utf-8", "replace"))
        asked = form.get("paths", [])
        expand = form.get("expand", [""])[-1].lower() in ("true", "1")
    several = [asked] if isinstance(asked, str) else asked if isinstance(asked, list) else []
    return [path for path in several if isinstance(path, str)], expand
