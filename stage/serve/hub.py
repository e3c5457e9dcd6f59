"""The read side of the Hub's API for huggingface_hub, transformers and datasets: pure functions.

Addresses and fields are those of huggingface_hub's `hf_api.py` and `file_download.py`. Errors have
its codes: `from_pretrained` treats a file that is not in the bundle as a missing optional file.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from typing import Any

from stage.serve.answers import Answer, FileBody, Request, error_answer, json_answer
from stage.serve.catalogue import OWN, Catalogue, ServedFile, ServedRepository, Version

_API = re.compile(
    r"/api/(models|datasets)/((?:[^/]+/)?[^/]+?)(?:/(revision|tree|paths-info|refs)(?:/(.+))?)?/?"
)
_RESOLVE = re.compile(r"/(?:(datasets|models)/)?((?:[^/]+/)?[^/]+)/resolve/(.+)")
_OTHER_PARTS = {"models", "datasets", "spaces", "whoami-v2"}


def answer(request: Request, catalogue: Catalogue) -> Answer | None:
    """The Hub's answer; None where this is not an address of the Hub's API."""
    if match := _RESOLVE.fullmatch(request.path):
        return _resolve(catalogue, match[1] or "models", match[2], match[3])
    if not request.path.startswith("/api/"):
        return None
    if request.path.rstrip("/") == "/api/whoami-v2":
        return error_answer(401, "This Hub serves a bundle and has no users.")
    if request.path.rstrip("/") in ("/api/models", "/api/datasets"):
        kind = request.path.split("/")[2]
        own = [r for (k, name), r in catalogue.repositories.items() if k == kind and name == r.id]
        return json_answer([_info(found, found.versions[0]) for found in own])
    match = _API.fullmatch(request.path)
    if not match or match[2] in _OTHER_PARTS:
        return error_answer(404, "This Hub serves a bundle: no such address.")
    found = catalogue.repositories.get((match[1], match[2]))
    if found is None:
        return _no_repository(catalogue, match[1], match[2])
    return _about(request, found, match[3], match[4])


def _about(request: Request, found: ServedRepository, what: str | None, rest: str | None) -> Answer:
    if what == "refs":
        names = sorted({name for v in found.versions for name in v.revisions} | {"main"})
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": version.commit}
            for name in names
            if not re.fullmatch(r"[0-9a-f]{40}|refs/.*", name) and (version := found.version(name))
        ]
        return json_answer({"branches": branches, "tags": [], "converts": []})
    revision, path = _split(found, rest or "main")
    version = found.version(revision)
    if version is None:
        return _no_revision(found, revision)
    if what == "tree":
        return _tree(request, version, path)
    if what == "paths-info":
        wanted = _paths(request)
        return json_answer(
            [_entry(name, version.files[name]) for name in wanted if name in version.files]
        )
    return json_answer(_info(found, version, with_blobs=request.query.get("blobs") == "true"))


def _split(found: ServedRepository, rest: str) -> tuple[str, str]:
    """Splits a revision, which may contain slashes, from the path after it."""
    parts = rest.split("/")
    for length in range(len(parts), 0, -1):
        if found.version("/".join(parts[:length])) is not None:
            return "/".join(parts[:length]), "/".join(parts[length:])
    return parts[0], "/".join(parts[1:])


def _info(found: ServedRepository, version: Version, *, with_blobs: bool = False) -> dict[str, Any]:
    siblings = []
    for name, file in sorted(version.files.items()):
        sibling: dict[str, Any] = {"rfilename": name}
        if with_blobs:
            sibling |= {k: v for k, v in _entry(name, file).items() if k in ("size", "lfs")}
            sibling["blobId"] = file.git_sha1
        siblings.append(sibling)
    return {
        "id": found.id,
        "modelId": found.id,
        "sha": version.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }


def _tree(request: Request, version: Version, path: str) -> Answer:
    inside = f"{path.strip('/')}/" if path.strip("/") else ""
    names = [name for name in sorted(version.files) if name.startswith(inside)]
    if not names:
        return error_answer(404, f"{path}: no such folder in this bundle.", "EntryNotFound")
    recursive = request.query.get("recursive", "").lower() in ("true", "1")
    entries: list[dict[str, Any]] = []
    folders: set[str] = set()
    for name in names:
        parents = name.removeprefix(inside).split("/")[:-1]
        for depth in range(1, len(parents) + 1 if recursive else min(2, len(parents) + 1)):
            folder = inside + "/".join(parents[:depth])
            if folder not in folders:
                folders.add(folder)
                entries.append({"type": "directory", "path": folder, "oid": "0" * 40, "size": 0})
        if recursive or not parents:
            entries.append(_entry(name, version.files[name]))
    return json_answer(entries)


def _entry(name: str, file: ServedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": file.git_sha1, "size": file.size}
    if file.lfs_sha256:
        entry["lfs"] = {
            "oid": file.lfs_sha256,
            "sha256": file.lfs_sha256,
            "size": file.size,
            "pointerSize": 134,
        }
    return entry


def _paths(request: Request) -> list[str]:
    if "json" in request.headers.get("content-type", ""):
        try:
            document = json.loads(request.body)
        except ValueError:
            return []
        asked = document.get("paths", []) if isinstance(document, dict) else []
    else:
        asked = urllib.parse.parse_qs(request.body.decode("utf-8", "replace")).get("paths", [])
    return [
        path for path in ([asked] if isinstance(asked, str) else asked) if isinstance(path, str)
    ]


def _resolve(catalogue: Catalogue, kind: str, name: str, rest: str) -> Answer:
    found = catalogue.repositories.get((kind, name))
    if found is None:
        return _no_repository(catalogue, kind, name)
    revision, path = _split(found, rest)
    version = found.version(revision)
    if version is None:
        return _no_revision(found, revision)
    file = version.files.get(path)
    if file is None:
        why = version.left_out.get(path)
        message = f"{path} is not in this bundle" + (f": left out, {why}." if why else ".")
        # Libraries ask for many files that no repository has; only files left out are reported.
        return error_answer(
            404, message, "EntryNotFound", missing=f"{found.id}: {message}" if why else None
        )
    headers = {
        "ETag": f'"{file.etag}"',
        "X-Repo-Commit": version.commit,
        "Content-Type": "application/octet-stream",
    }
    if file.lfs_sha256:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    body = file.content if isinstance(file.content, bytes) else FileBody(file.content, file.size)
    return Answer(200, body, headers)


def _no_repository(catalogue: Catalogue, kind: str, name: str) -> Answer:
    singular = kind.removesuffix("s")
    if (kind, f"{OWN}/{name}") in catalogue.repositories:
        advice = f"it is here as `{OWN}/{name}`"
    elif name.startswith(f"{OWN}/"):
        advice = "no asset has that name"
    else:
        advice = f"add it to the manifest: `{singular}: {name}`"
    missing = f"{singular} {name}: not in this bundle; {advice}"
    return error_answer(
        404, f"The {singular} {name} is not in this bundle.", "RepoNotFound", missing=missing
    )


def _no_revision(found: ServedRepository, revision: str) -> Answer:
    here = ", ".join(version.commit[:12] for version in found.versions)
    message = f"{found.id}: revision {revision} is not in this bundle; it has {here}."
    return error_answer(404, message, "RevisionNotFound", missing=message)
