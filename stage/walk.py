"""Lists the files of a folder of a user's, without those that programs left there.

What an entry `path:` of a manifest takes, and what of a project travels with a run, is found by the
same rules. `.git`, caches, virtual environments and other bundles are skipped, unless `include`
names them.
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from stage.bundle.bundle import FETCH_PARTIAL, holds_bundle
from stage.errors import UsageError, quoted
from stage.files import is_pointer, join_limited
from stage.paths import printable
from stage.private_files import is_named

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


class Walk:
    """Lists a folder and its subfolders; counts and skips what programs left there.

    Args:
        base: the folder.
        include: patterns; what one of them names is taken, whatever left it.
        left_too: what else is skipped: says what a file or folder is (relative path, whether it is
            a folder); None: it is taken.

    Attributes:
        sizes: relative path -> bytes, of regular files.
        others: links and special files. Links are not followed: they can lead anywhere.
    """

    def __init__(
        self,
        base: Path,
        include: Sequence[str],
        left_too: Callable[[str, bool], str | None] = lambda path, is_folder: None,
    ) -> None:
        self._base, self._include, self._left_too = base, include, left_too
        self.sizes: dict[str, int] = {}
        self.others: list[str] = []
        self._left: Counter[str] = Counter()

    def run(self) -> None:
        """Lists the folder.

        Raises:
            UsageError: a folder or file cannot be read.
        """
        folders = [""]
        try:
            while folders:
                prefix = folders.pop()
                with os.scandir(self._base / prefix) as listing:
                    entries = list(listing)
                for entry in entries:
                    path = f"{prefix}{entry.name}"
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if what := self.why_left(path, is_folder):
                        self._left[what] += 1
                    elif is_folder:
                        folders.append(f"{path}/")
                    elif entry.is_file(follow_symlinks=False):
                        self.sizes[path] = entry.stat(follow_symlinks=False).st_size
                    else:
                        self.others.append(path)
        except OSError as error:
            raise unreadable(f"{error.filename}: {error.strerror}", error.filename) from None

    def why_left(self, path: str, is_folder: bool) -> str | None:
        """What a file or folder is that is skipped; None: it is taken."""
        what = _left_by_programs(self._base, path, is_folder) or self._left_too(path, is_folder)
        if what is None:
            return None
        name = path.rpartition("/")[2]
        named = is_named(name, self._include, whole=name in _LEFT_BY_PROGRAMS)
        return None if named else what

    @property
    def left(self) -> str:
        """Names what was skipped."""
        counted = sorted(self._left.items())
        return ", ".join(what if count == 1 else f"{count} {what}" for what, count in counted)


def _left_by_programs(base: Path, path: str, is_folder: bool) -> str | None:
    """What a program left there; None for a user's own file or folder.

    Args:
        path: of the file or folder, relative to `base`, POSIX.
    """
    name = path.rpartition("/")[2]
    if name in _LEFT_BY_PROGRAMS:
        return name
    if name.startswith(_OF_MACOS):
        return f"{_OF_MACOS}*"
    if path.endswith(".cache/huggingface"):  # `hf download --local-dir` leaves it
        return ".cache/huggingface"
    if is_folder:
        if (base / path / FETCH_PARTIAL).is_file() or holds_bundle(base / path):
            return f"another bundle: {printable(path)}"
        if Path(base, path, "pyvenv.cfg").is_file():
            return f"a virtual environment: {printable(path)}"
    return None


def check_readable(folder: Path, paths: Iterable[str]) -> None:
    """Checks that this user can read the files.

    Raises:
        UsageError: names those that cannot be read.
    """
    if closed := [path for path in paths if not os.access(folder / path, os.R_OK)]:
        names = join_limited([printable(path) for path in closed], _SHOWN)
        raise unreadable(f"cannot be read: {names}", str(folder))


def unreadable(what: str, where: str) -> UsageError:
    """The error for files that cannot be read, with the command that makes them readable."""
    return UsageError(f"{what}.", f"Make it readable for you: chmod -R u+rX {quoted(where)}")


def check_no_pointers(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises for Git LFS pointers: a clone without its LFS files has all names, but no contents.

    Args:
        sizes: path in the folder -> bytes.

    Raises:
        UsageError: there are pointers.
    """
    pointers = [path for path, size in sizes.items() if is_pointer(folder / path, size)]
    if not pointers:
        return
    names = join_limited([printable(path) for path in pointers], _SHOWN)
    are = (
        "is a Git LFS pointer, not the file itself"
        if len(pointers) == 1
        else "are Git LFS pointers, not the files"
    )
    raise UsageError(f"{names} {are}.", f"Get the contents: git -C {quoted(folder)} lfs pull")


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern of `include` or `exclude` matches this path, by the Hub's rule."""
    return fnmatch.fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern)
