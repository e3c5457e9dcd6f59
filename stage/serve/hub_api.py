"""The read side of the Hub's API for huggingface_hub, transformers and datasets: pure functions.

Addresses and fields are those of huggingface_hub's `hf_api.py` (`ModelInfo`, `RepoFile`,
`GitCommitInfo`) and `file_download.py`. Errors have its codes: `from_pretrained` treats a file that
is not in the bundle as a missing optional file. A lock has no dates, so each date is the first
second of 1970.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from stage.errors import as_shown
from stage.files import is_hex
from stage.lock.model import EXCLUDED, NOT_INCLUDED, LeftOut, LockedAsset
from stage.lock.yaml_lines import scalar
from stage.serve.catalogue import (
    ENTRY_KEYS,
    MAIN,
    OWN,
    Catalogue,
    ServedFile,
    ServedRepository,
    Version,
)

KINDS = ("models", "datasets", "spaces")
_OF_A_FILE = ("resolve", "raw")
_OF_A_REPOSITORY = ("revision", "tree", "paths-info", "refs", "commits", "auth-check")


@dataclass(frozen=True)
class Address:
    """An address, taken apart.

    Attributes:
        kind: one of `KINDS`.
        name: `owner/name`, or `name`.
        verb: what is asked: `resolve` and `raw` name a file; empty asks for the repository itself.
        rest: the decoded parts after the verb: a revision, and a path in the repository. The first
            may contain slashes, because huggingface_hub encodes those of a revision.
    """

    kind: str
    name: str
    verb: str = ""
    rest: tuple[str, ...] = ()

    @staticmethod
    def parse(target: str) -> Address | None:
        """Reads the target of a request or of a redirect; None: it names no repository."""
        # Names come from here into our log. A line end in one would forge a line there.
        decoded = map(unquote, urlsplit(target).path.split("/")[1:])
        parts = [as_shown(part).replace("\n", "\\n") for part in decoded]
        while parts and not parts[-1]:
            parts.pop()
        is_api = parts[:1] == ["api"]
        if is_api:
            del parts[0]
        has_kind = parts[:1] and parts[0] in KINDS
        if is_api and not has_kind:
            return None
        kind, parts = (parts[0], parts[1:]) if has_kind else (KINDS[0], parts)
        for length in (1, 2):
            name, rest = "/".join(parts[:length]), tuple(parts[length:])
            if rest[:1] and rest[0] in (_OF_A_REPOSITORY if is_api else _OF_A_FILE):
                return Address(kind, name, rest[0], rest[1:])
        return Address(kind, "/".join(parts)) if is_api and len(parts) in (1, 2) else None

    @property
    def is_file(self) -> bool:
        """Whether it is the address of a file's bytes."""
        return self.verb in _OF_A_FILE

    def of(self, name: str) -> str:
        """The same address of the API for another repository: where an old name redirects to."""
        parts = ("api", self.kind, name, self.verb, *(quote(part, safe="") for part in self.rest))
        return "/" + "/".join(filter(None, parts))

    def split(self, is_revision: Callable[[str], bool] = lambda name: False) -> tuple[str, str]:
        """The revision and the path after it. Without both, it is `main` and an empty path.

        Args:
            is_revision: whether a name is one. The longest that is one counts, because not all
                clients encode its slashes.
        """
        rest = self.rest or (MAIN,)
        unencoded = 3 if rest[0] == "refs" else 1  # refs/convert/parquet, refs/pr/3
        lengths = [n for n in range(len(rest), 0, -1) if is_revision("/".join(rest[:n]))]
        length = next(iter(lengths), unencoded)
        return "/".join(rest[:length]), "/".join(rest[length:])


@dataclass(frozen=True)
class Request:
    """One request: path and query as they came; header names are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def all(self, name: str) -> list[str]:
        """All values of a parameter, which may be called `name[]` too."""
        values = parse_qs(self.query)
        return [*values.get(name, ()), *values.get(f"{name}[]", ())]

    def first(self, name: str) -> str:
        """The value of a parameter; empty if it is not there."""
        return next(iter(self.all(name)), "")

    def flag(self, name: str) -> bool:
        """Whether a parameter is `true` or `1`."""
        return self.first(name).lower() in ("true", "1")


@dataclass(frozen=True)
class FileBody:
    """A file below `root` that is sent whole or in part; `size` is the locked size in bytes."""

    path: Path
    size: int
    root: Path


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        missing: describes what the bundle does not have, for the log of the server; None: nothing.
        note: a choice that was made, for the log of the server.
    """

    status: int
    body: bytes | FileBody
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None
    note: str | None = None


def json_answer(document: object, headers: Mapping[str, str] | None = None) -> Answer:
    """200 with a JSON document."""
    return Answer(
        200, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def error_answer(
    status: int, message: str, code: str = "", *, missing: str | None = None
) -> Answer:
    """An error in the Hub's form.

    Args:
        code: the X-Error-Code that huggingface_hub reads (`utils/_http.py`, hf_raise_for_status).
        missing: as for `Answer`.
    """
    headers = {"Content-Type": "application/json", "X-Error-Message": " ".join(message.split())}
    if code:
        headers["X-Error-Code"] = code
    return Answer(status, json.dumps({"error": message}).encode(), headers, missing)


_LISTS = re.compile(r"/api/(models|datasets|spaces)/?")
_RELEASE = re.compile(r"v\d+\.\d+\.\d+\S*")
_CONVERSIONS = "refs/convert/"
_NO_DATE = "1970-01-01T00:00:00.000Z"
_READ_ONLY = (
    "nothing is uploaded from here, because a bundle is only read. Save into a folder "
    "(save_pretrained, output_dir; no push_to_hub), and upload that from a machine with internet."
)
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}


def answer(request: Request, catalogue: Catalogue) -> Answer:
    """The Hub's answer."""
    address = Address.parse(request.path)
    asks = address is not None and address.verb == "paths-info"  # with the paths in its body
    if request.method not in ("GET", "HEAD") and not asks:
        return replace(error_answer(405, _READ_ONLY), note=f"{request.path}: {_READ_ONLY}")
    if match := _LISTS.fullmatch(request.path):
        return _list(catalogue, match[1], request)
    if request.path.startswith("/api/whoami-v2"):
        return error_answer(401, "This Hub serves a bundle and has no users.")
    if address is None:
        return error_answer(404, "This Hub serves a bundle: no such address.")
    found = catalogue.find(address.kind, address.name)
    if found is None:
        message = f"The {ENTRY_KEYS[address.kind]} {address.name} is not in this bundle."
        missing = why_missing(catalogue, address.kind, address.name)
        return error_answer(404, message, "RepoNotFound", missing=missing)
    repository, rule = found
    is_old_name = address.name != repository.id and not address.name.startswith(f"{OWN}/")
    if is_old_name and not address.is_file:  # files of an old name are sent at once
        return _redirect(address.of(repository.id), request.query, rule)
    if address.verb == "refs":
        return _refs(repository)
    if address.verb == "auth-check":
        return Answer(200, b"OK", _TEXT)
    revision, path = address.split(lambda name: repository.version(name) is not None)
    version = repository.version(revision)
    if version is None:
        return _no_revision(repository, revision)
    if address.is_file:
        return _file(repository, version, address.verb, path, rule)
    if address.verb == "tree":
        return _tree(request, version, path)
    if address.verb == "paths-info":
        return _paths_info(request, version)
    if address.verb == "commits":
        row = {**_last_commit(version), "message": "", "authors": [{"user": "unknown"}]}
        return json_answer([row], {"X-Total-Count": "1"})
    return json_answer(_info(repository, version, request))


def _redirect(path: str, query: str, note: str | None) -> Answer:
    """The answer for an old name."""
    target = path + (f"?{query}" if query else "")
    body = f"Temporary Redirect. Redirecting to {target}".encode()
    return Answer(307, body, {**_TEXT, "Location": target}, note=note)


def _refs(found: ServedRepository) -> Answer:
    names = sorted((n, v.commit) for v in found.versions for n in v.revisions if n != v.commit)
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in names
        if not name.startswith("refs/") and not is_hex(name, 40)
    ]
    converts = [
        {"name": name.removeprefix(_CONVERSIONS), "ref": name, "targetCommit": commit}
        for name, commit in names
        if name.startswith(_CONVERSIONS)
    ]
    return json_answer({"branches": branches, "tags": [], "converts": converts})


def _file(
    found: ServedRepository, version: Version, verb: str, path: str, rule: str | None
) -> Answer:
    file = version.files.get(path)
    if file is None:
        return _no_file(found, version, path)
    headers = {"X-Repo-Commit": version.commit, "Content-Type": "application/octet-stream"}
    if verb == "raw" and file.pointer is not None:
        return Answer(200, file.pointer, {**headers, "ETag": f'"{file.git_sha1}"'}, note=rule)
    headers["ETag"] = f'"{file.etag}"'
    if file.lfs_sha256:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if isinstance(file.content, bytes):
        return Answer(200, file.content, headers, note=rule)
    return Answer(200, FileBody(file.content, file.size, file.root), headers, note=rule)


def _no_file(found: ServedRepository, version: Version, path: str) -> Answer:
    message = f"{path} is not in this bundle"
    # Libraries ask for many files that no repository has; only files left out are reported.
    missing = None
    if left := version.left_out.get(path):
        remedy = how_to_bring(*left)
        message += f": left out, {left[1].reason}" + (f"; {remedy}" if remedy else "")
        missing = f"{found.id}: {message}"
    return error_answer(404, f"{message}.", "EntryNotFound", missing=missing)


def _no_revision(found: ServedRepository, revision: str) -> Answer:
    here = ", ".join(map(_described, found.versions))
    message = f"{found.id}: revision {revision} is not in this bundle; it has {here}"
    # `evaluate` first asks for the tag of its own version, and then for main.
    by_default = found.kind == "spaces" and _RELEASE.fullmatch(revision)
    advice = entry(found.kind, found.id, {"revision": revision})
    missing = None if by_default else f"{message}; {advice}"
    return error_answer(404, f"{message}.", "RevisionNotFound", missing=missing)


def _described(version: Version) -> str:
    """`main (1b0135cbb416)`: the names of a version, and its commit."""
    commit = version.commit[:12]
    names = sorted(n for n in version.revisions if not re.fullmatch(r"[0-9a-f]{40}|refs/.*", n))
    return f"{', '.join(names)} ({commit})" if names else commit


def _info(found: ServedRepository, version: Version, request: Request) -> dict[str, Any]:
    """A repository: all fields, or those of `expand`."""
    card = version.metadata
    whole: dict[str, Any] = {
        "_id": found.id,
        "id": found.id,
        "author": found.id.rpartition("/")[0],
        "sha": version.commit,
        "createdAt": _NO_DATE,
        "lastModified": _NO_DATE,
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
    wanted = request.all("expand")
    return {k: v for k, v in whole.items() if k in ("_id", "id", *wanted)} if wanted else whole


def _texts(value: Any) -> list[str]:
    several = value if isinstance(value, list) else [value]
    return [text for text in several if isinstance(text, str)]


def _licences(card: Mapping[str, Any]) -> list[str]:
    return [f"license:{name}" for name in _texts(card.get("license"))]


def _siblings(version: Version, *, with_blobs: bool) -> list[dict[str, Any]]:
    files = [(name, file) for name, file in sorted(version.listed.items()) if file is not None]
    if not with_blobs:
        return [{"rfilename": name} for name, _ in files]
    return [
        {"rfilename": name, "size": file.size, **_lfs(file), "blobId": file.git_sha1}
        for name, file in files
    ]


def _list(catalogue: Catalogue, kind: str, request: Request) -> Answer:
    """The repositories that fit `search`, `author`, `filter`, ... of a request, by name."""
    rows = []
    for (its_kind, id), found in sorted(catalogue.repositories.items()):
        if its_kind == kind and id == found.id and _fits(found, request):
            row = _info(found, found.versions[0], request)
            if not (request.flag("full") or request.all("expand")):
                row = {k: v for k, v in row.items() if k not in ("siblings", "cardData")}
            rows.append(row)
    limit = request.first("limit")
    return json_answer(rows[: int(limit)] if limit.isdecimal() else rows)


def _fits(found: ServedRepository, request: Request) -> bool:
    card = found.versions[0].metadata
    keys = ("pipeline_tag", "library_name", "tags")
    names = {value for key in keys for value in _texts(card.get(key))} | {*_licences(card)}
    wanted = {w for key in ("filter", "pipeline_tag", "library") for w in request.all(key)}
    return (
        request.first("search").lower() in found.id.lower()
        and request.first("author") in ("", found.id.rpartition("/")[0])
        and {w for several in wanted for w in several.split(",") if w} <= names
    )


def _tree(request: Request, version: Version, path: str) -> Answer:
    """The files and folders in a folder; with `recursive`, in all folders below it too."""
    inside = f"{path.strip('/')}/" if path.strip("/") else ""
    recursive = request.flag("recursive")
    paths = [
        path
        for path in sorted(version.listed)
        if path.startswith(inside) and (recursive or "/" not in path.removeprefix(inside))
    ]
    if not paths:
        return error_answer(404, f"{path}: no such folder in this bundle.", "EntryNotFound")
    return json_answer([_entry(version, path, expand=request.flag("expand")) for path in paths])


def _paths_info(request: Request, version: Version) -> Answer:
    """The files and folders of the paths in a request's body; others are left out."""
    try:
        if "json" in request.headers.get("content-type", ""):
            form = json.loads(request.body)
            asked, expand = form.get("paths", []), form.get("expand") is True
        else:
            form = parse_qs(request.body.decode("utf-8", "replace"))
            asked, expand = form.get("paths", []), form.get("expand", [""])[-1].lower() == "true"
    except (ValueError, RecursionError, AttributeError):  # no JSON, or no mapping
        asked, expand = [], False
    paths = (path.strip("/") for path in _texts(asked))
    return json_answer([_entry(version, p, expand=expand) for p in paths if p in version.listed])


def _last_commit(version: Version) -> dict[str, str]:
    title = "The commit that is in this bundle"
    return {"id": version.commit, "title": title, "date": _NO_DATE}


def _entry(version: Version, path: str, *, expand: bool) -> dict[str, Any]:
    file = version.listed[path]
    # The Hub has the id of a folder's git tree; a bundle may lack files of it.
    entry: dict[str, Any] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    if file is not None:
        entry |= {"type": "file", "oid": file.git_sha1, "size": file.size, **_lfs(file)}
    if expand:
        entry["lastCommit"] = _last_commit(version)
        if file is not None:
            entry["securityFileStatus"] = None
    return entry


def _lfs(file: ServedFile) -> dict[str, Any]:
    if file.pointer is None:
        return {}
    digest = {"oid": file.lfs_sha256, "sha256": file.lfs_sha256}
    return {"lfs": {**digest, "size": file.size, "pointerSize": len(file.pointer)}}


_METRICS = re.compile(r"evaluate-(?:metric|comparison|measurement)/(.+)")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def why_missing(catalogue: Catalogue, kind: str, name: str) -> str:
    """What is not here, and what to add to the manifest, for the log of the server."""
    what = ENTRY_KEYS[kind]
    if (kind, f"{OWN}/{name}") in catalogue.repositories:
        return f"{what} {name}: not in this bundle; it is here as `{OWN}/{name}`"
    if name.startswith(f"{OWN}/"):
        return f"{what} {name}: not in this bundle; no asset has that name"
    others = " and ".join(found.id for found in catalogue.namesakes(kind, name))
    text = f"{what} {_in_manifest(kind, name)}: not in this bundle"
    if others and "/" not in name:
        return f"{text} under this name, but {others}: write one of these names"
    own = f"{OWN}/{name.rpartition('/')[2]}"
    if (kind, own) in catalogue.repositories:
        text += f" (your own {own.rpartition('/')[2]} is here as `{own}`)"
    taken = {id.rpartition("/")[2] for _, id in catalogue.repositories if id.startswith(f"{OWN}/")}
    return f"{text}; {entry(kind, name, taken=taken)}"


def entry(
    kind: str, name: str, more: Mapping[str, str] | None = None, taken: Collection[str] = ()
) -> str:
    """The entry for the manifest, as YAML to paste below `assets:`.

    Args:
        more: further keys of the entry.
        taken: the names of assets that the manifest has already.
    """
    if not _REPOSITORY.fullmatch(name):
        return "that is not the name of a repository"
    repository = _in_manifest(kind, name)
    base = repository.rpartition("/")[2]
    base = repository if base in taken else base
    asset = "-".join([base, *(more or {}).values()])
    lines = [f"  {scalar(re.sub(r'[^A-Za-z0-9._-]+', '-', asset).strip('.'))}:"]
    lines += [f"    {ENTRY_KEYS[kind]}: {scalar(repository)}"]
    lines += [f"    {key}: {scalar(value)}" for key, value in (more or {}).items()]
    if kind == "spaces":
        lines.append("    allow_code: true   # a metric is Python code: read it first")
    head = "on the laptop, write this below `assets:` of the manifest, and fetch again:"
    return "\n".join([head, *lines])


def how_to_bring(asset: LockedAsset, left: LeftOut) -> str:
    """What to change in the manifest for a file that was left out; empty if nothing."""
    if asset.kind == "dataset" and left.path.endswith(".py"):
        return ""  # `load_dataset` asks for the code of each dataset, and goes on without it
    where = f"of `{asset.name}` in the manifest, and fetch again"
    if left.reason == EXCLUDED:
        return f"remove its pattern from `exclude` {where}"
    if left.reason == NOT_INCLUDED:
        return f"add {scalar(glob.escape(left.path))} to `include` {where}"
    if asset.kind == "dataset":
        return f'write `include: ["*"]` in place of `config` and `splits` {where}'
    more = {"include": glob.escape(left.path)}
    return entry("models", asset.source.repository, more, taken=(asset.name,))


def _in_manifest(kind: str, name: str) -> str:
    """The name that a manifest has for it: `accuracy` for `evaluate-metric/accuracy`."""
    match = _METRICS.fullmatch(name) if kind == "spaces" else None
    return match[1] if match else name
