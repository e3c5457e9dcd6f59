"""Lists the files that a `path:` entry takes, with their sizes, before a byte is hashed.

A folder often holds more than its owner remembers. Files that programs left there (`.git`, caches,
other bundles) are omitted, with a note; `include` takes them by their name (docs/adr/0005).
Files that look private are refused: `private_files`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stage.bundle.bundle import FETCH_PARTIAL, holds_bundle
from stage.convert.convert import chosen
from stage.errors import PolicyError, UsageError, quoted
from stage.files import is_pointer, join_limited
from stage.hub.model_files import check_matches, why_left
from stage.lock.manifest import Manifest, local_path
from stage.lock.model import LeftOut
from stage.lock.requests import PathRequest
from stage.paths import printable
from stage.staging.sources.private_files import check_not_private, is_named

_SHOWN = 8  # names in a message
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
    if base.is_dir():  # else the entry itself names the file
        check_not_private(base, listing.sizes, request.include)
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
                named = is_named(entry.name, self._include, whole=entry.name in _LEFT_BY_PROGRAMS)
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
    return (folder / FETCH_PARTIAL).is_file() or holds_bundle(folder)
