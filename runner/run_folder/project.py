"""The project of a command: which of a user's files travel with a run, and their archive.

`submit` writes `project.tar` and then `project.json` into the run folder; the job unpacks them into
`work`, the working folder of the command. So an edit afterwards changes no job that waits.

Of a git checkout, its files travel, tracked or not, without those that it ignores; of another
folder, all. What programs and earlier runs left there stays, unless git tracks it, and so do
private files: `include` brings both.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from runner.from_stage import (
    DamageError,
    IncompleteError,
    UsageError,
    hash_file,
    human_count,
    human_size,
    quoted,
    sync_folder,
    write_atomically,
)
from runner.run_folder.layout import GitError, RunFolder, ask_git, read_json, write_json
from runner.run_folder.results import OF_TRAINER
from stage.files import join_limited, read_file, sync_disk
from stage.paths import printable
from stage.private_files import find_private, private_by_name
from stage.walk import (
    Walk,
    check_no_pointers,
    check_readable,
    matches,
)

# A project is text: what is larger is data or weights, which a bundle carries once for all runs.
MOST_BYTES, MOST_OF_ONE_FILE = 200_000_000, 50_000_000
MOST_FILES = 20_000  # each is an inode in each run folder; clusters count them in a quota
_SHOWN = 5  # names in a message
_LISTING_S = 120.0  # of a large checkout on a network disk
# Of earlier runs: by our own `output`, by the loggers, by transformers' Trainer. TensorBoard's
# folder is often `runs`, as is that of run files: its event files are left, not the folder.
_OF_RUNS = frozenset(("output", "wandb", "lightning_logs", "mlruns", ".cache"))
_EVENTS = "events.out.tfevents."
_PROGRAM = 0o755  # the mode of what the user may execute
_NAMES: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names that are not UTF-8


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
        digest: sha256 over names, modes and contents, not times.
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
        leave: folders of which nothing travels, and files. (One that the project is in does not
            count.)

    Raises:
        UsageError: the project is too large or has no file; a file cannot be read, or is a pointer
            of Git LFS.
    """
    root = root.absolute()
    top = root.resolve()
    resolved = [folder.resolve() for folder in leave]
    closed = {str(folder.relative_to(top)) for folder in resolved if top in folder.parents}

    def is_of_runs(path: str, is_folder: bool) -> str | None:
        """What is skipped of a project, besides what `Walk` skips of any folder."""
        name = path.rpartition("/")[2]
        if name.startswith(_EVENTS):
            return f"{_EVENTS}*"
        is_left = is_folder and (
            (name in _OF_RUNS or path in closed or OF_TRAINER.fullmatch(name))
            or (root / path / "conda-meta").is_dir()
        )
        return printable(f"{path}/") if is_left else None

    walk = Walk(root, include, is_of_runs)
    try:
        tracked, new, notes = _list_checkout(root, include, walk)
        commit, is_dirty = _commit(root)
    except GitError as error:
        walk.run()
        tracked, new = {*walk.sizes, *walk.others}, set()
        commit, is_dirty = None, None
        omitted = f"; omitted: {walk.left}" if walk.left else ""
        notes = [
            f"the project is the whole folder, because git reads no checkout there ({error})"
            f"{omitted}"
        ]
    sizes, linked = _files_and_links(root, sorted(tracked | new), closed)
    # First the limits: what follows opens each small file.
    _check_limits(root, sizes, is_git=is_dirty is not None)
    check_readable(root, sizes)
    private = find_private(root, sizes, include)
    sizes = {path: size for path, size in sizes.items() if path not in private}
    check_no_pointers(root, sizes)
    links, led_out = _targets(root, linked, sizes)
    files = sizes | {path: len(os.fsencode(target)) for path, target in links.items()}
    return Project(
        root,
        dict(sorted(files.items())),
        links,
        commit,
        is_dirty if is_dirty is None else is_dirty or not new.isdisjoint(files),
        tuple(f"{printable(path)} ({what})" for path, what in private.items()),
        (*notes, *led_out),
    )


def _files_and_links(
    root: Path, paths: Iterable[str], closed: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """The regular files, with their bytes, and the links. Nothing else can travel.

    Args:
        closed: folders that never travel, also with what git tracks there.
    """
    sizes, linked = dict[str, int](), list[str]()
    # What git tracks in a folder is no part of the project if that is a link by now.
    skipped = {*closed}
    for path in paths:
        if any(str(one) in skipped for one in (path, *PurePosixPath(path).parents)):
            continue
        with suppress(FileNotFoundError, NotADirectoryError):  # git tracks what the user deleted
            status = os.lstat(root / path)
            if stat.S_ISLNK(status.st_mode):
                linked.append(path)
                skipped.add(path)
            elif stat.S_ISREG(status.st_mode):
                sizes[path] = status.st_size
    return sizes, linked


def _list_checkout(
    root: Path, include: Sequence[str], walk: Walk
) -> tuple[set[str], set[str], list[str]]:
    """The files of a git checkout, and of those inside: submodules, and other clones.

    Args:
        walk: says what programs and earlier runs left there; of that, tracked files travel.

    Returns:
        Paths of tracked files; of others; a note on what git ignores.

    Raises:
        GitError: git says nothing about it, or lists no file.
    """
    folder_is_left = cache(lambda folder: walk.why_left(folder, True))

    def is_left(path: str) -> bool:
        above = [folder.as_posix() for folder in PurePosixPath(path).parents][:-1]
        return bool(any(map(folder_is_left, above)) or walk.why_left(path, False))

    all_tracked, all_new, all_ignored = set[str](), set[str](), list[str]()
    # Without patterns, git need not look into ignored folders: a data set can be there.
    ignored = ("--ignored", *(() if include else ("--directory",)))
    inside = [""]
    while inside:
        prefix = inside.pop()
        tracked = _ls_files(root, prefix, "--cached")
        new = _ls_files(root, prefix, "--others")
        # `.env` is mostly ignored, and the user has to know that it stays.
        for path in _ls_files(root, prefix, "--others", *ignored):
            if private_by_name(path) or any(matches(path, pattern) for pattern in include):
                new.append(path)
            elif not is_left(path) and not is_left(f"{path.rstrip('/')}/x"):
                all_ignored.append(path)
        new = [path for path in new if not is_left(path)]
        folders = [path.rstrip("/") for path in (*tracked, *new)]
        inside += [
            f"{folder}/"
            for folder in folders
            if os.path.lexists(root / folder / ".git") and not (root / folder).is_symlink()
        ]
        all_tracked.update(tracked)
        all_new.update(new)
    if not all_tracked | all_new:
        raise GitError("git lists no file there")
    stays = join_limited(sorted(map(printable, all_ignored)), _SHOWN)
    how = "where the command needs one, write in the run file: include: [NAME]"
    note = f"git ignores, and so here stays: {stays}; {how}"
    return all_tracked, all_new, [note] if all_ignored else []


def _ls_files(root: Path, prefix: str, *words: str) -> list[str]:
    """What `git ls-files` lists of a checkout at or in the project, relative to the project."""
    kept = "--exclude-standard"  # without a meaning for tracked files
    text = ask_git(root / prefix, "ls-files", "-z", kept, *words, timeout_s=_LISTING_S)
    return [f"{prefix}{path}" for path in text.split("\0") if path]


def _commit(root: Path) -> tuple[str | None, bool]:
    """The commit of a checkout, None before the first; whether tracked files differ from it."""
    commit = None
    with suppress(GitError):
        commit = ask_git(root, "rev-parse", "--verify", "HEAD").strip()
    words = ("status", "--porcelain", "--untracked-files=no", "--", ".")
    return commit, ask_git(root, *words, timeout_s=_LISTING_S) != ""


def _check_limits(root: Path, sizes: Mapping[str, int], *, is_git: bool) -> None:
    """Checks that the project is no more than code.

    Raises:
        UsageError: it has no file, or is too large; names what makes it so, and how that travels.
    """
    if not sizes:
        raise UsageError(
            f"{root} has no file that travels.",
            "Does `code:` of the run file name the right folder?",
        )
    total, has_large = sum(sizes.values()), max(sizes.values()) > MOST_OF_ONE_FILE
    by_bytes = has_large or total > MOST_BYTES
    if not by_bytes and len(sizes) <= MOST_FILES:
        return
    parts = Counter[str]()
    for path, size in sizes.items():
        # Of many small files, their folder is named.
        parts[path if has_large else path.partition("/")[0]] += size if by_bytes else 1
    largest = parts.most_common(_SHOWN)
    shown = [
        f"{printable(part)} ({human_size(number) if by_bytes else human_count(number, 'file')})"
        for part, number in largest
    ]
    raise UsageError(
        f"the project {root} has {human_size(total)} in {human_count(len(sizes), 'file')}. At most "
        f"{human_size(MOST_BYTES)} in {MOST_FILES:,} files travel with a run, and no file above "
        f"{human_size(MOST_OF_ONE_FILE)}. The largest: {', '.join(shown)}.",
        _way_of_data(root, largest[0][0], is_git=is_git),
    )


def _way_of_data(root: Path, path: str, *, is_git: bool) -> str:
    """How a large file or folder stays out of the project, and comes by the bundle."""
    file = root / path
    keep_out = f"mv {quoted(file)} {quoted(root.parent)}"
    if is_git:
        # As .gitignore means it; and what is tracked travels, ignored or not.
        name = re.sub(r"([*?\[\]\\])", r"\\\1", path)
        keep_out = f"echo {quoted(f'/{name}')} >> {quoted(root / '.gitignore')}"
        if ask_git(root, "ls-files", "--", f":(literal){path}"):
            keep_out += f"; git -C {quoted(root)} rm -r -q --cached {quoted(path)}"
    else:
        file = root.parent / file.name
    asset = re.sub(r"[^\w.-]+", "-", file.stem).strip(".-") or "data"
    return (
        f"Keep it out of the project: {keep_out}\n"
        "     If the command needs it, the bundle brings it: below `assets:` of the manifest write "
        f"`{asset}: {{path: {json.dumps(str(file), ensure_ascii=False)}}}`, then stage fetch; the "
        f"command finds it in $AIRLIFT_BUNDLE/data/files/{asset}"
    )


def _targets(
    root: Path, linked: Sequence[str], sizes: Mapping[str, int]
) -> tuple[dict[str, str], list[str]]:
    """The targets of the symbolic links, as they travel; and a note on those that lead out.

    A link to what travels leads to the copy. Another leads to the same place as here, where there
    is such a place: on a disk of the cluster.
    """
    top = os.path.realpath(root)
    travels = {*sizes, *linked}
    travels |= {folder.as_posix() for path in travels for folder in PurePosixPath(path).parents}
    links, out = dict[str, str](), []
    for path in linked:
        links[path] = os.path.realpath(root / path)
        if os.path.relpath(links[path], top) in travels:
            links[path] = os.path.relpath(links[path], os.path.realpath((root / path).parent))
        else:
            out.append(f"{printable(path)} -> {printable(links[path])}")
    note = f"links to what stays here, which must be on the cluster: {join_limited(out, _SHOWN)}"
    return links, [note] if out else []


def _unpacked_from(root: Path) -> tuple[RunFolder, Packed] | None:
    """The archive of a folder `work` that `unpack` made; None: it is a folder of the user's."""
    folder = RunFolder(root.parent)
    packed = read_description(folder.packed) if root == folder.work else None
    return None if packed is None else (folder, packed)


def project_of(root: Path) -> Project | None:
    """What travelled, of a folder `work` that `unpack` made; None: it is a folder of the user's."""
    if (found := _unpacked_from(root)) is None:
        return None
    _, packed = found
    files = {path: size for path, (size, _) in packed.files.items()}
    files |= {path: len(os.fsencode(target)) for path, target in packed.links.items()}
    by_name = dict(sorted(files.items()))
    return Project(root, by_name, packed.links, packed.commit, packed.is_dirty, (), ())


def pack(project: Project, archive: Path, description: Path) -> str:
    """Writes the archive, and then its description, without which it does not count.

    The archive is not compressed: gzip takes five times as long as all the rest.

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
    if (found := _unpacked_from(project.root)) is not None:
        # It came whole from another machine; an edit there was never submitted.
        sent, packed = found
        _link_or_copy(sent.project, archive)
        _link_or_copy(sent.packed, description)
        return packed.digest
    partial = archive.with_name(f"{archive.name}.partial")
    files, is_program = dict[str, tuple[int, str]](), dict[str, bool]()
    with tarfile.TarFile(partial, "w", format=tarfile.GNU_FORMAT, **_NAMES) as tar:
        for path, size in project.files.items():
            info, data = tarfile.TarInfo(path), b""
            if path in project.links:
                info.type, info.linkname = tarfile.SYMTYPE, project.links[path]
            else:
                data = _read(project.root / path, info, size)
                files[path] = size, hashlib.sha256(data).hexdigest()
                is_program[path] = info.mode == _PROGRAM
            tar.addfile(info, io.BytesIO(data))
    sync_folder(partial)
    partial.replace(archive)
    sync_folder(archive.parent)
    facts = {"commit": project.commit, "dirty": project.is_dirty, "root": str(project.root)}
    content = {"files": files, "links": project.links}
    digest = hashlib.sha256(json.dumps([content, is_program]).encode()).hexdigest()
    write_json(description, {"format": 1, "digest": digest, **facts, **content})
    return digest


def _link_or_copy(source: Path, target: Path) -> None:
    """Another name for a file that nothing changes; a copy where the disk has no such names."""
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copy2(source, partial)
    partial.replace(target)


def _read(file: Path, info: tarfile.TarInfo, size: int) -> bytes:
    """The bytes of a file, and in `info` what the archive has of it.

    Args:
        size: bytes that it had when it was listed; few enough for the memory.

    Raises:
        IncompleteError: it changed since, or while it is read.
    """
    try:
        before = os.lstat(file)
        data = read_file(file, MOST_OF_ONE_FILE, follow=False)
        after = os.lstat(file)
    except OSError:
        after = None
    if after is None or len(data) != size or before.st_mtime_ns != after.st_mtime_ns:
        raise IncompleteError(
            f"{file} changed while the project was packed.",
            "Save it, and submit again. What a program still writes belongs into .gitignore.",
        )
    info.size, info.mtime = size, int(before.st_mtime)
    info.mode = _PROGRAM if before.st_mode & stat.S_IXUSR else 0o644
    return data


def description_of(folder: RunFolder) -> Path:
    """`project.json` of a run; a sweep has one for all its runs, in its own folder."""
    own = folder.packed
    return own if own.is_file() else folder.root.parent / own.name


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


def is_packed(project: Project, packed: Packed) -> bool:
    """Whether an archive has the same files with the same contents as a project has now.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = {path: size for path, (size, _) in packed.files.items()}
    now = {path: size for path, size in project.files.items() if path not in project.links}
    if sizes != now or packed.links != project.links:
        return False
    return _has_contents(project.root, packed)


def _has_contents(folder: Path, packed: Packed) -> bool:
    return all(
        hash_file(folder / path).sha256 == sha256 for path, (_, sha256) in packed.files.items()
    )


def unpack(archive: Path, description: Path, work: Path, *, goes_on: bool = False) -> list[str]:
    """Makes the working folder from the archive, whole or not at all.

    A working folder of the same project stays as it is; one of another is set aside.

    Args:
        work: what its project was is kept beside it, in `work.json`.
        goes_on: what the command wrote beside another project stays in the working folder: a fault
            was corrected, and the command goes on from its checkpoints.

    Returns:
        Lines to print.

    Raises:
        DamageError: the archive is not what its description says, or is none of ours.
        OSError: the disk is full, for example.
    """
    packed = read_description(description)
    mark, carried = work.with_name(f"{work.name}.json"), work.with_name("carried.json")
    before = read_description(mark)
    if packed and work.is_dir() and before and before.digest == packed.digest:
        return _carry_results(work, carried)
    partial = work.with_name(f"{work.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if packed is None:
            raise ValueError(f"{description.name} cannot be read")
        _extract(archive, packed, partial)
    except (tarfile.TarError, ValueError, FileNotFoundError) as error:
        raise DamageError(
            f"{archive}: the project of the run is damaged: {error}.",
            "Submit the run again from the project: that packs it anew.",
        ) from None
    # A node that loses power now must not leave files without bytes in a folder that seems whole.
    sync_disk(partial)
    count = human_count(len(packed.files), "file")
    lines = [f"the project is in {work}: {count}, digest {packed.digest[:12]}"]
    if os.path.lexists(work):
        aside = set_earlier_work_aside(work)
        lines.insert(0, f"the project has changed; what was in {work} is now in {aside}")
        if goes_on and before:
            write_json(carried, {"from": aside.name, "project": list(before.files)})
    write_atomically(mark, description.read_bytes())
    partial.replace(work)
    sync_folder(work.parent)
    return [*lines, *_carry_results(work, carried)]


def unpack_sent(root: Path) -> list[str]:
    """Unpacks a project that another machine has sent into a folder; returns lines to print.

    Raises:
        DamageError: as for `unpack`.
        UsageError: what is unpacked there already was changed since.
    """
    folder = RunFolder(root.absolute())
    sent, packed = project_of(folder.work), read_description(folder.packed)
    if sent and packed and folder.work.is_dir():
        try:
            is_same = is_packed(sent, packed)
        except OSError:
            is_same = False
        if not is_same:
            raise UsageError(
                f"{folder.work}: it is not the project that was sent: a file was changed there.",
                f"Remove it there, and run the same command again: rm -r {quoted(folder.work)}",
            )
    return unpack(folder.project, folder.packed, folder.work)


def _carry_results(work: Path, carried: Path) -> list[str]:
    """Moves what the command wrote beside an earlier project into the working folder.

    `carried.json` is there until all is moved: the next start goes on with it.
    """
    found = read_json(carried)
    if found is None:
        return []
    earlier, project, moved = work.with_name(found["from"]), {*found["project"]}, 0
    for path in [*earlier.rglob("*")]:
        name = path.relative_to(earlier)
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and str(name) not in project and not os.path.lexists(work / name):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(work / name)
            moved += 1
    carried.unlink()
    return [f"{human_count(moved, 'file')} that the command wrote before are in {work}: it goes on"]


def _extract(archive: Path, packed: Packed, folder: Path) -> None:
    """Writes what the description names, nothing else of the archive, into a new folder.

    A run folder can be another person's copy. So no name may lead out of the folder, or through a
    link, and no file is written over another.

    Raises:
        ValueError, FileNotFoundError, tarfile.TarError: the archive is not ours.
    """
    folder.mkdir(parents=True)
    names = {*packed.files, *packed.links}
    for name in names:
        path = PurePosixPath(name)
        is_plain = str(path) == name != "." and not path.is_absolute() and ".." not in path.parts
        if not is_plain or any(str(above) in names for above in path.parents):
            raise ValueError(f"it has the name {printable(name)}")
    with tarfile.TarFile(archive, **_NAMES) as tar:
        sizes = {info.name: info.size for info in tar if info.isreg()}
        links = {info.name: info.linkname for info in tar if info.issym()}
        if (
            sizes != {path: size for path, (size, _) in packed.files.items()}
            or links != packed.links
            or len(tar.getmembers()) != len(names)
        ):
            raise ValueError("it has other files than were packed")
        # What a filter of Python would refuse is checked above; it refuses links to other disks.
        tar.extraction_filter = lambda info, folder: info
        tar.extractall(folder)
    if not _has_contents(folder, packed):
        raise ValueError("its files are not those that were packed")


def set_earlier_work_aside(work: Path) -> Path:
    """Renames a working folder to the first free of `work-1`, `work-2`, ...; returns that."""
    number = 1
    while os.path.lexists(aside := work.with_name(f"{work.name}-{number}")):
        number += 1
    work.rename(aside)
    return aside
