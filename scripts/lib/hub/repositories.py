"""The repositories an embedded Hub serves: files snapshotted into commits with true git object ids.

Files (a folder, or path -> bytes) -> `Repositories.commit` -> a `Commit` whose blob, tree and
commit ids are those of git. So a client compares real digests: git sha1 of small files, sha256 of
LFS files, and a commit id that depends on content only. History, refs and settings are in memory;
bytes are in `<root>/objects/<sha256>`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("models", "datasets", "spaces")
LFS_THRESHOLD = 10_000_000  # bytes; the Hub refuses larger files outside LFS
# 2024-01-01T00:00:00Z; each further commit of a repository is an hour younger
FIRST_COMMIT = 1_704_067_200
LFS_ATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in ("arrow", "bin", "gz", "h5", "onnx", "parquet", "pt", "safetensors", "tar", "zip")
)

Content = bytes | Path


@dataclass(frozen=True)
class StoredFile:
    """One file of one commit.

    Attributes:
        path: inside the repository, with `/`.
        size: bytes of the file itself, also where git has only an LFS pointer.
        content: path of the bytes.
        git_id: sha1 of the git blob (of the pointer, for an LFS file).
        sha256: of the content, for an LFS file; None for a file in git proper.
    """

    path: str
    size: int
    content: Path
    git_id: str
    sha256: str | None = None
    pointer_size: int = 0

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_id


@dataclass(frozen=True)
class Commit:
    """A snapshot: all files, and the tree id of each folder."""

    sha: str
    tree: str
    timestamp: int
    files: Mapping[str, StoredFile]
    folders: Mapping[str, str]


@dataclass
class Repository:
    """Refs, commits and access of one repository. With `moved_to`, it answers with a redirect."""

    kind: str
    id: str
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    gated: str | bool = False
    private: bool = False
    members: tuple[str, ...] = ()
    moved_to: str | None = None

    def find(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag, a full ref or a full sha."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in self.refs:
                return self.commits[self.refs[name]]
        return self.commits.get(revision)


class Repositories:
    """All repositories of one Hub, and the users who may read them."""

    def __init__(self, root: Path, users: Mapping[str, str] | None = None) -> None:
        """`users` maps tokens to user names."""
        self.objects = Path(root) / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        default = {"hf_tester": "tester", "hf_outsider": "outsider"}
        self.users = dict(default if users is None else users)
        self._repositories: dict[tuple[str, str], Repository] = {}

    def get(self, kind: str, id: str) -> Repository | None:
        return self._repositories.get((kind, id))

    def configure(self, kind: str, id: str, **settings: object) -> None:
        """Sets `gated`, `private`, `members` or `moved_to` of a repository, which may be new."""
        repository = self._repositories.setdefault((kind, id), Repository(kind, id))
        for name, value in settings.items():
            if name not in ("gated", "private", "members", "moved_to"):
                raise TypeError(f"a repository has no setting {name!r}")
            setattr(repository, name, value)

    def commit(
        self,
        kind: str,
        id: str,
        files: Mapping[str, Content] | Path,
        *,
        ref: str = "refs/heads/main",
        tag: str | None = None,
        message: str = "Upload files",
        author: str = "Airlift <airlift@example.com>",
        timestamp: int | None = None,
    ) -> str:
        """Makes a commit whose whole content is `files`, and points `ref` (and `tag`) at it.

        A new ref starts from main's history, as on the Hub. Returns the commit's sha.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind}: not one of {', '.join(KINDS)}")
        repository = self._repositories.setdefault((kind, id), Repository(kind, id))
        wanted = _folder_files(files) if isinstance(files, Path) else dict(files)
        attributes = wanted.setdefault(".gitattributes", LFS_ATTRIBUTES.encode())
        text = attributes if isinstance(attributes, bytes) else attributes.read_bytes()
        patterns = _lfs_patterns(text)
        stored = {path: self._store(path, wanted[path], patterns) for path in sorted(wanted)}
        tree, folders = _tree_ids(stored)
        parent = repository.refs.get(ref) or repository.refs.get("refs/heads/main")
        when = FIRST_COMMIT + 3600 * len(repository.commits) if timestamp is None else timestamp
        sha = _commit_id(tree, parent, author, when, message)
        repository.commits[sha] = Commit(sha, tree, when, stored, folders)
        repository.refs[ref] = sha
        if tag:
            repository.refs[f"refs/tags/{tag}"] = sha
        return sha

    def _store(self, path: str, content: Content, lfs_patterns: list[str]) -> StoredFile:
        """Copies the bytes into the store, and hashes them."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        sha256, git_sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        handle, temporary = tempfile.mkstemp(dir=self.objects)
        with os.fdopen(handle, "wb") as out:
            if isinstance(content, bytes):
                chunks = iter([content])
            else:
                source = content.open("rb")
                chunks = iter(lambda: source.read(1 << 20), b"")
            for chunk in chunks:
                sha256.update(chunk)
                git_sha1.update(chunk)
                out.write(chunk)
            if not isinstance(content, bytes):
                source.close()
        digest = sha256.hexdigest()
        where = self.objects / digest
        Path(temporary).replace(where)
        if size <= LFS_THRESHOLD and not _in_lfs(path, lfs_patterns):
            return StoredFile(path, size, where, git_sha1.hexdigest())
        version = "version https://git-lfs.github.com/spec/v1"
        pointer = f"{version}\noid sha256:{digest}\nsize {size}\n".encode()
        return StoredFile(path, size, where, _git_id(b"blob", pointer), digest, len(pointer))


def _folder_files(folder: Path) -> dict[str, Content]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _lfs_patterns(attributes: bytes) -> list[str]:
    lines = (line.split() for line in attributes.decode().splitlines())
    return [
        words[0]
        for words in lines
        if len(words) > 1 and not words[0].startswith("#") and "filter=lfs" in words
    ]


def _in_lfs(path: str, patterns: list[str]) -> bool:
    """By gitattributes' rule: a pattern without a slash matches the last part of the path."""
    name = path.rpartition("/")[2]
    return any(
        fnmatch.fnmatchcase(path if "/" in pattern else name, pattern.lstrip("/"))
        for pattern in patterns
    )


def _git_id(kind: bytes, data: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind, len(data)) + data).hexdigest()


def _tree_ids(files: Mapping[str, StoredFile]) -> tuple[str, dict[str, str]]:
    """The root tree's id, and the id of each folder below it."""
    nested: dict[str, dict[str, str]] = {"": {}}  # folder -> name -> "mode id"
    for path, file in files.items():
        folder, _, name = path.rpartition("/")
        nested.setdefault(folder, {})[name] = f"100644 {file.git_id}"
        while folder:
            folder = folder.rpartition("/")[0]
            nested.setdefault(folder, {})
    ids: dict[str, str] = {}
    for folder in sorted(nested, key=lambda name: name.count("/") + bool(name), reverse=True):
        entries = nested[folder]
        # git sorts a folder as if its name ended in a slash
        ordered = sorted(
            entries,
            key=lambda name: (name + "/" if entries[name].startswith("40000") else name).encode(),
        )
        rows = ((entries[name].split(), name) for name in ordered)
        data = b"".join(
            f"{mode} {name}\0".encode() + bytes.fromhex(oid) for (mode, oid), name in rows
        )
        ids[folder] = _git_id(b"tree", data)
        if folder:
            parent, _, name = folder.rpartition("/")
            nested[parent][name] = f"40000 {ids[folder]}"
    return ids.pop(""), ids


def _commit_id(tree: str, parent: str | None, author: str, timestamp: int, message: str) -> str:
    if not re.fullmatch(r"[^<>\n]+ <[^<>\n]+>", author):
        raise ValueError(f"not an author: {author}")
    lines = [f"tree {tree}", *([f"parent {parent}"] if parent else [])]
    lines += [f"{role} {author} {timestamp} +0000" for role in ("author", "committer")]
    return _git_id(b"commit", ("\n".join(lines) + f"\n\n{message}").encode())
