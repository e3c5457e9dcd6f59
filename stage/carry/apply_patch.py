"""Applies a patch to a bundle: checks it, builds new files beside the bundle, moves them, verifies.

Nothing in the bundle is touched before every new file is built and has the right sha256. Each file
then gets its place by one rename. Until all files have their places, new files are in
`<bundle>.apply.partial`. So an interrupted `apply` resumes.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stage.bundle import bundle as layout
from stage.bundle.advice import format_findings, is_for_a_patch, suggest_fixes
from stage.bundle.bundle import check_is_bundle
from stage.bundle.receipt import record, state_folder, wait_until_at_rest
from stage.bundle.verify import verify
from stage.carry.apply_staging import (
    ApplyStaging,
    check_no_folders,
    is_regular,
    make_real_folder,
    place_beside,
    remove_empty,
)
from stage.carry.patch import Patch, PatchPlan, check_contents, open_patch
from stage.digests import hash_file, sha256_of_bytes
from stage.download.partial_file import copy_hashed
from stage.errors import DamageError, IncompleteError, UsageError
from stage.files import (
    check_writable,
    human_count,
    human_size,
    read_file,
    sync_disk,
    sync_folder,
    write_atomically,
)
from stage.lock.model import LockedFile
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from stage.paths import PARTIAL_SUFFIX, printable
from stage.progress import Reporter
from stage.staging.working_folder import WorkFolder, alone_in

_SHOWN = 20  # lines on what is left


@dataclass(frozen=True)
class ApplyOutcome:
    """What an apply changed: payload files, files beside the payload; and the new bundle id."""

    bundle_id: str
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    beside: tuple[str, ...]


def apply(root: Path, folder: Path, reporter: Reporter) -> ApplyOutcome:
    """Applies the patch in a folder.

    Raises:
        UsageError: no bundle, no patch, a patch for another bundle, or a bundle that is a mount
            point.
        DamageError: the patch is damaged, or the bundle has damage that the patch does not repair.
        IncompleteError: no space.
        PolicyError: a link or a folder with files is in the place of a file.
    """
    _check_not_swapped(root, folder)
    check_is_bundle(root)
    for writable in (root, place_beside(root).parent):  # new files wait beside the bundle
        check_writable(writable)
    patch = open_patch(folder)
    with alone_in(root):
        _check_base(root, patch.plan)
        with reporter.bytes_bar("check patch", patch.plan.size) as progress:
            check_contents(patch, progress)
        store = ApplyStaging(root, patch)
        outcome = _Apply(root, patch, store, reporter).run()
        store.remove()
        return outcome


def _check_not_swapped(root: Path, patch: Path) -> None:
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
        f"Give the folder that `stage patch -o` wrote: stage apply {root} PATCH",
    )


def _check_base(root: Path, plan: PatchPlan) -> None:
    """Checks that the patch is for this bundle, even if its lock is damaged.

    Raises:
        UsageError: it is for another.
    """
    found, info = (
        read_file(root / name) if (root / name).is_file() else b""
        for name in (layout.LOCK, layout.BAG_INFO)
    )
    bundle_id = sha256_of_bytes(found)
    if bundle_id in (plan.base, plan.target):
        return
    repairs_lock = plan.kind == "repair" and layout.LOCK in plan.tags
    if repairs_lock and f"External-Identifier: sha256:{plan.base}".encode() in info.split(b"\n"):
        return
    has = bundle_id if found else "no lock"
    raise UsageError(
        f"{root}: the patch is for another bundle: it needs id {plan.base}, this one has {has}.",
        f"stage verify {root} prints the id of this bundle; make a patch for it with stage patch.",
    )


class _Apply:
    """One run of `apply`."""

    def __init__(self, root: Path, patch: Patch, store: ApplyStaging, reporter: Reporter) -> None:
        self.root, self.patch, self.store, self.reporter = root, patch, store, reporter
        self.plan = patch.plan
        self.here = self._lock_here()
        self.lock = self._target_lock()
        self._moved: set[str] = set()

    def _lock_here(self) -> Lockfile | None:
        """The lock in the bundle, if it is one of the two that the patch knows."""
        path = self.root / layout.LOCK
        data = read_file(path) if path.is_file() else b""
        known = sha256_of_bytes(data) in (self.plan.base, self.plan.target)
        return read_lock(data, str(path)) if known else None

    def _target_lock(self) -> Lockfile:
        if self.here is not None and self.plan.target == self.here.id:
            return self.here
        lock = (
            read_lock(self.store.tag(layout.LOCK), "the patch's lock")
            if layout.LOCK in self.plan.tags
            else None
        )
        if lock is None or lock.id != self.plan.target:
            raise UsageError(
                "The patch does not contain the lock it is for.",
                "Make it again with `stage patch`.",
            )
        return lock

    def run(self) -> ApplyOutcome:
        """Builds, puts in place, verifies."""
        for path in self.plan.tags:
            if path not in (*layout.TAG_FILES, *layout.SEAL):
                raise UsageError(
                    f"{printable(path)}: the patch has a file that no bundle has.",
                    "Make the patch again: stage patch.",
                )
        folder = WorkFolder.inspect(self.root) if self.plan.kind == "update" else None
        stale = folder.stale({file.path for file in self.lock.files}) if folder else []
        todo = [file for file in self._wanted() if not self._is_in_place(file)]
        check_no_folders(
            self.root, {*(file.path for file in todo), *self.plan.tags, *layout.SEAL}, set(stale)
        )
        self._check_space(todo)
        with self.reporter.bytes_bar("apply", sum(file.size for file in todo)) as progress:
            for file in todo:
                self._build(file, progress)
        sync_disk(self.root)
        for name in layout.SEAL:
            remove_empty(self.root / name)
        if folder is not None and not self._is_sealed_target():
            folder.mark_unfinished({file.path for file in self.lock.files})
            folder.remove(stale)
        for file in todo:
            self._put_in_place(file)
        beside = self._write_tags()
        (self.root / layout.FETCH_PARTIAL).unlink(missing_ok=True)
        self._check_sound()
        return ApplyOutcome(
            self.lock.id,
            tuple(file.path for file in todo),
            tuple(sorted(stale)),
            beside,
        )

    def _is_sealed_target(self) -> bool:
        seal = self.root / layout.TAG_MANIFEST
        return seal.is_file() and sha256_of_bytes(seal.read_bytes()) == self.plan.tags.get(
            layout.TAG_MANIFEST
        )

    def _wanted(self) -> list[LockedFile]:
        """Files that may have to change: named in the plan, or new at their path in the update."""
        files = {file.path: file for file in self.lock.files}
        if self.plan.kind == "repair":
            if unknown := [path for path in self.plan.repair if path not in files]:
                raise UsageError(
                    f"{unknown[0]}: the patch repairs a file that the bundle does not have.",
                    "Make the patch again: stage patch.",
                )
            return [files[path] for path in self.plan.repair]
        had = {file.path: file.sha256 for file in self.here.files} if self.here else {}
        kept = [
            path
            for path in files
            if had.get(path) == files[path].sha256 and (self.root / path).is_file()
        ]
        return [file for path, file in files.items() if path not in kept or self.here is self.lock]

    def _is_in_place(self, file: LockedFile) -> bool:
        """Whether an earlier run placed it."""
        path = self.root / file.path
        if not is_regular(path) or path.stat().st_size != file.size:
            return False
        try:
            return hash_file(path).sha256 == file.sha256
        except OSError:
            return False

    def _check_space(self, todo: list[LockedFile]) -> None:
        needed = sum(file.size for file in todo if not self.store.built(file.path).exists())
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise IncompleteError(
                f"{self.root}: {human_size(needed)} are needed beside it and {human_size(free)} "
                "are free. The bundle is unchanged.",
                f"Free {human_size(needed - free)} there, then run again.",
            )

    def _build(self, file: LockedFile, progress: Callable[[int], None]) -> None:
        """Writes the new file beside the bundle, and compares it with the lock."""
        target = self.store.built(file.path)
        if target.is_file() and hash_file(target).sha256 == file.sha256:
            progress(file.size)
            return
        target.unlink(missing_ok=True)
        if file.sha256 in self.plan.contents:
            source = self.patch.path_of(str(file.sha256))
        else:
            source = self.root / self._same_content(file)
            if (
                source not in self._kept_sources()
                and str(source) not in self._moved
                and _link(source, target)
            ):
                self._moved.add(str(source))  # only once: a second link would stay forever
                progress(file.size)
                return
        found = copy_hashed(source, target, file.size, progress).sha256
        if found != file.sha256:
            raise DamageError(
                f"{source}: changed while it was read: its sha256 is {found}, not {file.sha256}. "
                "The bundle is unchanged.",
                "Run it again.",
            )

    def _kept_sources(self) -> set[Path]:
        """Old files that keep their path: a link to one would make two files of the bundle one."""
        had = {file.path: file.sha256 for file in self.here.files} if self.here else {}
        return {self.root / f.path for f in self.lock.files if had.get(f.path) == f.sha256}

    def _same_content(self, file: LockedFile) -> str:
        """A path of the old bundle whose file has the same bytes."""
        for old in self.here.files if self.here else ():
            path = self.root / old.path
            if (
                old.sha256 == file.sha256
                and is_regular(path)
                and hash_file(path).sha256 == file.sha256
            ):
                return old.path
        raise DamageError(
            f"{file.path}: the patch needs a file of the old bundle that is missing or damaged. "
            "The bundle is unchanged.",
            f"stage verify {self.root} --report FILE, and repair it with stage patch --report FILE "
            "before the update.",
        )

    def _put_in_place(self, file: LockedFile) -> None:
        target = self.root / file.path
        make_real_folder(self.root, target.parent)
        remove_empty(target)
        self.store.built(file.path).replace(target)
        sync_folder(target.parent)

    def _write_tags(self) -> tuple[str, ...]:
        """Writes the files beside the payload; the tag manifest last, and only its own signature.

        Returns:
            The paths that changed.
        """
        tags = self.plan.tags
        last = (layout.LOCK, layout.SIGNATURE, layout.TAG_MANIFEST)
        unsigned = layout.TAG_MANIFEST in tags and layout.SIGNATURE not in tags
        if unsigned and not self._is_sealed_target():
            (self.root / layout.SIGNATURE).unlink(missing_ok=True)
        changed = []
        for path in [*sorted(set(tags) - set(last)), *(path for path in last if path in tags)]:
            if (
                not is_regular(self.root / path)
                or sha256_of_bytes(read_file(self.root / path)) != tags[path]
            ):
                changed.append(path)
            make_real_folder(self.root, (self.root / path).parent)
            remove_empty(self.root / path)
            write_atomically(self.root / path, self.store.tag(path))
            for left in (self.root / path).parent.glob(f"{Path(path).name}.*{PARTIAL_SUFFIX}"):
                left.unlink()  # of an apply that was killed just here
        return tuple(changed)

    def _check_sound(self) -> None:
        wait_until_at_rest(self.root)  # else its receipt would not be kept
        with self.reporter.bytes_bar("verify", self.lock.size) as progress:
            report = verify(self.root, "full", progress=progress, bundle_id=self.plan.target)
        with suppress(OSError):  # without a record the verdict is only not remembered
            if why_not := record(state_folder(os.environ), report):
                self.reporter.note(why_not)
        if report.ok and report.bundle_id == self.plan.target:
            return
        lines = list(format_findings(report))
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in lines[:_SHOWN]) + more
        advice = "\n     ".join([*suggest_fixes(report, None), f"Then: stage verify {self.root}"])
        if report.bundle_id == self.plan.target and not is_for_a_patch(report):
            self.store.remove()
            raise DamageError(
                f"{self.root}: with the patch every byte of the bundle is sound; no patch repairs "
                f"the rest:{listed}",
                advice,
            )
        left = human_count(len(report.findings), "finding")
        raise DamageError(f"{self.root}: the patch is in place; {left} left:{listed}", advice)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this disk: copy
        return False
    return True
