"""What a `path:` entry of a manifest means on this disk: names and sizes, before a byte is hashed.

A folder has more in it than its owner thinks of. What programs left there (`.git`, caches, other bundles) stays
behind and is told; what looks private (`credentials`) is refused; both travel if `include` names them (docs/adr/0041).
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from stage import bundle as layout
from stage.asset import LeftOut
from stage.convert import chosen
from stage.disk import some_of
from stage.errors import PolicyError, StageError, UsageError, all_at_once
from stage.manifest import Manifest
from stage.names import printable
from stage.request import PathRequest
from stage.sources import credentials
from stage.sources.selection import require_matches, why_left

_SHOWN = 8
# Of version control, of programs that run beside the data, of file managers.
_LEFT_BY_PROGRAMS = frozenset(
    (
        *(".git", ".hg", ".svn"),
        *("__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", ".nox"),
        *("node_modules", ".DS_Store", "Thumbs.db"),
    )
)


@dataclass(frozen=True)
class Listing:
    """What an entry takes.

    Attributes:
        base: the file or folder it points to.
        sizes: path relative to `base` (its name, if that is a file) -> bytes, of what is taken.
        left_out: what its patterns, or its conversion, leave behind.
        notes: what else stays behind, in words.
    """

    base: Path
    sizes: dict[str, int]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    def file(self, path: str) -> Path:
        """Where a file of it lies."""
        return self.base if self.base.is_file() else self.base / path


def local_base(path: str, manifest: Manifest) -> Path:
    """Where a `path:` entry points: relative to the manifest's folder."""
    return manifest.path.parent / Path(path).expanduser()


def list_path(name: str, request: PathRequest, manifest: Manifest) -> Listing:
    """Looks at what a `path:` entry points to.

    Raises:
        UsageError: nothing there, nothing in it, a pattern that matches nothing, or something cannot be read.
        PolicyError: a symbolic link, a special file, or what looks like keys, passwords or tokens.
    """
    place = f"{manifest.place(name, 'path')}: `{name}`"
    base = _base(request, manifest, place)
    walk = _Walk(base, request.include)
    if base.is_file():
        walk.sizes[base.name] = base.stat().st_size
    else:
        try:
            walk.through()
        except OSError as error:
            raise _unreadable(f"{place}: {error.filename}: {error.strerror}", error.filename) from None
    for path in sorted(walk.others):
        if not why_left(path, request.include, request.exclude):
            raise PolicyError(
                f"{place}: {printable(str(base / path))} is a link or a special file; a bundle holds regular files "
                "only.",
                f'Put the file itself there, or leave it out: exclude: ["{path}"]',
            )
    require_matches(request.include, walk.sizes, f"the {len(walk.sizes)} files in {base}", place)
    listing = _selected(base, walk, request, manifest, place)
    if not listing.sizes:
        raise UsageError(f"{place}: {base} has no file to take.", "Check the path, `include` and `exclude`.")
    if closed := [path for path in listing.sizes if not os.access(listing.file(path), os.R_OK)]:
        raise _unreadable(
            f"{place}: cannot be read: {some_of([printable(path) for path in closed], _SHOWN)}", str(base)
        )
    _refuse_private(listing, request, place)
    return listing


def _unreadable(what: str, where: str) -> UsageError:
    return UsageError(f"{what}.", f"Make it readable for you: chmod -R u+rX {shlex.quote(where)}")


def _base(request: PathRequest, manifest: Manifest, place: str) -> Path:
    try:
        base = local_base(request.path, manifest)
    except RuntimeError:
        raise UsageError(f"{place}: there is no home folder for {request.path}.", "Write it out.") from None
    if not base.exists():
        raise UsageError(f"{place}: there is no {base}.", "Paths are relative to the manifest's folder.")
    if not (base.is_file() or base.is_dir()):
        raise UsageError(f"{place}: {base} is neither a file nor a folder.", "Name a file or a folder.")
    return base


def _selected(base: Path, walk: _Walk, request: PathRequest, manifest: Manifest, place: str) -> Listing:
    reasons = {path: why_left(path, request.include, request.exclude) for path in walk.sizes}
    if request.convert and (asked := [path for path, reason in reasons.items() if reason is None]):
        read = set(chosen(request.convert, asked, place))
        reasons |= {path: f"not read by `convert: {request.convert}`" for path in asked if path not in read}
    own_lock = manifest.lock_path.absolute()
    listing = Listing(base, walk.sizes, (), ())
    for path in walk.sizes:
        if reasons[path] is None and listing.file(path).absolute() == own_lock:
            reasons[path] = "the lock of this manifest, which is written anew"
    left = [LeftOut(path, walk.sizes[path], reason) for path, reason in sorted(reasons.items()) if reason]
    taken = {path: walk.sizes[path] for path in sorted(reasons) if reasons[path] is None}
    return Listing(base, taken, tuple(left), walk.notes())


def _is_named(name: str, include: Sequence[str], *, whole: bool) -> bool:
    """Whether a pattern means a file or folder of that name, and not just everything, or everything of a kind.

    Args:
        whole: all of the name is what tells: `*.json` does not mean `kaggle.json`, though `*.pem` means a key.
    """
    parts = {part for pattern in include for part in pattern.split("/")}
    meant = (part for part in parts if _says_something(part) and not (whole and _is_of_a_kind(part)))
    return name in parts or any(fnmatch.fnmatchcase(name, part) for part in meant)


def _says_something(pattern: str) -> bool:
    """Whether there is a letter or a digit in it that has to be in the name."""
    return any(character.isalnum() for character in re.sub(r"\[!?\]?[^]]*\]", "", pattern))


def _is_of_a_kind(pattern: str) -> bool:
    """`*.json` and its like: nothing but wildcards before the last dot."""
    stem = pattern.rpartition(".")[0]
    return stem != "" and not _says_something(stem)


def _refuse_private(listing: Listing, request: PathRequest, place: str) -> None:
    """Keys and passwords travel if a person says so of just these, not because they lay there.

    Raises:
        PolicyError: there are some.
    """
    if listing.base.is_file():
        return  # named as plainly as can be
    private: dict[str, str] = {}
    for path, size in listing.sizes.items():
        what = credentials.by_name(path) or credentials.by_first_bytes(listing.file(path), size)
        whole = credentials.is_known_by_whole_name(path)
        if what and not _is_named(credentials.telling_part(path), request.include, whole=whole):
            private[path] = what
    if not private:
        return
    told = some_of([f"{printable(path)} ({what})" for path, what in private.items()], _SHOWN)
    names = ", ".join(f'"{path}"' for path in list(private)[:_SHOWN])
    raise PolicyError(
        f"{place}: {listing.base} has what should not travel by accident: {told}.",
        f"Leave it out: exclude: [{names}]. If it has to be in the bundle, name it: include: "
        f'["*", {names}]   (whoever gets the bundle can read it)',
    )


class _Walk:
    """Goes through a folder; what programs left there is counted, and not gone into.

    Attributes:
        sizes: relative path -> bytes, of regular files.
        others: links and special files; a link is not followed: that could take in anything.
    """

    def __init__(self, base: Path, include: Sequence[str]) -> None:
        self._base, self._include = base, include
        self.sizes: dict[str, int] = {}
        self.others: list[str] = []
        self._by_programs: Counter[str] = Counter()
        self._bundles: list[str] = []
        self._environments: list[str] = []

    def through(self) -> None:
        """Takes what is in the folder and below.

        Raises:
            OSError: one of them cannot be read.
        """
        folders = [""]
        while folders:
            prefix = folders.pop()
            with os.scandir(self._base / prefix) as listing:
                entries = list(listing)
            for entry in entries:
                path = f"{prefix}{entry.name}"
                named = _is_named(entry.name, self._include, whole=entry.name in _LEFT_BY_PROGRAMS)
                if not named and self._is_left(entry, path):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    self.sizes[path] = entry.stat(follow_symlinks=False).st_size
                else:
                    self.others.append(path)

    def _is_left(self, entry: os.DirEntry[str], path: str) -> bool:
        if entry.name in _LEFT_BY_PROGRAMS:
            self._by_programs[entry.name] += 1
        elif path.endswith(".cache/huggingface"):  # `hf download --local-dir` leaves it
            self._by_programs[".cache/huggingface"] += 1
        elif not entry.is_dir(follow_symlinks=False):
            return False
        elif _is_bundle(Path(entry.path)):
            self._bundles.append(path)
        elif Path(entry.path, "pyvenv.cfg").is_file():
            self._environments.append(path)
        else:
            return False
        return True

    def notes(self) -> tuple[str, ...]:
        """What was left, in words."""
        programs = [name if count == 1 else f"{count} {name}" for name, count in sorted(self._by_programs.items())]
        told = [f"what programs left: {', '.join(programs)}"] if programs else []
        told += [f"another bundle: {printable(path)}" for path in self._bundles]
        told += [f"a virtual environment: {printable(path)}" for path in self._environments]
        return tuple(told)


def _is_bundle(folder: Path) -> bool:
    return (folder / layout.JOURNAL).is_file() or layout.holds_bundle(folder)


def look(manifest: Manifest, required: Collection[str], note: Callable[[str], None]) -> dict[str, Listing]:
    """Looks at what all `path:` entries point to; every mistake in them is told at once.

    Args:
        required: assets that have to be there; the others may be gone, since a lock pins them and the bundle has them.

    Raises:
        StageError: as for `list_path`, or a CSV with another separator; of several the first's kind.
    """
    found: dict[str, Listing] = {}
    mistakes: list[StageError] = []
    for name, request in manifest.requests.items():
        if not isinstance(request, PathRequest) or not (name in required or _is_there(request, manifest)):
            continue
        try:
            found[name] = list_path(name, request, manifest)
            _check_csv_headers(name, request, found[name], manifest)
        except (UsageError, PolicyError) as mistake:
            mistakes.append(mistake)
    if mistakes:
        raise all_at_once(str(manifest.path), mistakes)
    for name, listing in found.items():
        if listing.notes:
            note(
                f"{manifest.place(name, 'path')}: `{name}`: left out: {'; '.join(listing.notes)} (`include` takes what "
                "it names)"
            )
    return found


def _is_there(request: PathRequest, manifest: Manifest) -> bool:
    try:
        return local_base(request.path, manifest).exists()
    except RuntimeError:  # no such home folder
        return False


def _check_csv_headers(name: str, request: PathRequest, listing: Listing, manifest: Manifest) -> None:
    """Tells a CSV with another separator when it is resolved: what else is asked for may take hours to download.

    Raises:
        UsageError: there is one.
    """
    if request.convert != "csv":
        return
    from stage.convert.readers import check_csv

    for path in listing.sizes:
        check_csv(path, listing.file(path), f"{manifest.place(name, 'path')}: `{name}`", request.separator)
