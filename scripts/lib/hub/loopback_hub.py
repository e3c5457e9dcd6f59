"""A Hub on loopback, for scripts/demo and the tests of `stage`.

Serves the parts of the Hugging Face Hub's HTTP API that huggingface_hub and `stage` read, with
history in memory and real files. Two ports: the Hub, and a "CDN" that LFS files are redirected to,
with signed URLs that expire.

    with LoopbackHub(tmp_path) as hub:
        hub.repositories.commit("models", "acme/bert", Path("folder"))
        hub.faults.add(side="cdn", path="safetensors$", times=1, drop_after=1_000_000)
        subprocess.run([...], env={**os.environ, "HF_ENDPOINT": hub.endpoint})
        hub.log.find("safetensors$", side="cdn")

Not here: writing, Xet, search, discussions.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import ssl
import threading
import time
import urllib.parse
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from scripts.lib.hub.faults import Faults, RequestLog
from scripts.lib.hub.repositories import KINDS, Commit, Repositories, Repository, StoredFile
from scripts.lib.hub.responses import Answerer, HubError, Listener

REF_GROUPS = {"branches": "refs/heads/", "tags": "refs/tags/", "converts": "refs/convert/"}


class LoopbackHub:
    """The two listeners; a context manager. `endpoint` is what HF_ENDPOINT should be.

    Args:
        root: folder for the objects; what is in it otherwise is left alone.
        port: of the Hub; 0 for any free one.
        cdn_ttl: seconds that a CDN address is good for.
        page_size: entries of one page of a tree listing.
        users: token -> user name.
        certificate: a PEM file and its key; both ports speak https with it.
    """

    def __init__(
        self,
        root: Path,
        *,
        port: int = 0,
        cdn_ttl: float = 3600.0,
        page_size: int = 1000,
        users: dict[str, str] | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.repositories = Repositories(root, users)
        self.faults, self.log = Faults(), RequestLog()
        self.cdn_ttl, self.page_size = cdn_ttl, page_size
        self._key = secrets.token_bytes(16)
        tls = None
        if certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*certificate)
        self._listeners = [
            Listener(
                ("127.0.0.1", number),
                type(side.title(), (handler,), {"hub": self}),
                side,
                self.faults,
                self.log,
                tls,
            )
            for side, handler, number in (("hub", HubAnswerer, port), ("cdn", CdnAnswerer, 0))
        ]
        self.endpoint, self.cdn_endpoint = (
            f"{'https' if tls else 'http'}://127.0.0.1:{listener.server_address[1]}"
            for listener in self._listeners
        )

    def __enter__(self) -> LoopbackHub:
        for listener in self._listeners:
            threading.Thread(
                target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for listener in self._listeners:
            listener.stopping.set()
            listener.shutdown()
            listener.server_close()

    def cdn_address(self, name: str, file: StoredFile) -> str:
        """A signed URL of an LFS file on the CDN. `name` is `<kind>/<id>/<path>`."""
        expires = f"{time.time() + self.cdn_ttl:.3f}"
        query = {
            "file": name,
            "expires": expires,
            "signature": self.sign(file.content.name, name, expires),
        }
        return f"{self.cdn_endpoint}/blobs/{file.content.name}?{urllib.parse.urlencode(query)}"

    def sign(self, *parts: str) -> str:
        return hmac.new(self._key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


class CdnAnswerer(Answerer):
    """Serves bytes to the holder of a signed URL; has no users and no repositories."""

    hub: LoopbackHub

    def file_name(self) -> str | None:
        return self.query.get("file")

    def route(self) -> None:
        name, expires = self.query.get("file", ""), self.query.get("expires", "0")
        signature = self.hub.sign(self.segments[-1], name, expires)
        if (
            not hmac.compare_digest(signature, self.query.get("signature", ""))
            or float(expires) < time.time()
        ):
            return self.send_bytes(
                b"<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "text/xml"}, 403
            )
        # Like the real CDN's, this ETag is not the file's digest
        etag = f'"{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}"'
        return self.send_file(self.hub.repositories.objects / self.segments[-1], {"ETag": etag})


class HubAnswerer(Answerer):
    """The Hub's port: metadata, redirects to the CDN, and small files."""

    hub: LoopbackHub

    def user(self, token: str) -> str | None:
        return self.hub.repositories.users.get(token)

    def file_name(self) -> str | None:
        where = self._file_address()
        return f"{where[0]}/{where[1]}/{where[3]}" if where else None

    def route(self) -> None:
        if where := self._file_address():
            return self._file(*where)
        if self.segments == ["api", "whoami-v2"]:
            return self._whoami()
        if self.segments[0] == "api" and len(self.segments) > 2 and self.segments[1] in KINDS:
            return self._api(self.segments[1], self.segments[2:])
        raise HubError(404, "Not Found")

    def _file_address(self) -> tuple[str, str, str, str] | None:
        """(kind, id, revision, path) if the request is for a file's bytes."""
        parts = self.segments
        if parts[:2] == ["api", "resolve-cache"] and len(parts) > 6:
            return parts[2], "/".join(parts[3:5]), parts[5], "/".join(parts[6:])
        kind, rest = (parts[0], parts[1:]) if parts[0] in KINDS else ("models", parts)
        if "resolve" not in rest[1:3]:
            return None
        at = rest.index("resolve", 1)
        revision, path = _revision_and_rest(rest[at + 1 :])
        return kind, "/".join(rest[:at]), revision, path

    def _repository(self, kind: str, id: str, *, content: bool) -> Repository:
        """The repository, if the client may see it and, with `content`, read its files."""
        repository = self.hub.repositories.get(kind, id)
        if repository and repository.moved_to:
            target = self.path.replace(id, repository.moved_to, 1)
            raise HubError(307, f"Temporary Redirect. Redirecting to {target}", Location=target)
        user, token = self.exchange.user, self.exchange.token
        if token and user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        member = repository is not None and user in repository.members
        if repository is None or (repository.private and not member):
            # https://huggingface.co gives no code with this 401; huggingface_hub's rule for that
            # needs an https URL. On plain http it raises the same exception because of the code.
            raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        if content and repository.gated and not member:
            reason = (
                "you are not in the authorized list"
                if user
                else "you must be authenticated to access it"
            )
            raise HubError(
                403 if user else 401,
                f"Access to {kind[:-1]} {id} is restricted: {reason}.",
                "GatedRepo",
            )
        return repository

    def _commit(self, repository: Repository, revision: str) -> Commit:
        commit = repository.find(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def _api(self, kind: str, rest: list[str]) -> None:
        verbs = {"revision", "tree", "refs", "paths-info"}
        at = next(
            (index for index in (1, 2) if rest[index : index + 1] and rest[index] in verbs),
            len(rest),
        )
        repository = self._repository(kind, "/".join(rest[:at]), content=False)
        verb, tail = (rest[at], rest[at + 1 :]) if at < len(rest) else ("revision", ["main"])
        if verb == "refs":
            return self._refs(repository)
        revision, path = _revision_and_rest(tail)
        commit = self._commit(repository, revision)
        if verb == "revision":
            return self.send_json(self._info(repository, commit))
        if verb == "paths-info":
            return self._paths_info(commit)
        return self._tree(commit, path)

    def _whoami(self) -> None:
        if self.exchange.user is None:
            raise HubError(401, "Invalid username or password.")
        self.send_json({"type": "user", "name": self.exchange.user, "orgs": []})

    def _refs(self, repository: Repository) -> None:
        groups: dict[str, list[dict[str, str]]] = {group: [] for group in REF_GROUPS}
        for ref, sha in repository.refs.items():
            for group, prefix in REF_GROUPS.items():
                if ref.startswith(prefix):
                    groups[group].append(
                        {"name": ref[len(prefix) :], "ref": ref, "targetCommit": sha}
                    )
        self.send_json(groups)

    def _info(self, repository: Repository, commit: Commit) -> dict[str, Any]:
        when = datetime.fromtimestamp(commit.timestamp, timezone.utc).strftime(
            "%Y-%m-%dT%H:%M:%S.000Z"
        )
        info: dict[str, Any] = {
            "_id": hashlib.md5(repository.id.encode(), usedforsecurity=False).hexdigest()[:24],
            "id": repository.id,
            "sha": commit.sha,
            "createdAt": when,
            "lastModified": when,
            "private": repository.private,
            "gated": repository.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [self._sibling(file) for file in commit.files.values()],
        }
        if card := _card(commit):
            info["cardData"] = card
            info["tags"] = (
                [f"license:{card['license']}"] if isinstance(card.get("license"), str) else []
            )
        return info

    def _sibling(self, file: StoredFile) -> dict[str, Any]:
        """A file in a repository's information; with `blobs=true`, with its size and digests."""
        sibling: dict[str, Any] = {"rfilename": file.path}
        if self.query.get("blobs", "").lower() in ("1", "true"):
            sibling |= {"size": file.size, "blobId": file.git_id}
            if file.sha256:
                sibling["lfs"] = {
                    "sha256": file.sha256,
                    "size": file.size,
                    "pointerSize": file.pointer_size,
                }
        return sibling

    def _paths_info(self, commit: Commit) -> None:
        if "json" in self.headers.get("Content-Type", ""):
            asked = json.loads(self.request_body)
        else:  # huggingface_hub before 1.0
            form = urllib.parse.parse_qs(self.request_body.decode())
            asked = {"paths": form.get("paths", []), "expand": form.get("expand") == ["True"]}
        rows = {row["path"]: row for row in _rows(commit)}
        found = [rows[path] for path in asked["paths"] if path in rows]
        if asked.get("expand"):
            last = {"id": commit.sha, "title": "", "date": "2024-01-01T00:00:00.000Z"}
            found = [{**row, "lastCommit": last, "securityFileStatus": None} for row in found]
        self.send_json(found)

    def _tree(self, commit: Commit, folder: str) -> None:
        if folder and folder not in commit.folders:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        rows = _rows(commit)
        prefix = f"{folder}/" if folder else ""
        recursive = self.query.get("recursive", "").lower() in ("1", "true")
        rows = sorted(
            (
                r
                for r in rows
                if r["path"].startswith(prefix)
                and (recursive or "/" not in r["path"][len(prefix) :])
            ),
            key=lambda row: row["path"],
        )
        start, size = int(self.query.get("cursor", "0")), self.hub.page_size
        headers = {}
        if start + size < len(rows):
            query = urllib.parse.urlencode({**self.query, "cursor": start + size})
            headers["Link"] = f'<{self.hub.endpoint}{self.raw_path}?{query}>; rel="next"'
        self.send_json(rows[start : start + size], headers)

    def _file(self, kind: str, id: str, revision: str, path: str) -> None:
        repository = self._repository(kind, id, content=True)
        commit = self._commit(repository, revision)
        file = commit.files.get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        headers = {
            "X-Repo-Commit": commit.sha,
            "X-Linked-Size": str(file.size),
            "X-Linked-ETag": f'"{file.etag}"',
        }
        if file.sha256:
            headers["Location"] = self.hub.cdn_address(f"{kind}/{id}/{path}", file)
            return self.send_bytes(b"", headers, 302)
        if self.segments[:2] != ["api", "resolve-cache"]:  # relative, as on the real Hub
            headers["Location"] = (
                f"/api/resolve-cache/{kind}/{id}/{commit.sha}/{urllib.parse.quote(path)}"
            )
            return self.send_bytes(b"", headers, 307)
        return self.send_file(file.content, {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit.sha})


def _revision_and_rest(segments: Sequence[str]) -> tuple[str, str]:
    """Splits `<revision>/<path>`, with %2F in a revision, except for refs/convert and refs/pr."""
    length = 3 if segments[0] == "refs" and len(segments) >= 3 else 1
    return "/".join(segments[:length]), "/".join(segments[length:])


def _rows(commit: Commit) -> list[dict[str, Any]]:
    """All folders and files of a commit."""
    folders: list[dict[str, Any]] = [
        {"type": "directory", "oid": oid, "size": 0, "path": path}
        for path, oid in commit.folders.items()
    ]
    return folders + [_row(file) for file in commit.files.values()]


def _row(file: StoredFile) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "oid": file.git_id, "size": file.size, "path": file.path}
    if file.sha256:
        row["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return row


def _card(commit: Commit) -> dict[str, Any]:
    """The front matter of the README: licence, a dataset's configs and splits, ..."""
    readme = commit.files.get("README.md")
    text = readme.content.read_text(encoding="utf-8", errors="replace") if readme else ""
    front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    card = yaml.safe_load(front[1]) if front else None
    return card if isinstance(card, dict) else {}
