"""The project of a command: which of a user's files travel with a run, and their archive.

`submit` writes `project.tar` and then `project.json` into the run folder; the job unpacks them into
`work`, the working folder of the command. So an edit afterwards changes no job that waits.

Of a git checkout, its files travel, tracked or not, without those that it ignores; of another
folder, all. What programs and earlier runs left there stays, unless git tracks it, and so do
private files: `include` brings both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import IO, Any

from runner.from_stage import (
    DamageError,
    IncompleteError,
    UsageError,
    human_count,
    human_size,
    quoted,
    sync_folder,
    write_atomically,
)
from runner.run_folder.layout import GitError, ask_git, read_json, write_json
from stage.files import join_limited, sync_disk
from stage.paths import printable
from stage.private_files import find_private, private_by_name
from stage.walk import (
    Walk,
    check_no_pointers,
    check_readable,
    matches,
    unreadable,
)

# A project is text: what is larger is data or weights, which a bundle carries once for all runs.
MOST_BYTES, MOST_OF_ONE_FILE = 200_000_000, 50_000_000
MOST_FILES = 20_000  # each is an inode in each run folder; clusters count them in a quota
_SHOWN = 5  # names in a message
_LISTING_S = 120.0  # of a large checkout on a network disk
_PIECE = 2**20  # bytes read at a time
# Of earlier runs: by our own `output`, by the loggers, by transformers' Trainer. TensorBoard's
# folder is often `runs`, as is that of run files: its event files are left, not the folder.
_OF_RUNS = frozenset(("output", "wandb", "lightning_logs", "mlruns", ".cache"))
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_EVENTS = "events.out.tfevents."
_FORMAT = 1
_NAMES: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names that are not UTF-8
_AGAIN = "Submit it again, which packs the project anew, under another `name:`."


@dataclass(frozen=True)
class Project:
    """What travels of a project.

    Attributes:
        root: its folder, absolute.
        files: relative POSIX path -> bytes, sorted: regular files, and links.
        links: those that are symbolic links -> the target that travels.
        commit: of the git checkout; None: no git, or no commit.
        is_dirty: whether something travels that the commit has not; None: no git.
        omitted: private files that stay, each with what it is.
        notes: for people, one line each.
    """

    root: Path
    files: Mapping[str, int]
    links: Mapping[str, str]
    commit: str | None
    is_dirty: bool | None
    omitted: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Packed:
    """What `project.json` says about `project.tar`.

    Attributes:
        digest: sha256 over the names, modes and contents.
        commit, is_dirty, root, links: as in `Project`.
        files: path of each regular file -> (bytes, sha256).
    """

    digest: str
    commit: str | None
    is_dirty: bool | None
    root: str
    files: Mapping[str, tuple[int, str]]
    links: Mapping[str, str]


def find_root(code: Path | None, run_file: Path) -> Path:
    """The folder of the project.

    Args:
        code: `code:` of the run file, relative to it. None: the top folder of the git checkout
            around the run file, else the folder of the run file.

    Raises:
        UsageError: there is no such folder, or it is more than a project.
    """
    folder = run_file.absolute().parent
    if code is not None:
        root = Path(os.path.normpath(folder / code.expanduser()))
        if not root.is_dir():
            raise UsageError(
                f"`code:` names {root}, which is no folder.",
                f"It is relative to the run file's folder, {folder}; without it the project is "
                "the git checkout around the run file.",
            )
    else:
        folders = (folder, *folder.parents)
        root = next((above for above in folders if (above / ".git").exists()), folder)
    if root.resolve() in (Path("/"), Path.home().resolve()):
        raise UsageError(
            f"the project would be {root}: that is more than a project.",
            f"Put its files into a folder of their own, and name that in {run_file.name}: "
            "code: FOLDER",
        )
    return root


def list_project(root: Path, include: Sequence[str], leave: Sequence[Path]) -> Project:
    """Which files of a project travel.

    Args:
        root: its folder.
        include: patterns of files that travel although they are private, or ignored by git.
        leave: folders of which nothing travels. (One that the project is in does not count.)

    Raises:
        UsageError: the project is too large or has no file; a file cannot be read, or is a pointer
            of Git LFS.
    """
    root = root.absolute()
    listed = _list(root, include, leave)
    found = {
        path: os.lstat(root / path) for path in sorted(listed.paths) if os.path.lexists(root / path)
    }
    sizes = {path: one.st_size for path, one in found.items() if stat.S_ISREG(one.st_mode)}
    check_readable(root, sizes)
    private = find_private(root, sizes, include)
    sizes = {path: size for path, size in sizes.items() if path not in private}
    if not sizes:
        raise UsageError(
            f"{root} has no file that travels ({listed.note}).",
            "Does `code:` of the run file name the right folder?",
        )
    _check_limits(root, sizes, is_git=listed.is_git)
    check_no_pointers(root, sizes)
    links, led_out = _targets(root, found, sizes)
    files = {path: one.st_size for path, one in found.items() if path in sizes or path in links}
    return Project(
        root,
        files,
        links,
        listed.commit,
        listed.is_changed or not listed.new.isdisjoint(files) if listed.is_git else None,
        tuple(f"{printable(path)} ({what})" for path, what in private.items()),
        (listed.note, *listed.nested, *led_out),
    )


@dataclass
class _Listed:
    """The files that may travel.

    Attributes:
        paths: of files, links and others, relative to the project.
        new: those of them that git does not track.
        commit, is_changed: of the checkout; whether tracked files differ from the commit.
        note: how they were listed.
        nested: notes on checkouts inside.
    """

    note: str
    is_git: bool
    paths: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)
    commit: str | None = None
    is_changed: bool = False
    nested: list[str] = field(default_factory=list)


def _list(root: Path, include: Sequence[str], leave: Sequence[Path]) -> _Listed:
    closed = _inside(root, leave)

    def left_too(path: str, is_folder: bool) -> str | None:
        """What is skipped of a project, besides what `Walk` skips of any folder."""
        name = path.rpartition("/")[2]
        if not is_folder:
            return f"{_EVENTS}*" if name.startswith(_EVENTS) else None
        if name in _OF_RUNS or _CHECKPOINT.fullmatch(name) or path in closed:
            return printable(f"{path}/")
        is_conda = (root / path / "conda-meta").is_dir()
        return f"a conda environment: {printable(path)}" if is_conda else None

    walk = Walk(root, include, left_too)
    try:
        listed = _list_checkout(root, include, walk)
    except GitError as error:
        try:
            walk.run()
        except OSError as failed:
            raise unreadable(f"{failed.filename}: {failed.strerror}", failed.filename) from None
        left = f", without {walk.left}" if walk.left else ""
        listed = _Listed(f"all files of the folder ({error}){left}", False)
        listed.paths = {*walk.sizes, *walk.others}
    # Also what git tracks there: a bundle or a run folder is no part of the project.
    listed.paths -= {
        path for path in listed.paths if any(path.startswith(f"{folder}/") for folder in closed)
    }
    return listed


def _inside(root: Path, leave: Sequence[Path]) -> set[str]:
    """Those of the folders that are inside the project, relative to it."""
    top = root.resolve()
    folders = [folder.resolve() for folder in leave]
    return {folder.relative_to(top).as_posix() for folder in folders if top in folder.parents}


def _list_checkout(root: Path, include: Sequence[str], walk: Walk) -> _Listed:
    """The files of a git checkout, and of those inside: submodules, and other clones.

    Raises:
        GitError: git says nothing about it, or lists no file.
    """
    listed = _Listed("tracked files, and untracked ones that are not ignored", True)
    folder_is_left = cache(lambda folder: walk.why_left(folder, True) is not None)

    def is_left(path: str) -> bool:
        above = [folder.as_posix() for folder in PurePosixPath(path).parents][:-1]
        return any(map(folder_is_left, above)) or walk.why_left(path, False) is not None

    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        tracked = _ls_files(root, prefix, "--cached")
        others = _ls_files(root, prefix, "--others", "--exclude-standard")
        new = {path for path in (*others, *_asked(root, prefix, include)) if not is_left(path)}
        listed.new |= new
        for path in (*tracked, *new):
            if not (root / path).is_dir() or (root / path).is_symlink():
                listed.paths.add(path)
            elif os.path.lexists(root / path / ".git"):
                prefixes.append(f"{path.rstrip('/')}/")
            else:
                listed.nested.append(
                    f"the submodule {printable(path)} is empty: "
                    f"git -C {quoted(root)} submodule update --init {quoted(path)}"
                )
    if not listed.paths:
        raise GitError("git lists no file there")
    with suppress(GitError):  # there is no commit yet
        listed.commit = ask_git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    changes = ask_git(
        *(root, "status", "--porcelain", "--untracked-files=no", "--", "."), timeout_s=_LISTING_S
    )
    listed.is_changed = changes != ""
    return listed


def _ls_files(root: Path, prefix: str, *words: str) -> list[str]:
    """What `git ls-files` lists of a checkout at or in the project, relative to the project."""
    text = ask_git(root / prefix, "ls-files", "-z", *words, timeout_s=_LISTING_S)
    return [f"{prefix}{path}" for path in text.split("\0") if path]


def _asked(root: Path, prefix: str, include: Sequence[str]) -> list[str]:
    """Files that git ignores, and that a pattern asks for; and those with private names: `.env` is
    mostly ignored, and the user has to know that it stays.
    """
    # Without patterns, git need not look into ignored folders: a data set can be there.
    whole = () if include else ("--directory",)
    ignored = _ls_files(root, prefix, "--others", "--ignored", "--exclude-standard", *whole)
    return [
        path
        for path in ignored
        if not path.endswith("/")
        and (private_by_name(path) or any(matches(path, pattern) for pattern in include))
    ]


def _check_limits(root: Path, sizes: Mapping[str, int], *, is_git: bool) -> None:
    """Checks that the project is no more than code.

    Raises:
        UsageError: it is too large; names what makes it so, and how that travels.
    """
    total, weights = sum(sizes.values()), Counter(sizes)
    if max(sizes.values()) > MOST_OF_ONE_FILE:
        what = f"files of at most {human_size(MOST_OF_ONE_FILE)} travel with a run"
    elif total > MOST_BYTES:
        what = f"at most {human_size(MOST_BYTES)} travel with a run, and it has {human_size(total)}"
        weights = _by_first_part(sizes)
    elif len(sizes) > MOST_FILES:
        what = f"at most {MOST_FILES:,} files travel with a run, and it has {len(sizes):,}"
        weights = _by_first_part(dict.fromkeys(sizes, 1))
    else:
        return
    unit = human_size if total > MOST_BYTES or len(sizes) <= MOST_FILES else _files
    largest = weights.most_common(_SHOWN)
    shown = ", ".join(f"{printable(path)} ({unit(weight)})" for path, weight in largest)
    raise UsageError(
        f"the project {root} is too large: {what}. The largest: {shown}.",
        _way_of_data(root, largest[0][0], is_git=is_git),
    )


def _by_first_part(weights: Mapping[str, int]) -> Counter[str]:
    """The sums of the folders and files at the top of the project."""
    sums = Counter[str]()
    for path, weight in weights.items():
        sums[path.partition("/")[0]] += weight
    return sums


def _files(number: int) -> str:
    return human_count(number, "file")


def _way_of_data(root: Path, path: str, *, is_git: bool) -> str:
    """How a large file or folder stays out of the project, and comes by the bundle."""
    file = root / path
    if is_git:
        escaped = re.sub(r"([*?\[\]\\])", r"\\\1", path)
        keep_out = f"echo {quoted(f'/{escaped}')} >> {quoted(root / '.gitignore')}"
        if ask_git(root, "ls-files", "--", f":(literal){path}"):
            # What is tracked travels, ignored or not.
            keep_out += f"; git -C {quoted(root)} rm -r -q --cached {quoted(path)}"
    else:
        file = root.parent / file.name
        keep_out = f"mv {quoted(root / path)} {quoted(file)}"
    name = re.sub(r"[^\w.-]+", "-", file.stem).strip(".-") or "data"
    inside = "FILE" if (root / path).is_dir() else file.name
    return (
        f"Keep it out of the project: {keep_out}\n"
        "     If the command needs it, the bundle brings it: below `assets:` of the manifest write "
        f"`{name}: {{path: {json.dumps(str(file), ensure_ascii=False)}}}`, then stage fetch; the "
        f"command finds it at $AIRLIFT_BUNDLE/data/files/{name}/{inside}"
    )


def _targets(
    root: Path, found: Mapping[str, os.stat_result], sizes: Mapping[str, int]
) -> tuple[dict[str, str], list[str]]:
    """The targets of the symbolic links, as they travel; and notes on those that lead out.

    A link to what travels leads to the copy. Another leads to the same place as here, where there
    is such a place: on a disk of the cluster.
    """
    top = os.path.realpath(root)
    linked = [path for path, one in found.items() if stat.S_ISLNK(one.st_mode)]
    travels = {*sizes, *linked}
    travels |= {folder.as_posix() for path in sizes for folder in PurePosixPath(path).parents}
    links, out = dict[str, str](), []
    for path in linked:
        target = os.path.realpath(root / path)
        if os.path.relpath(target, top) in travels:
            links[path] = os.path.relpath(target, os.path.realpath((root / path).parent))
        else:
            links[path] = target
            out.append(f"{printable(path)} -> {printable(target)}")
    note = f"links to what stays here, which must be on the cluster: {join_limited(out, _SHOWN)}"
    return links, [note] if out else []


def pack(project: Project, archive: Path, description: Path) -> str:
    """Writes the archive, and then its description, which makes it valid.

    The archive is not compressed: gzip takes 20 times as long as the rest, for code that is small.

    Args:
        archive: `project.tar`.
        description: `project.json`.

    Returns:
        The digest: sha256 over names, modes and contents, not times.

    Raises:
        IncompleteError: a file changed meanwhile.
        OSError: the disk is full, for example.
    """
    description.unlink(missing_ok=True)
    partial = archive.with_name(f"{archive.name}.partial")
    files, entries = dict[str, tuple[int, str]](), []
    try:
        with open(partial, "wb") as target:
            with tarfile.TarFile(
                fileobj=target, mode="w", format=tarfile.GNU_FORMAT, **_NAMES, copybufsize=_PIECE
            ) as tar:
                for path, size in project.files.items():
                    info = tarfile.TarInfo(path)
                    if path in project.links:
                        info.type, info.linkname = tarfile.SYMTYPE, project.links[path]
                        tar.addfile(info)
                    else:
                        info.size = size
                        files[path] = size, _add(tar, info, project.root / path)
                    content = files[path][1] if path in files else info.linkname
                    entries.append((path, _kind(info), content))
            target.flush()
            os.fsync(target.fileno())
        partial.replace(archive)
        sync_folder(archive.parent)
    finally:
        partial.unlink(missing_ok=True)
    digest = _digest(entries)
    write_json(
        description,
        {
            "format": _FORMAT,
            "digest": digest,
            "commit": project.commit,
            "dirty": project.is_dirty,
            "root": str(project.root),
            "files": files,
            "links": project.links,
        },
    )
    return digest


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, file: Path) -> str:
    """Adds a file to the archive, and reads it once; returns its sha256.

    Raises:
        IncompleteError: it changed since it was listed, or while it is read.
    """
    changed = IncompleteError(
        f"{printable(str(file))} changed while the project was packed.",
        "Save it, and submit again. A file that a program still writes belongs into .gitignore.",
    )
    try:
        # Without waiting, if it is a pipe by now, and not by a link.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise changed from None
    with open(descriptor, "rb") as source:
        before = os.fstat(descriptor)
        info.mode = 0o755 if before.st_mode & stat.S_IXUSR else 0o644
        info.mtime = int(before.st_mtime)
        reader = _Hashed(source, changed)
        tar.addfile(info, reader)  # type: ignore[arg-type]  # it only reads
        after = os.fstat(descriptor)
    times = (before.st_size, before.st_mtime_ns), (after.st_size, after.st_mtime_ns)
    if not stat.S_ISREG(before.st_mode) or before.st_size != info.size or times[0] != times[1]:
        raise changed
    return reader.sha256.hexdigest()


class _Hashed:
    """A file that is read to an end that is known before, and hashed on the way."""

    def __init__(self, file: IO[bytes], too_short: IncompleteError) -> None:
        self._file, self._too_short = file, too_short
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self._too_short
        self.sha256.update(data)
        return data


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym():
        return "link"
    return "program" if info.mode & stat.S_IXUSR else "file"


def _digest(entries: Iterable[tuple[str, str, str]]) -> str:
    """Of (path, kind, sha256 or target) of all."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def read_description(path: Path) -> Packed | None:
    """What `project.json` says; None: it is not there, or it cannot be read."""
    found = read_json(path)
    try:
        return Packed(
            str(found["digest"]),
            found["commit"],
            found["dirty"],
            str(found["root"]),
            {name: (int(size), str(sha256)) for name, (size, sha256) in found["files"].items()},
            {name: str(target) for name, target in found["links"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def unpack(archive: Path, description: Path, work: Path) -> list[str]:
    """Makes the working folder from the archive, whole or not at all.

    A working folder of the same project stays as it is; one of another is set aside.

    Args:
        work: its digest is kept beside it, in `work.digest`.

    Returns:
        Lines to print.

    Raises:
        DamageError: the archive is not what its description says, or is none of ours.
        OSError: the disk is full, for example.
    """
    packed = read_description(description)
    if packed is None:
        raise DamageError(f"{description}: is missing, or cannot be read.", _AGAIN)
    mark = work.with_name(f"{work.name}.digest")
    if work.is_dir() and mark.is_file() and mark.read_text() == packed.digest:
        return []
    partial = work.with_name(f"{work.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _check_names(packed)
        entries = list(_extract(archive, packed, partial))
    except (tarfile.TarError, FileExistsError, FileNotFoundError, ValueError) as error:
        raise DamageError(f"{archive}: is damaged ({error}).", _AGAIN) from None
    if _digest(entries) != packed.digest:
        raise DamageError(f"{archive}: is not what {description.name} says.", _AGAIN)
    # A node that loses power now must not leave files without bytes in a folder that seems whole.
    sync_disk(partial)
    lines = [f"the project is in {work}: {_files(len(entries))}, digest {packed.digest[:12]}"]
    if os.path.lexists(work):
        lines.insert(0, f"the work of another project is now in {set_earlier_work_aside(work)}")
    write_atomically(mark, packed.digest.encode())
    partial.replace(work)
    sync_folder(work.parent)
    return lines


def _check_names(packed: Packed) -> None:
    """Raises for names that lead out of the folder: a run folder may be another's copy.

    Raises:
        ValueError: for the first.
    """
    names = {*packed.files, *packed.links}
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or path.as_posix() != name or ".." in path.parts or name == ".":
            raise ValueError(f"the name {printable(name)}")
        # A link first, and then a file through it.
        if any(above.as_posix() in names for above in path.parents):
            raise ValueError(f"{printable(name)} is in a file or a link")


def _extract(archive: Path, packed: Packed, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Writes the files and links that the description names; yields the entries of the digest.

    Raises:
        ValueError: there is another one, or it has other bytes.
        tarfile.TarError, FileExistsError, FileNotFoundError: the archive is damaged.
    """
    with tarfile.TarFile(archive, **_NAMES) as tar:
        for info in tar:
            place = folder / info.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if info.issym() and packed.links.get(info.name) == info.linkname:
                place.symlink_to(info.linkname)
                yield info.name, _kind(info), info.linkname
            elif info.isreg() and info.name in packed.files:
                source = tar.extractfile(info)
                assert source is not None  # it is a regular file
                found = info.size, _write(source, info, place)
                if found != packed.files[info.name]:
                    raise ValueError(f"{printable(info.name)} has other bytes than it had")
                yield info.name, _kind(info), found[1]
            else:
                raise ValueError(f"{printable(info.name)} is not in its description")


def _write(source: IO[bytes], info: tarfile.TarInfo, place: Path) -> str:
    """Writes one file, never over another or through a link; returns its sha256."""
    mode = 0o777 if _kind(info) == "program" else 0o666  # and the umask, as for a checkout
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    sha256 = hashlib.sha256()
    with open(descriptor, "wb") as target:
        while piece := source.read(_PIECE):
            sha256.update(piece)
            target.write(piece)
    # Tools that build what is older than its source compare these.
    os.utime(place, (info.mtime, info.mtime))
    return sha256.hexdigest()


def set_earlier_work_aside(work: Path) -> Path:
    """Renames a working folder to the first free of `work-1`, `work-2`, ...; returns that."""
    names = (work.with_name(f"{work.name}-{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    work.rename(aside)
    return aside
