"""Applies a patch to a bundle: checks it, builds what changes beside the bundle, puts it in place, verifies.

Nothing in the bundle is touched before every new file is built and its sha256 is right; each then takes its place by
one rename. Until all of it is done, what is built waits in `<bundle>.apply.partial`, so an interrupted `apply` goes on
where it stopped, and volumes of a patch can come one by one, in any order.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from stage import bundle as layout
from stage.applystore import CHUNK, Store, place_beside
from stage.asset import LockedFile
from stage.bundle import require_bundle
from stage.digest import hash_file, sha256_of_bytes
from stage.disk import human_count, human_size, read_file, require_writable, sync_folder, write_atomically
from stage.errors import DamageError, IncompleteError, UsageError
from stage.lockfile import Lockfile
from stage.lockreader import read_lock
from stage.names import PARTIAL_SUFFIX, printable
from stage.patchfile import Content, Plan, check_pieces, find_volumes
from stage.places import is_regular, make_real_folder, refuse_folders, remove_empty
from stage.progress import Reporter
from stage.told import is_for_a_patch, lines, what_to_do
from stage.verify import verify
from stage.workfolder import WorkFolder, alone_in

_SHOWN = 20  # lines on what is left


@dataclass(frozen=True)
class ApplyOutcome:
    """What an apply changed: payload files put in place and removed, files beside them; the bundle id it has now."""

    bundle: Path
    kind: str
    bundle_id: str
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    beside: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "bundle": str(self.bundle),
            "kind": self.kind,
            "bundle_id": self.bundle_id,
            "changed": list(self.changed),
            "removed": list(self.removed),
            "beside": list(self.beside),
        }


def apply(root: Path, paths: list[Path], reporter: Reporter) -> ApplyOutcome:
    """Applies a patch whose volumes lie at `paths`, or some of them.

    Raises:
        UsageError: no bundle, no patch, a patch for another bundle, or a bundle that is a mount point.
        DamageError: the patch is damaged; or the bundle has damage that the patch does not mend.
        IncompleteError: volumes are missing (those given are kept), or no space.
        PolicyError: a link, or a folder with something in it, stands where a file has to be written.
    """
    _refuse_swapped(root, paths)
    require_bundle(root)
    for folder in (root, place_beside(root).parent):  # what is built waits beside the bundle
        require_writable(folder)
    volumes = find_volumes(paths)
    with alone_in(root):
        plan = volumes[0].plan
        _require_base(root, plan)
        with reporter.bytes_bar("check patch", plan.size) as progress:
            for volume in volumes:
                check_pieces(volume, progress)
        store = Store(root, plan, volumes)
        store.require_all_volumes()
        outcome = _Apply(root, plan, store, reporter).run()
        store.remove()
        return outcome


def _refuse_swapped(root: Path, paths: list[Path]) -> None:
    """Patch and bundle in each other's place.

    Raises:
        UsageError: they are.
    """
    bundles = [path for path in paths if layout.holds_bundle(path)]
    if not bundles:
        return
    if (root / layout.PATCH_PLAN).is_file() or any(root.glob(f"*/{layout.PATCH_PLAN}")):
        patches = [root, *(path for path in paths if path != bundles[0])]
        raise UsageError(
            f"{root} is a patch and {bundles[0]} a bundle: the bundle goes first.",
            shlex.join(["stage", "apply", str(bundles[0]), *map(str, patches)]),
        )
    raise UsageError(
        f"{bundles[0]}: a bundle, not a patch.", f"Give what `stage patch -o` wrote: stage apply {root} PATCH"
    )


def _require_base(root: Path, plan: Plan) -> None:
    """Refuses a patch for another bundle, even where the lock is too damaged to say which this is.

    Raises:
        UsageError: it is for another.
    """
    found, info = (
        read_file(root / name) if (root / name).is_file() else b"" for name in (layout.LOCK, layout.BAG_INFO)
    )
    bundle_id = sha256_of_bytes(found)
    if bundle_id in (plan.base, plan.target):
        return
    mends_lock = plan.kind == "repair" and layout.LOCK in plan.tags
    if mends_lock and f"External-Identifier: sha256:{plan.base}".encode() in info.split(b"\n"):
        return
    has = bundle_id if found else "no lock"
    raise UsageError(
        f"{root}: the patch is for another bundle: it needs id {plan.base}, this one has {has}.",
        f"stage verify {root} tells what this bundle is; make a patch for it with stage patch.",
    )


class _Apply:
    """One run of `apply`, with all volumes at hand."""

    def __init__(self, root: Path, plan: Plan, store: Store, reporter: Reporter) -> None:
        self.root, self.plan, self.store, self.reporter = root, plan, store, reporter
        self.here = self._lock_here()
        self.lock = self._target_lock()
        self._moved: set[str] = set()

    def _lock_here(self) -> Lockfile | None:
        """The lock that lies in the bundle, if it is one of the two the patch knows."""
        path = self.root / layout.LOCK
        data = read_file(path) if path.is_file() else b""
        known = sha256_of_bytes(data) in (self.plan.base, self.plan.target)
        return read_lock(data, str(path)) if known else None

    def _target_lock(self) -> Lockfile:
        if self.here is not None and self.plan.target == self.here.id:
            return self.here
        lock = read_lock(self.store.tag(layout.LOCK), "the patch's lock") if layout.LOCK in self.plan.tags else None
        if lock is None or lock.id != self.plan.target:
            raise UsageError("The patch has not the lock it is for.", "Make it anew with `stage patch`.")
        return lock

    def run(self) -> ApplyOutcome:
        """Builds, puts in place, verifies."""
        for path in self.plan.tags:
            if path not in layout.tag_paths(self.lock) | {*layout.SEAL}:
                raise UsageError(f"{printable(path)}: the patch has a file that no bundle has.", "Make it anew.")
        folder = WorkFolder.inspect(self.root) if self.plan.kind == "update" else None
        stale = folder.stale({file.path for file in self.lock.files}) if folder else []
        todo = [file for file in self._wanted() if not self._is_in_place(file)]
        refuse_folders(self.root, {*(file.path for file in todo), *self.plan.tags, *layout.SEAL}, set(stale))
        self._require_space(todo)
        with self.reporter.bytes_bar("apply", sum(file.size for file in todo)) as progress:
            for file in todo:
                self._build(file, progress)
        for name in layout.SEAL:
            remove_empty(self.root / name)
        if folder is not None and not self._is_sealed_target():
            folder.mark_unfinished({file.path for file in self.lock.files})
            folder.remove([*stale, *folder.stale_blocks(layout.tag_paths(self.lock))])
        for file in todo:
            self._put_in_place(file)
        beside = self._write_tags()
        (self.root / layout.JOURNAL).unlink(missing_ok=True)
        self._require_sound()
        return ApplyOutcome(
            self.root, self.plan.kind, self.lock.id, tuple(file.path for file in todo), tuple(sorted(stale)), beside
        )

    def _is_sealed_target(self) -> bool:
        seal = self.root / layout.TAG_MANIFEST
        return seal.is_file() and sha256_of_bytes(seal.read_bytes()) == self.plan.tags.get(layout.TAG_MANIFEST)

    def _wanted(self) -> list[LockedFile]:
        """Files that may have to change: those named, or those whose content the old bundle had not at that path."""
        files = {file.path: file for file in self.lock.files}
        if self.plan.kind == "repair":
            if unknown := [path for path in self.plan.repair if path not in files]:
                raise UsageError(f"{unknown[0]}: the patch mends a file the bundle has not.", "Make it anew.")
            return [files[path] for path in self.plan.repair]
        had = {file.path: file.sha256 for file in self.here.files} if self.here else {}
        kept = [path for path in files if had.get(path) == files[path].sha256 and (self.root / path).is_file()]
        return [file for path, file in files.items() if path not in kept or self.here is self.lock]

    def _is_in_place(self, file: LockedFile) -> bool:
        """Whether an earlier run got this far. Of a large file only the blocks that the patch mends are read."""
        path = self.root / file.path
        if not is_regular(path) or path.stat().st_size != file.size:
            return False
        content = self.plan.contents.get(str(file.sha256))
        try:
            if content is None or content.is_whole:
                return hash_file(path).sha256 == file.sha256
            with open(path, "rb", buffering=0) as source:
                return all(_hash_of(source.fileno(), p.start, p.end) == p.sha256 for p in content.pieces)
        except OSError:
            return False

    def _require_space(self, todo: list[LockedFile]) -> None:
        needed = sum(file.size for file in todo if not self.store.built(file.path).exists())
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise IncompleteError(
                f"{self.root}: {human_size(needed)} are needed beside it and {human_size(free)} are free. "
                "The bundle is as it was.",
                f"Free {human_size(needed - free)} there, then run again.",
            )

    def _build(self, file: LockedFile, progress: Callable[[int], None]) -> None:
        """Makes the new file, whole and proven, in the store."""
        target = self.store.built(file.path)
        if target.is_file() and hash_file(target).sha256 == file.sha256:
            progress(file.size)
            return
        target.unlink(missing_ok=True)
        content = self.plan.contents.get(str(file.sha256))
        if content is not None and content.size != file.size:
            raise UsageError(f"{file.path}: the patch contradicts its lock.", "Make it anew with `stage patch`.")
        source = self.root / file.path
        if content is None:
            source = self.root / self._same_content(file)
            if source not in self._kept_sources() and str(source) not in self._moved and _link(source, target):
                self._moved.add(str(source))  # a second name of it would be a second name for good
                progress(file.size)
                return
        found = self.store.assemble(target, source, content or Content(file.size, ()), progress)
        if found != file.sha256:
            raise DamageError(
                f"{file.path}: with the patch its sha256 is {found}, not {file.sha256}: more of it is damaged than "
                "the patch mends. The bundle is as it was.",
                f"stage verify {self.root} --report FILE, and stage patch with that.",
            )

    def _kept_sources(self) -> set[Path]:
        """Old files that stay where they are: a link to one would tie two files of the bundle together."""
        had = {file.path: file.sha256 for file in self.here.files} if self.here else {}
        return {self.root / f.path for f in self.lock.files if had.get(f.path) == f.sha256}

    def _same_content(self, file: LockedFile) -> str:
        """A path of the old bundle whose file has just these bytes."""
        for old in self.here.files if self.here else ():
            path = self.root / old.path
            if old.sha256 == file.sha256 and is_regular(path) and hash_file(path).sha256 == file.sha256:
                return old.path
        raise DamageError(
            f"{file.path}: the patch counts on a file of the old bundle that is missing or damaged. "
            "The bundle is as it was.",
            f"stage verify {self.root} --report FILE, and mend it with stage patch --report FILE before the update.",
        )

    def _put_in_place(self, file: LockedFile) -> None:
        target = self.root / file.path
        make_real_folder(self.root, target.parent)
        remove_empty(target)
        self.store.built(file.path).replace(target)
        sync_folder(target.parent)

    def _write_tags(self) -> tuple[str, ...]:
        """The files beside the payload; the tag manifest last, and no signature that is not of it.

        Returns:
            Those that were not so before.
        """
        tags = self.plan.tags
        last = (layout.LOCK, layout.SIGNATURE, layout.TAG_MANIFEST)
        unsigned = layout.TAG_MANIFEST in tags and layout.SIGNATURE not in tags
        if unsigned and not self._is_sealed_target():
            (self.root / layout.SIGNATURE).unlink(missing_ok=True)
        changed = []
        for path in [*sorted(set(tags) - set(last)), *(path for path in last if path in tags)]:
            if not is_regular(self.root / path) or sha256_of_bytes(read_file(self.root / path)) != tags[path]:
                changed.append(path)
            make_real_folder(self.root, (self.root / path).parent)
            remove_empty(self.root / path)
            write_atomically(self.root / path, self.store.tag(path))
            for left in (self.root / path).parent.glob(f"{Path(path).name}.*{PARTIAL_SUFFIX}"):
                left.unlink()  # of an apply that was killed just here
        return tuple(changed)

    def _require_sound(self) -> None:
        with self.reporter.bytes_bar("verify", self.lock.size) as progress:
            report = verify(self.root, "full", progress=progress)
        if report.ok and report.bundle_id == self.plan.target:
            return
        told = list(lines(report))
        more = f"\n  and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in told[:_SHOWN]) + more
        advice = "\n     ".join([*what_to_do(report, None), f"Then: stage verify {self.root}"])
        if report.bundle_id == self.plan.target and not is_for_a_patch(report):
            self.store.remove()
            raise DamageError(
                f"{self.root}: every byte of the bundle is there and sound with the patch; no patch mends what is "
                f"left:{listed}",
                advice,
            )
        left = human_count(len(report.findings), "finding")
        raise DamageError(f"{self.root}: the patch is in place; {left} left:{listed}", advice)


def _hash_of(descriptor: int, start: int, end: int) -> str:
    digest = sha256()
    while start < end and (data := os.pread(descriptor, min(CHUNK, end - start), start)):
        digest.update(data)
        start += len(data)
    return digest.hexdigest()


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this disk: copy
        return False
    return True
