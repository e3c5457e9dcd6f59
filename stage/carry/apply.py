"""Applies a patch to a bundle: builds new files, moves them into place, verifies.

New files are built and compared with the lock in `workshop.partial` of the bundle before anything
else in it is touched. Each then gets its place by one rename, the tag manifest last. Killed at any
moment, the same command goes on with the files that are built or in place.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stage.bundle import bundle as layout
from stage.bundle.bundle import check_is_bundle
from stage.bundle.receipt import record, wait_until_at_rest
from stage.bundle.report import format_findings
from stage.bundle.verifier import state_folder, suggest_fixes
from stage.bundle.verifier_adapter import verify
from stage.carry.patch import FORMAT, TAGS, PatchPlan
from stage.digests import MismatchError, sha256_of_bytes
from stage.download.partial_file import copy_verified
from stage.errors import (
    DamageError,
    IncompleteError,
    PolicyError,
    UsageError,
    about,
    quoted,
    suggest_path,
)
from stage.files import (
    check_writable,
    human_count,
    human_size,
    read_file,
    sync_disk,
    sync_folder,
)
from stage.lock.document import DocumentReader, read_document
from stage.lock.model import LockedFile
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from stage.paths import printable
from stage.progress import Reporter
from stage.staging.working_folder import WORKSHOP, WorkFolder, alone_in

_SHOWN = 20  # lines on what is left
_REMEDY = "Give the folder that `stage patch -o` wrote."


@dataclass(frozen=True)
class ApplyOutcome:
    """What an apply changed: payload files, files beside the payload; and the new bundle id."""

    bundle_id: str
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    beside: tuple[str, ...]


@dataclass(frozen=True)
class _Patch:
    """A patch on disk.

    Attributes:
        base: the id of the bundle that it is for.
        lock: of the bundle that it makes.
        tags: the files beside the payload of that bundle.
        contents: sha256 of each payload file that it carries -> its path in the patch.
    """

    root: Path
    base: str
    lock: Lockfile
    tags: dict[str, bytes]
    contents: dict[str, Path]


def apply(root: Path, folder: Path, reporter: Reporter) -> ApplyOutcome:
    """Applies the patch in a folder.

    Raises:
        UsageError: no bundle, no patch, or a patch for another bundle.
        DamageError: the patch is damaged, or the bundle has damage that the patch does not repair.
        IncompleteError: no space.
        PolicyError: a link or a folder with files is in the place of a file.
    """
    _check_order(root, folder)
    check_is_bundle(root)
    check_writable(root)
    patch = _open(folder)
    with alone_in(root):
        return _Apply(root, patch, reporter).run()


def _check_order(root: Path, patch: Path) -> None:
    """Checks that bundle and patch are given in this order.

    Raises:
        UsageError: they are not.
    """
    if not layout.holds_bundle(patch):
        return
    if (root / layout.PATCH_PLAN).is_file():
        raise UsageError(
            f"{root} is a patch and {patch} a bundle: the bundle goes first.",
            shlex.join(["stage", "apply", str(patch), str(root)]),
        )
    raise UsageError(
        f"{patch}: a bundle, not a patch.",
        f"Give the folder that `stage patch -o` wrote: stage apply {quoted(root)} PATCH",
    )


def _open(root: Path) -> _Patch:
    """Opens a patch. Compares the files beside the payload with their tag manifest.

    Raises:
        UsageError: no patch there.
        DamageError: it is not as it was written.
    """
    plan = root / layout.PATCH_PLAN
    if not plan.exists():
        raise UsageError(
            f"{root}: no patch: there is no {layout.PATCH_PLAN}.", suggest_path(root, _REMEDY)
        )
    try:
        found = {
            name: read_file(root / name)
            for name in (layout.TAG_MANIFEST, layout.PATCH_PLAN, layout.MANIFEST)
        }
        names = layout.parse_manifest(found[layout.MANIFEST])
        carried = [f"data/{name}" for name in TAGS if f"data/{name}" in names]
        found |= {name: read_file(root / name) for name in carried}
    except OSError as error:
        raise _damaged(Path(error.filename or root), error.strerror or "not readable") from None
    recorded = layout.parse_manifest(found.get(f"data/{layout.TAG_MANIFEST}", b""))
    digests = layout.parse_manifest(found[layout.TAG_MANIFEST]) | names
    digests |= {f"data/{name}": digest for name, digest in recorded.items()}
    required = [name for name in TAGS if name not in (layout.SIGNATURE, layout.VERIFIER)]
    needed = (layout.PATCH_PLAN, layout.MANIFEST, *(f"data/{name}" for name in required))
    for name in (*needed, *carried):
        if sha256_of_bytes(found.get(name, b"")) != digests.get(name):
            raise _damaged(root / name, "not the sha256 that its manifest has")
    with about(str(plan)):
        document = read_document(found[layout.PATCH_PLAN], str(plan), "a patch", (FORMAT,), _REMEDY)
        with about("not a patch"):
            base = DocumentReader(_REMEDY).read(PatchPlan, document).base
    tags = {name: found[f"data/{name}"] for name in TAGS if f"data/{name}" in found}
    lock = read_lock(tags[layout.LOCK], str(root / "data" / layout.LOCK))
    contents = {
        str(file.sha256): root / "data" / file.path
        for file in lock.files
        if f"data/{file.path}" in names
    }
    return _Patch(root, base, lock, tags, contents)


def _damaged(path: Path, what: str) -> DamageError:
    return DamageError(
        f"{path}: the patch is damaged here ({what}). The bundle was not touched.",
        "Copy the patch again: rsync -c.",
    )


class _Apply:
    """One run of `apply`."""

    def __init__(self, root: Path, patch: _Patch, reporter: Reporter) -> None:
        self.root, self.patch, self.reporter = root, patch, reporter
        self.work = root / WORKSHOP
        self.is_update = patch.base != patch.lock.id
        had = self._files_here()
        self.known = {file.path: file.sha256 for file in had}
        self.sources = {str(file.sha256): root / file.path for file in had} | patch.contents
        # A repair leaves alone what else is in the folder. Only an update looks for stale files.
        self.folder = WorkFolder.inspect(root) if self.is_update else WorkFolder(root)
        self.wanted = {file.path for file in patch.lock.files}
        self.stale = self.folder.stale(self.wanted)

    def _files_here(self) -> tuple[LockedFile, ...]:
        """The files of the bundle that is here, as its lock has them; none if that is damaged.

        Raises:
            UsageError: the patch is for another bundle; also where the lock is damaged.
        """
        lock, info = (
            read_file(self.root / name) if (self.root / name).is_file() else b""
            for name in (layout.LOCK, layout.BAG_INFO)
        )
        bundle_id, base = sha256_of_bytes(lock) if lock else "no lock", self.patch.base
        if bundle_id in (base, self.patch.lock.id):
            return tuple(read_lock(lock, str(self.root / layout.LOCK)).files)
        if f"External-Identifier: sha256:{base}".encode() in info.splitlines():
            return ()
        raise UsageError(
            f"{self.root}: the patch is for another bundle: it needs id {base}, this one has "
            f"{bundle_id}.",
            f"stage verify {quoted(self.root)} prints the id of this bundle; make a patch for it "
            "with stage patch.",
        )

    def run(self) -> ApplyOutcome:
        """Builds, puts in place, verifies."""
        patch, folder = self.patch, self.folder
        tags = [name for name, text in patch.tags.items() if not _has_text(self.root / name, text)]
        todo = [file for file in patch.lock.files if self._is_needed(file)]
        for path in (*(file.path for file in todo), *tags, *layout.SEAL, f"{WORKSHOP}/x"):
            self._check_place(path)
        self._build_all(todo, tags)
        sync_disk(self.root)
        folder.drop(())  # of empty folders one may be in the place of a file
        is_other_seal = layout.TAG_MANIFEST in tags
        if self.is_update and is_other_seal:
            folder.mark_unfinished(self.wanted)
        folder.drop(self.stale)
        last = (layout.LOCK, *layout.SEAL)
        for path in [file.path for file in todo] + [name for name in tags if name not in last]:
            folder.put(path, self.work / path)
        sync_disk(self.root)  # the seal says that all else is on the disk
        if is_other_seal and layout.SIGNATURE not in patch.tags:
            (self.root / layout.SIGNATURE).unlink(missing_ok=True)
        for name in last:
            if name in tags:
                folder.put(name, self.work / name)
        shutil.rmtree(self.work, ignore_errors=True)
        (self.root / layout.FETCH_PARTIAL).unlink(missing_ok=True)
        sync_folder(self.root)
        self._check_sound()
        changed = tuple(file.path for file in todo)
        return ApplyOutcome(patch.lock.id, changed, tuple(sorted(self.stale)), tuple(tags))

    def _is_needed(self, file: LockedFile) -> bool:
        """Whether a file is not in its place, and this patch brings it there."""
        path = self.root / file.path
        is_carried = file.sha256 in self.patch.contents
        if not self.is_update and not is_carried:
            return False
        if not _is_regular(path) or path.stat().st_size != file.size:
            return True
        is_suspect = is_carried or self.known.get(file.path) != file.sha256
        return is_suspect and not _is_right(path, file)

    def _check_place(self, path: str) -> None:
        """Checks that a file can come to this path.

        Raises:
            PolicyError: a link or file is above it, or a folder with files in its place.
        """
        at = self.root
        for part in Path(path).parent.parts:
            at = at / part
            is_stale = at.relative_to(self.root).as_posix() in self.stale
            if os.path.lexists(at) and not _is_folder(at) and not is_stale:
                raise PolicyError(
                    f"{printable(str(at))}: a link or file stands where a folder has to be. "
                    "The bundle is unchanged.",
                    "Remove it.",
                )
        place = self.root / path
        for found in place.rglob("*") if _is_folder(place) else ():
            if not _is_folder(found) and found.relative_to(self.root).as_posix() not in self.stale:
                raise PolicyError(
                    f"{printable(str(place))}: a folder with files is in the place of a file. "
                    "The bundle is unchanged.",
                    f"Move it out of the bundle: mv {shlex.quote(str(place))} ELSEWHERE",
                )

    def _build_all(self, todo: list[LockedFile], tags: list[str]) -> None:
        """Writes all new files into the workshop. Where that fails, the bundle is unchanged."""
        if not _holds_files_alone(self.work):  # nothing is ever written through a link
            shutil.rmtree(self.work)
        self.work.mkdir(exist_ok=True)
        try:
            missing = sum(f.size for f in todo if not _is_regular(self.work / f.path))
            free = shutil.disk_usage(self.root).free
            if missing > free:
                raise IncompleteError(
                    f"{self.root}: {human_size(missing)} are needed in it and {human_size(free)} "
                    "are free. The bundle is unchanged.",
                    f"Free {human_size(missing - free)} there, then run again.",
                )
            with self.reporter.bytes_bar("apply", sum(file.size for file in todo)) as progress:
                for file in todo:
                    self._build(file, progress)
            for name in tags:
                (self.work / name).write_bytes(self.patch.tags[name])
        except (DamageError, IncompleteError):
            shutil.rmtree(self.work)
            raise

    def _build(self, file: LockedFile, progress: Callable[[int], None]) -> None:
        """Writes one new file, and compares it with the lock."""
        target = self.work / file.path
        if _is_regular(target) and _is_right(target, file):
            progress(file.size)
            return
        source = self.sources.get(str(file.sha256), Path(os.devnull))
        if _is_regular(source) and source.stat().st_size == file.size:
            with suppress(MismatchError):
                copy_verified(source, target, file.expected, progress)
                return
        if self.patch.root in source.parents:
            raise _damaged(source, "not the file that its lock has")
        raise DamageError(
            f"{file.path}: the patch needs a file of the old bundle that is missing or damaged. "
            "The bundle is unchanged.",
            f"stage verify {quoted(self.root)} --report FILE, and repair it with stage patch "
            "--report FILE before the update.",
        )

    def _check_sound(self) -> None:
        state = state_folder(os.environ)
        wait_until_at_rest(self.root)  # else its receipt would not be kept
        with self.reporter.bytes_bar("verify", self.patch.lock.size) as progress:
            report = verify(
                self.root, "full", state=state, progress=progress, bundle_id=self.patch.lock.id
            )
        with suppress(OSError):  # without a record the verdict is only not remembered
            if why_not := record(state, report):
                self.reporter.note(why_not)
        if report.ok:
            return
        lines = list(format_findings(report))
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in lines[:_SHOWN]) + more
        what = f"the patch is in place; {human_count(len(report.findings), 'finding')} left"
        if not report.to_carry:
            what = "with the patch every byte of the bundle is sound; no patch repairs the rest"
        advice = [*suggest_fixes(report, None), f"Then: stage verify {quoted(self.root)}"]
        raise DamageError(f"{self.root}: {what}:{listed}", "\n     ".join(advice))


def _holds_files_alone(folder: Path) -> bool:
    """Whether nothing below a folder is a link or a special file; it may not exist yet."""
    inside = (Path(top, name) for top, dirs, files in os.walk(folder) for name in (*dirs, *files))
    return all(_is_folder(path) or _is_regular(path) for path in inside)


def _is_folder(path: Path) -> bool:
    """Whether a folder lies there, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_regular(path: Path) -> bool:
    """Whether a regular file lies there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _is_right(path: Path, file: LockedFile) -> bool:
    try:
        file.expected.verify(path)
    except (MismatchError, OSError):
        return False
    return True


def _has_text(path: Path, text: bytes) -> bool:
    return _is_regular(path) and read_file(path) == text
