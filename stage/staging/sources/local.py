"""Files of this machine: a `path:` entry becomes an asset of files or a dataset.

Its names and sizes are listed before a byte is hashed. A folder often holds more than its owner
remembers. Files that programs left there (`.git`, caches, other bundles) are omitted, with a note.
Files that look private (keys, passwords, tokens) are refused. Both are taken if `include` names
them (docs/adr/0005).

Private files are recognised by the names that programs give to them, and by the first bytes of
small files. This is no search for secrets inside data. It catches the `path: .` that takes a `.env`
file into a bundle, which many users may copy.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stage.bundle import bundle as layout
from stage.convert.convert import chosen
from stage.download.partial_file import copy_verified
from stage.errors import Mistakes, Place, PolicyError, UsageError, about, quoted
from stage.files import FileDigests, MismatchError, hash_file, is_pointer, join_limited
from stage.hub.model_files import check_matches, why_left
from stage.lock.manifest import Manifest, PathRequest, local_path, way_without
from stage.lock.model import Ingredient, LeftOut, LockedAsset, LockedFile, Source
from stage.paths import check_path, check_paths, printable
from stage.staging.sources.source import AssetSource, Made, Progress, Run

MAX_SIZE = 64 * 2**10  # bytes: a key is smaller, even with a long chain of certificates
_HEAD = 512  # bytes: a key with a comment in front begins within them
_NAMES = {
    **dict.fromkeys(
        ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
        "a private key of ssh",
    ),
    **dict.fromkeys(
        (".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd"), "passwords"
    ),
    **dict.fromkeys(("kaggle.json", "stored_tokens"), "a token"),
}
_SUFFIXES = {
    ".p12": "a key store",
    ".pfx": "a key store",
    ".kdbx": "passwords",
    ".ppk": "a private key of PuTTY",
}
_FOLDERS = {
    ".ssh": "keys and hosts of ssh",
    ".gnupg": "keys of GnuPG",
    ".aws": "credentials of AWS",
    ".kube": "credentials of Kubernetes",
}
_TEMPLATES = (".example", ".sample", ".template", ".dist", ".defaults")
_KEY_SUFFIXES = (".pem", ".key", ".crt", ".cer", ".pub", "")
_KEY = re.compile(
    rb"^(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d)",
    re.MULTILINE,
)
_TOKEN = re.compile(rb"(hf_|gh[oprsu]_|github_pat_|glpat-)[A-Za-z0-9_-]{20,}\s*")


def private_part(path: str) -> str:
    """The folder or file in a path that makes it private: `.ssh` of `a/.ssh/config`."""
    *folders, name = path.split("/")
    return next((folder for folder in folders if folder.lower() in _FOLDERS), name)


def is_known_by_whole_name(path: str) -> bool:
    """Whether the whole name is known (`kaggle.json`, `.env`, the folder `.ssh`), not a suffix."""
    return private_by_name(path) is not None and not path.lower().endswith(tuple(_SUFFIXES))


def private_by_name(path: str) -> str | None:
    """The private content that a name indicates; None if it indicates none.

    Args:
        path: relative to the folder of the entry, POSIX.
    """
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in _FOLDERS:
            return _FOLDERS[folder]
    if name in _NAMES:
        return _NAMES[name]
    if name in (".env", ".envrc") or (name.startswith(".env.") and not name.endswith(_TEMPLATES)):
        return "settings, often with passwords and tokens"
    return next((what for suffix, what in _SUFFIXES.items() if name.endswith(suffix)), None)


def private_by_first_bytes(file: Path, size: int) -> str | None:
    """The private content that the first bytes of a small file show; None if they show none.

    Args:
        size: of the file, in bytes.

    Raises:
        OSError: it cannot be read.
    """
    if not 0 < size <= MAX_SIZE:
        return None
    with open(file, "rb", buffering=0) as opened:
        most = MAX_SIZE if file.suffix.lower() in _KEY_SUFFIXES else _HEAD
        data = opened.read(min(most, size + 1))
    if _KEY.search(data):
        return "a private key"
    return "a token" if size <= _HEAD and _TOKEN.fullmatch(data) else None


_SHOWN = 8
# Of version control, of programs that users run beside the data, of file managers.
_LEFT_BY_PROGRAMS = frozenset(
    (
        *(".git", ".hg", ".svn"),
        *(
            "__pycache__",
            ".ipynb_checkpoints",
            ".pytest_cache",
            ".mypy_cache",
            ".ruff_cache",
            ".tox",
            ".nox",
        ),
        *("node_modules", ".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX"),
        *(".Spotlight-V100", ".Trashes", ".fseventsd", ".TemporaryItems", "@eaDir"),
        *("$RECYCLE.BIN", "System Volume Information", "lost+found"),
    )
)
_OF_MACOS = "._"  # AppleDouble: `._x` has the Finder's attributes of `x`, on disks that have none


@dataclass(frozen=True)
class Listing:
    """The files that an entry takes.

    Attributes:
        base: the file or folder that the entry names.
        sizes: path relative to `base` (its name, if that is a file) -> size in bytes.
        left_out: files that the patterns or the conversion omit.
        left: names what else is omitted: files of programs.
    """

    base: Path
    sizes: dict[str, int]
    left_out: tuple[LeftOut, ...]
    left: str

    def file(self, path: str) -> Path:
        """The path on this machine of a file in `sizes`."""
        return self.base if self._is_one_file else self.base / path

    @cached_property
    def _is_one_file(self) -> bool:
        return self.base.is_file()


def local_base(path: str, manifest: Manifest) -> Path:
    """The file or folder that a `path:` entry names, relative to the manifest's folder.

    Raises:
        RuntimeError: there is no home folder for `~`.
    """
    return manifest.path.parent / Path(path).expanduser()


def list_path(request: PathRequest, manifest: Manifest) -> Listing:
    """Lists the files that a `path:` entry takes.

    Raises:
        UsageError: no such file or folder, no file to take, a pattern that matches nothing, a file
            that cannot be read, or a pointer of Git LFS.
        PolicyError: a symbolic link, a special file, or a file that looks like keys, passwords or
            tokens.
    """
    base = local_path(request.path, manifest.path)
    if not (base.is_file() or base.is_dir()):
        raise UsageError(f"{base} is neither a file nor a folder.", "Name a file or a folder.")
    walk = Walk(base, request.include)
    if base.is_file():
        walk.sizes[base.name] = base.stat().st_size
    else:
        try:
            walk.run()
        except OSError as error:
            raise _unreadable(f"{error.filename}: {error.strerror}", error.filename) from None
    for path in sorted(walk.others):
        if not why_left(path, request.include, request.exclude):
            raise PolicyError(
                f"{printable(str(base / path))} is a link or a special file; "
                "a bundle holds regular files only.",
                f'Put the file itself there, or omit it: exclude: ["{path}"]',
            )
    check_matches(request.include, walk.sizes, f"the files in {base}")
    listing = _selected(base, walk, request, manifest)
    if not listing.sizes:
        raise UsageError(f"{base} has no file to take.", "Check the path, `include` and `exclude`.")
    if closed := [path for path in listing.sizes if not os.access(listing.file(path), os.R_OK)]:
        names = join_limited([printable(path) for path in closed], _SHOWN)
        raise _unreadable(f"cannot be read: {names}", str(base))
    _check_not_private(listing, request)
    _check_no_pointers(listing)
    return listing


def _unreadable(what: str, where: str) -> UsageError:
    return UsageError(f"{what}.", f"Make it readable for you: chmod -R u+rX {quoted(where)}")


def _selected(base: Path, walk: Walk, request: PathRequest, manifest: Manifest) -> Listing:
    reasons = {path: why_left(path, request.include, request.exclude) for path in walk.sizes}
    if request.convert and (asked := [path for path, reason in reasons.items() if reason is None]):
        read = set(chosen(request.convert, asked))
        reasons |= {
            path: f"not read by `convert: {request.convert}`" for path in asked if path not in read
        }
    own_lock = manifest.lock_path.absolute()
    if base.absolute() in (own_lock, *own_lock.parents):
        path = own_lock.relative_to(base.absolute()).as_posix() if base.is_dir() else base.name
        if path in reasons and reasons[path] is None:
            # The lock records this reason: another text would change the bundle id.
            reasons[path] = "the lock of this manifest, which is written again"
    left = [
        LeftOut(path, walk.sizes[path], reason)
        for path, reason in sorted(reasons.items())
        if reason
    ]
    taken = {path: walk.sizes[path] for path in sorted(reasons) if reasons[path] is None}
    return Listing(base, taken, tuple(left), walk.left)


def _is_named(name: str, include: Sequence[str], *, whole: bool) -> bool:
    """Whether a pattern names this file or folder, not everything or every file of a type.

    Args:
        whole: only the whole name identifies the file. Then `*.json` does not name `kaggle.json`;
            otherwise `*.pem` names a key.
    """
    parts = {part for pattern in include for part in pattern.split("/")}
    naming = (part for part in parts if _has_letters(part) and not (whole and _is_suffix(part)))
    return name in parts or any(fnmatch.fnmatchcase(name, part) for part in naming)


def _has_letters(pattern: str) -> bool:
    """Whether the pattern has a letter or digit outside of character classes."""
    return any(character.isalnum() for character in re.sub(r"\[!?\]?[^]]*\]", "", pattern))


def _is_suffix(pattern: str) -> bool:
    """Whether there are only wildcards before the last dot, as in `*.json`."""
    stem = pattern.rpartition(".")[0]
    return stem != "" and not _has_letters(stem)


def _check_not_private(listing: Listing, request: PathRequest) -> None:
    """Raises for keys, passwords and tokens that the user did not name in `include`.

    Raises:
        PolicyError: there are some.
    """
    if listing.base.is_file():
        return  # the entry itself names the file
    private: dict[str, str] = {}
    for path, size in listing.sizes.items():
        what = private_by_name(path) or private_by_first_bytes(listing.file(path), size)
        whole = is_known_by_whole_name(path)
        if what and not _is_named(private_part(path), request.include, whole=whole):
            private[path] = what
    if not private:
        return
    shown = join_limited([f"{printable(path)} ({what})" for path, what in private.items()], _SHOWN)
    names = ", ".join(f'"{path}"' for path in list(private)[:_SHOWN])
    raise PolicyError(
        f"{listing.base} has private files, which should not travel by accident: {shown}.",
        f"Omit them: exclude: [{names}]. If they must be in the bundle, name them: include: "
        f'["*", {names}]   (every user who gets the bundle can read them)',
    )


def _check_no_pointers(listing: Listing) -> None:
    """Raises for Git LFS pointers: a clone without its LFS files has all names, but no contents.

    Raises:
        UsageError: there are pointers.
    """
    pointers = [
        path for path, size in listing.sizes.items() if is_pointer(listing.file(path), size)
    ]
    if not pointers:
        return
    folder = listing.base if listing.base.is_dir() else listing.base.parent
    names = join_limited([printable(path) for path in pointers], _SHOWN)
    are = (
        "is a Git LFS pointer, not the file itself"
        if len(pointers) == 1
        else "are Git LFS pointers, not the files"
    )
    raise UsageError(f"{names} {are}.", f"Get the contents: git -C {quoted(folder)} lfs pull")


class Walk:
    """Lists a folder and its subfolders; counts and skips what programs left there.

    Attributes:
        sizes: relative path -> bytes, of regular files.
        others: links and special files. Links are not followed: they can lead anywhere.
    """

    def __init__(self, base: Path, include: Sequence[str]) -> None:
        self._base, self._include = base, include
        self.sizes: dict[str, int] = {}
        self.others: list[str] = []
        self._left: Counter[str] = Counter()

    def run(self) -> None:
        """Lists the folder.

        Raises:
            OSError: a folder or file cannot be read.
        """
        folders = [""]
        while folders:
            prefix = folders.pop()
            with os.scandir(self._base / prefix) as listing:
                entries = list(listing)
            for entry in entries:
                path = f"{prefix}{entry.name}"
                named = _is_named(entry.name, self._include, whole=entry.name in _LEFT_BY_PROGRAMS)
                if not named and (what := _left_there(entry, path)):
                    self._left[what] += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    self.sizes[path] = entry.stat(follow_symlinks=False).st_size
                else:
                    self.others.append(path)

    @property
    def left(self) -> str:
        """Names what was skipped."""
        counted = sorted(self._left.items())
        return ", ".join(what if count == 1 else f"{count} {what}" for what, count in counted)


def _left_there(entry: os.DirEntry[str], path: str) -> str | None:
    """What a program left there; None for a user's own file or folder."""
    if entry.name in _LEFT_BY_PROGRAMS:
        return entry.name
    if entry.name.startswith(_OF_MACOS):
        return f"{_OF_MACOS}*"
    if path.endswith(".cache/huggingface"):  # `hf download --local-dir` leaves it
        return ".cache/huggingface"
    if entry.is_dir(follow_symlinks=False):
        if _is_bundle(Path(entry.path)):
            return f"another bundle: {printable(path)}"
        if Path(entry.path, "pyvenv.cfg").is_file():
            return f"a virtual environment: {printable(path)}"
    return None


def _is_bundle(folder: Path) -> bool:
    return (folder / layout.FETCH_PARTIAL).is_file() or layout.holds_bundle(folder)


def check_csv_headers(
    name: str, request: PathRequest, listing: Listing, manifest: Manifest, mistakes: Mistakes
) -> None:
    """Checks the separator of CSV files before anything is downloaded, which may take hours."""
    from stage.convert.readers import check_csv

    for path in listing.sizes:
        with mistakes, about(manifest.entry(name, "path")):
            or_omit = f', or omit it: exclude: ["{path}"]' if len(listing.sizes) > 1 else ""
            check_csv(path, listing.file(path), request.separator, or_omit)


class PathSource(AssetSource[PathRequest]):
    """A file or folder beside the manifest."""

    # A pin says what a bundle holds. A file that never entered one (its conversion failed, for
    # example) may be corrected: the next run takes it as it is then.
    is_pinned_when_resolved = False

    def __init__(self, name: str, request: PathRequest, run: Run) -> None:
        super().__init__(name, request, run)
        self._digests: dict[tuple[object, ...], FileDigests] = {}

    @cached_property
    def _base(self) -> Path:
        return local_base(self.request.path, self.run.manifest)

    @cached_property
    def _is_one_file(self) -> bool:
        return self._base.is_file()

    @cached_property
    def _listing(self) -> Listing:
        with about(self.run.manifest.entry(self.name, "path")):
            return list_path(self.request, self.run.manifest)

    def look(self, mistakes: Mistakes, *, required: bool) -> Mapping[str, int]:
        if not required and not self._is_there():
            return {}
        with mistakes:
            listing = self._listing
            if listing.left:
                place = self.run.manifest.place(self.name, "path")
                self.run.reporter.note(
                    f"{place}: `{self.name}`: left out: {listing.left} "
                    "(name them in `include` to take them)"
                )
            if self.request.convert is None:
                return {f"data/files/{self.name}/{p}": size for p, size in listing.sizes.items()}
            if self.request.convert == "csv":
                check_csv_headers(self.name, self.request, listing, self.run.manifest, mistakes)
        return {}  # the size of a converted file is not known yet

    def _is_there(self) -> bool:
        try:
            return self._base.exists()
        except RuntimeError:  # no such home folder
            return False

    def resolve(self) -> LockedAsset:
        """Hashes the files that the entry takes."""
        listing, request = self._listing, self.request
        asset = replace(
            self.new_asset("files", Source("path", request.path)), left_out=listing.left_out
        )
        targets = {path: f"{asset.folder}/{path}" for path in listing.sizes}
        with about(self.run.manifest.entry(self.name, "path")):
            check_paths([*targets.values()], way_without(asset.request))
        digests = {path: self._hashed(listing.file(path)) for path in targets}
        if request.convert:
            made_from = [Ingredient(path, d.size, d.sha256) for path, d in digests.items()]
            return replace(asset, kind="dataset", made_from=tuple(made_from))
        files = [
            LockedFile(targets[path], d.size, d.sha256, None, path) for path, d in digests.items()
        ]
        return replace(asset, files=tuple(files))

    def check_unchanged(self, asset: LockedAsset) -> None:
        self.check_pin("path", self.request.path, asset.source.location)
        if not self._is_there():
            return
        now, then = _digests(self.resolve()), _digests(asset)
        for path in sorted({*now, *then}):
            if now.get(path) == then.get(path):
                continue
            changed = "is gone" if path not in now else "changed" if path in then else "is new"
            manifest = self.run.manifest
            raise UsageError(
                f"{self.what}: {path} {changed} since {manifest.lock_path.name} was written.",
                f"To take the files of `{self.name}` as they are now: "
                f"{manifest.update_command(self.name)}",
            )

    def fetch(
        self,
        asset: LockedAsset,
        file: LockedFile | Ingredient,
        target: Path,
        progress: Progress,
    ) -> FileDigests:
        return bring_local(self._local(file.origin), file, target, progress, self._remedy)

    def fetch_input(
        self, asset: LockedAsset, ingredient: Ingredient, folder: Path, progress: Progress
    ) -> tuple[Path, FileDigests]:
        """Reads the file where it is: it is not copied."""
        path = self._local(ingredient.origin)
        with _as_locked(path, self._remedy):
            digests = ingredient.expected.check(self._hashed(path))
        progress(digests.size)
        return path, digests

    def _hashed(self, path: Path) -> FileDigests:
        """The digests of a local file, which is read once in a run: a table may be large.

        It is read again if it changed meanwhile: each change moves the ctime.
        """
        status = path.stat()
        key = (path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if key not in self._digests:
            self._digests[key] = hash_file(path)
        return self._digests[key]

    def make(self, asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path) -> Made:
        request = self.request
        return self.converted(asset, request.convert or "", request.separator, inputs, out)

    def _local(self, origin: str) -> Path:
        with about(Place(str(self.run.manifest.lock_path), name=self.name)):
            check_path(origin)
        return self._base if self._is_one_file else self._base / origin

    @property
    def _remedy(self) -> str:
        return f"To take it as it is now: {self.run.manifest.update_command(self.name)}"


def _digests(asset: LockedAsset) -> dict[str, str | None]:
    """The sha256 of each local file, by its path beside the manifest."""
    folder = f"{asset.folder}/"
    return {i.origin: i.sha256 for i in asset.made_from} or {
        file.path.removeprefix(folder): file.sha256 for file in asset.files
    }


def bring_local(
    source: Path, file: LockedFile | Ingredient, target: Path, progress: Progress, remedy: str
) -> FileDigests:
    """Copies a local file to `target`, if it has not changed since it was locked.

    Args:
        remedy: of the error.

    Raises:
        UsageError: it is gone or changed; `target` is as before then.
    """
    with _as_locked(source, remedy):
        return copy_verified(source, target, file.expected, progress)


@contextmanager
def _as_locked(path: Path, remedy: str) -> Iterator[None]:
    """Inside it, a local file is read that must be as a lock has it."""
    if not path.is_file():
        raise UsageError(f"{path}: gone since it was locked.", remedy)
    try:
        yield
    except MismatchError:
        raise UsageError(f"{path}: changed since it was locked.", remedy) from None
