"""The read side of the Hub's API for huggingface_hub, transformers and datasets: pure functions.

Addresses and fields are those of huggingface_hub's `hf_api.py` and `file_download.py`. Errors have
its codes: `from_pretrained` treats a file that is not in the bundle as a missing optional file.
"""

from __future__ import annotations

import re
import urllib.parse

from stage.hub.parquet_layout import CONVERSION_BRANCH
from stage.serve import listings
from stage.serve.answers import Answer, FileBody, Request, error_answer, json_answer
from stage.serve.catalogue import Catalogue, ServedFile, ServedRepository, Version
from stage.serve.names import ENTRY_KEYS, entry, find, is_answered_elsewhere, why_missing

_API = re.compile(
    r"/api/(models|datasets|spaces)/((?:[^/]+/)?[^/]+?)"
    r"(?:/(revision|tree|paths-info|refs|commits|auth-check)(?:/(.+))?)?/?"
)
_FILE = re.compile(r"/(?:(datasets|models|spaces)/)?((?:[^/]+/)?[^/]+)/(resolve|raw)/(.+)")
_OTHER_PARTS = {"models", "datasets", "spaces", "whoami-v2"}
_RELEASE = re.compile(r"v\d+\.\d+\.\d+\S*")


def answer(request: Request, catalogue: Catalogue) -> Answer | None:
    """The Hub's answer; None where this is not an address of the Hub's API."""
    if match := _FILE.fullmatch(request.path):
        return _file(catalogue, match[1] or "models", match[2], match[3], match[4])
    if not request.path.startswith("/api/"):
        return None
    path = request.path.rstrip("/")
    if path == "/api/whoami-v2":
        return error_answer(401, "This Hub serves a bundle and has no users.")
    if path in ("/api/models", "/api/datasets", "/api/spaces"):
        kind = path.split("/")[2]
        known = catalogue.repositories.items()
        return listings.listed([r for (k, id), r in known if k == kind and id == r.id], request)
    match = _API.fullmatch(request.path)
    if not match or match[2] in _OTHER_PARTS:
        return error_answer(404, "This Hub serves a bundle: no such address.")
    found = find(catalogue, match[1], match[2])
    if found is None:
        return _no_repository(catalogue, match[1], match[2])
    if is_answered_elsewhere(found.repository, match[2]):
        target = f"/api/{match[1]}/{found.repository.id}{request.path[match.end(2) :]}"
        return _redirect(target, request.query_text, found.rule)
    return _about(request, found.repository, match[3], match[4])


def _redirect(path: str, query: str, note: str | None) -> Answer:
    """The answer for an old name. Files of an old name need none: they are sent at once."""
    target = urllib.parse.quote(path) + (f"?{query}" if query else "")
    headers = {"Content-Type": "text/plain; charset=utf-8", "Location": target}
    body = f"Temporary Redirect. Redirecting to {target}".encode()
    return Answer(307, body, headers, note=note)


def _about(request: Request, found: ServedRepository, what: str | None, rest: str | None) -> Answer:
    if what == "refs":
        return _refs(found)
    if what == "auth-check":
        return Answer(200, b"OK", {"Content-Type": "text/plain; charset=utf-8"})
    revision, path = _split(found, rest or "main")
    version = found.version(revision)
    if version is None:
        return _no_revision(found, revision)
    if what == "tree":
        return listings.tree(request, version, path)
    if what == "paths-info":
        return listings.paths_info(request, version)
    if what == "commits":
        return listings.commits(version)
    return json_answer(listings.info(found, version, request))


def _refs(found: ServedRepository) -> Answer:
    names = sorted({name for v in found.versions for name in v.revisions} | {"main"})
    groups: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": []}
    for name in names:
        version = found.version(name)
        if version is None or re.fullmatch(r"[0-9a-f]{40}", name):
            continue
        row = {"name": name, "ref": f"refs/heads/{name}", "targetCommit": version.commit}
        if not name.startswith("refs/"):
            groups["branches"].append(row)
        elif name == CONVERSION_BRANCH:
            groups["converts"].append({**row, "name": name.rpartition("/")[2], "ref": name})
    return json_answer(groups)


def _split(found: ServedRepository, rest: str) -> tuple[str, str]:
    """Splits a revision, which may contain slashes, from the path after it."""
    parts = rest.split("/")
    for length in range(len(parts), 0, -1):
        if found.version("/".join(parts[:length])) is not None:
            return "/".join(parts[:length]), "/".join(parts[length:])
    return parts[0], "/".join(parts[1:])


def _file(catalogue: Catalogue, kind: str, name: str, verb: str, rest: str) -> Answer:
    found = find(catalogue, kind, name)
    if found is None:
        return _no_repository(catalogue, kind, name)
    repository = found.repository
    revision, path = _split(repository, rest)
    version = repository.version(revision)
    if version is None:
        return _no_revision(repository, revision)
    file = version.files.get(path)
    if file is None:
        return _no_file(repository, version, path)
    headers = {"X-Repo-Commit": version.commit, "Content-Type": "application/octet-stream"}
    if verb == "raw" and file.pointer is not None:
        return Answer(200, file.pointer, {**headers, "ETag": f'"{file.git_sha1}"'}, note=found.rule)
    return _content(file, headers, found.rule)


def _content(file: ServedFile, headers: dict[str, str], note: str | None) -> Answer:
    headers["ETag"] = f'"{file.etag}"'
    if file.lfs_sha256:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if isinstance(file.content, bytes):
        return Answer(200, file.content, headers, note=note)
    return Answer(200, FileBody(file.content, file.size, file.root), headers, note=note)


def _no_file(found: ServedRepository, version: Version, path: str) -> Answer:
    why = version.left_out.get(path)
    message = f"{path} is not in this bundle" + (f": left out, {why}." if why else ".")
    # Libraries ask for many files that no repository has; only files left out are reported.
    missing = f"{found.id}: {message}" if why else None
    return error_answer(404, message, "EntryNotFound", missing=missing)


def _no_repository(catalogue: Catalogue, kind: str, name: str) -> Answer:
    missing = why_missing(catalogue, kind, name)
    message = f"The {ENTRY_KEYS[kind]} {name} is not in this bundle."
    return error_answer(404, message, "RepoNotFound", missing=missing)


def _no_revision(found: ServedRepository, revision: str) -> Answer:
    here = ", ".join(map(_described, found.versions))
    message = f"{found.id}: revision {revision} is not in this bundle; it has {here}."
    # `evaluate` first asks for the tag of its own version, and then for main.
    by_default = found.kind == "spaces" and _RELEASE.fullmatch(revision)
    advice = entry(found.kind, found.id, {"revision": revision})
    missing = None if by_default else f"{message[:-1]}; {advice}"
    return error_answer(404, message, "RevisionNotFound", missing=missing)


def _described(version: Version) -> str:
    """`main (1b0135cbb416)`: the names of a version, and its commit."""
    commit = version.commit[:12]
    names = sorted(n for n in version.revisions if not re.fullmatch(r"[0-9a-f]{40}|refs/.*", n))
    return f"{', '.join(names)} ({commit})" if names else commit
