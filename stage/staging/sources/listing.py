"""Lists the files that a `path:` entry takes, with their sizes, before a byte is hashed.

A folder often holds more than its owner remembers. Files that programs left there (`.git`, caches,
other bundles) are omitted, with a note; `include` takes them by their name (docs/adr/0005).
Files that look private are refused: `stage.private_files`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stage.convert.convert import chosen
from stage.errors import PolicyError, UsageError
from stage.hub.model_files import check_matches, why_left
from stage.lock.manifest import Manifest, local_path
from stage.lock.model import LeftOut
from stage.lock.requests import PathRequest
from stage.paths import printable
from stage.private_files import check_not_private
from stage.walk import Walk, check_no_pointers, check_readable


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
        walk.run()
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
    folder = base if base.is_dir() else base.parent
    check_readable(folder, listing.sizes)
    if base.is_dir():  # else the entry itself names the file
        check_not_private(base, listing.sizes, request.include)
    check_no_pointers(folder, listing.sizes)
    return listing


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
