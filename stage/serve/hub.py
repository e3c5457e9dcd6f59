"""The read side of the Hub's API for huggingface_hub, transformers and datasets: pure functions.

Addresses and fields are those of huggingface_hub's `hf_api.py` and `file_download.py`. Errors have
its codes: `from_pretrained` treats a file that is not in the bundle as a missing optional file.
"""

from __future__ import annotations

import re

from stage.digests import is_hex
from stage.serve import listings
from stage.serve.address import Address
from stage.serve.answers import Answer, FileBody, Request, error_answer, json_answer
from stage.serve.catalogue import OWN, Catalogue, ServedFile, ServedRepository, Version
from stage.serve.names import (
    ENTRY_KEYS,
    entry,
    find,
    how_to_bring,
    why_missing,
)

_LISTS = re.compile(r"/api/(models|datasets|spaces)/?")
_RELEASE = re.compile(r"v\d+\.\d+\.\d+\S*")
_CONVERSIONS = "refs/convert/"


def answer(request: Request, catalogue: Catalogue) -> Answer:
    """The Hub's answer."""
    if match := _LISTS.fullmatch(request.path):
        known = catalogue.repositories.items()
        of_kind = [r for (kind, id), r in known if kind == match[1] and id == r.id]
        return listings.listed(of_kind, request)
    if request.path.startswith("/api/whoami-v2"):
        return error_answer(401, "This Hub serves a bundle and has no users.")
    address = Address.parse(request.path)
    if address is None:
        return error_answer(404, "This Hub serves a bundle: no such address.")
    found = find(catalogue, address.kind, address.name)
    if found is None:
        return _no_repository(catalogue, address.kind, address.name)
    repository, rule = found
    if address.is_file:
        return _file(repository, address, rule)
    if address.name != repository.id and not address.name.startswith(f"{OWN}/"):
        return _redirect(address.of(repository.id), request.query_text, rule)
    return _about(request, repository, address)


def _redirect(path: str, query: str, note: str | None) -> Answer:
    """The answer for an old name. Files of an old name need none: they are sent at once."""
    target = path + (f"?{query}" if query else "")
    headers = {"Content-Type": "text/plain; charset=utf-8", "Location": target}
    body = f"Temporary Redirect. Redirecting to {target}".encode()
    return Answer(307, body, headers, note=note)


def _about(request: Request, found: ServedRepository, address: Address) -> Answer:
    if address.verb == "refs":
        return _refs(found)
    if address.verb == "auth-check":
        return Answer(200, b"OK", {"Content-Type": "text/plain; charset=utf-8"})
    revision, path = address.split(found.has)
    version = found.version(revision)
    if version is None:
        return _no_revision(found, revision)
    if address.verb == "tree":
        return listings.tree(request, version, path)
    if address.verb == "paths-info":
        return listings.paths_info(request, version)
    if address.verb == "commits":
        return listings.commits(version)
    return json_answer(listings.info(found, version, request))


def _refs(found: ServedRepository) -> Answer:
    groups: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": []}
    names = [(name, v.commit) for v in found.versions for name in v.revisions if name != v.commit]
    for name, commit in sorted(names):
        if name.startswith(_CONVERSIONS):
            row = {"name": name.removeprefix(_CONVERSIONS), "ref": name, "targetCommit": commit}
            groups["converts"].append(row)
        elif not name.startswith("refs/") and not is_hex(name, 40):
            row = {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            groups["branches"].append(row)
    return json_answer(groups)


def _file(found: ServedRepository, address: Address, rule: str | None) -> Answer:
    revision, path = address.split(found.has)
    version = found.version(revision)
    if version is None:
        return _no_revision(found, revision)
    file = version.files.get(path)
    if file is None:
        return _no_file(found, version, path)
    headers = {"X-Repo-Commit": version.commit, "Content-Type": "application/octet-stream"}
    if address.verb == "raw" and file.pointer is not None:
        return Answer(200, file.pointer, {**headers, "ETag": f'"{file.git_sha1}"'}, note=rule)
    return _content(file, headers, rule)


def _content(file: ServedFile, headers: dict[str, str], note: str | None) -> Answer:
    headers["ETag"] = f'"{file.etag}"'
    if file.lfs_sha256:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if isinstance(file.content, bytes):
        return Answer(200, file.content, headers, note=note)
    return Answer(200, FileBody(file.content, file.size, file.root), headers, note=note)


def _no_file(found: ServedRepository, version: Version, path: str) -> Answer:
    left = version.left_out.get(path)
    message = f"{path} is not in this bundle"
    # Libraries ask for many files that no repository has; only files left out are reported.
    missing = None
    if left is not None:
        remedy = how_to_bring(*left)
        message += f": left out, {left[1].reason}" + (f"; {remedy}" if remedy else "")
        missing = f"{found.id}: {message}"
    return error_answer(404, f"{message}.", "EntryNotFound", missing=missing)


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
