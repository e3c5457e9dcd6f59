"""Makes and applies patches: folders with the files that another copy of a bundle needs, whole.

Either a verification report names the damage of the copy (`--report`), or the copy is an older
bundle (`--since OLD.lock`). Below `data/` a patch has payload files (a content once) and all files
beside the payload, each at its path in the bundle; `patch.json` has the id of the bundle that it is
for. It is a BagIt bag: `sha256sum -c` and bagit validate it. Bytes are copied only after they are
compared with the lock.

`apply` builds new files and compares them with the lock in `workshop.partial` of the bundle before
anything else in it is touched. Each then gets its place by one rename, the tag manifest last.
Killed at any moment, the same command goes on with the files that are built or in place.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    BAGIT_TEXT,
    FETCH_PARTIAL,
    LOCK,
    MANIFEST,
    PATCH_PLAN,
    SEAL,
    SIGNATURE,
    TAG_FILES,
    TAG_MANIFEST,
    VERIFIER,
    Bundle,
    check_is_bundle,
    holds_bundle,
    manifest_text,
    parse_manifest,
    read_tag,
    verify,
)
from stage.bundle.receipt import format_findings, record, wait_until_at_rest
from stage.bundle.verifier import VerificationReport, state_folder, suggest_fixes
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
    MismatchError,
    check_folder_of,
    check_space,
    check_writable,
    human_count,
    human_size,
    read_file,
    sha256_of_bytes,
    sync_disk,
    sync_folder,
    write_atomically,
)
from stage.lock.document import DocumentReader, read_document, sha256_digits
from stage.lock.model import LockedFile, Lockfile, read_lock
from stage.lock.reader import described, plain
from stage.paths import printable
from stage.progress import Reporter
from stage.staging.working_folder import WORKSHOP, WorkFolder, alone_in

FORMAT = 1


@dataclass(frozen=True)
class PatchPlan:
    """The keys of `patch.json`.

    Attributes:
        base: the id of the bundle that the patch is for.
    """

    format: int
    base: str = field(metadata=described(convert=sha256_digits))


TAGS = (*TAG_FILES, *SEAL)


@dataclass(frozen=True)
class PatchOutcome:
    """A patch that was written.

    Attributes:
        files, size: payload files in it, and their bytes.
        left: paths of the findings that no patch repairs.
    """

    files: int
    size: int
    left: tuple[str, ...] = ()


def patch_damage(
    root: Path, report: VerificationReport, output: Path, reporter: Reporter
) -> PatchOutcome:
    """Writes a patch that repairs the damage in a report.

    Raises:
        UsageError: the report is of another bundle, or names no damage that a patch can repair.
        DamageError: this bundle is damaged in the same files.
    """
    bundle = Bundle.open(root)
    if report.bundle_id not in (None, bundle.id):
        raise _of_another_state(bundle, report, output)
    for finding in report.findings:
        if finding.problem == "unloadable":
            raise UsageError(
                f"{finding.path}: every byte is as it was fetched, and it does not load: a patch "
                "repairs nothing there.",
                "Fetch another revision, then: stage patch --since OLD.lock.",
            )
    paths = {finding.path for finding in report.findings}
    known = {*TAGS, *(file.path for file in bundle.lock.files)}
    left = tuple(finding.path for finding in report.findings if finding.path not in known)
    if not paths & known:
        what = f": {left[0]} is not of the bundle" if left else ""
        raise UsageError(
            f"The report names nothing that a patch can repair{what}.",
            "Move what is extra out of the bundle." if left else "There is nothing to do.",
        )
    files = [file for file in bundle.lock.files if file.path in paths]
    return _write(bundle, bundle.id, files, left, output, reporter)


def _of_another_state(bundle: Bundle, report: VerificationReport, output: Path) -> UsageError:
    """The error for a report of another bundle: a file of the same name may have other bytes."""
    root = quoted(bundle.root)
    lock = quoted(report.root / LOCK)
    since = f"stage patch {root} --since {lock} -o {quoted(output)}"
    return UsageError(
        "The report is of another bundle, or of this one as it was before: the copy at "
        f"{printable(str(report.root))} has the id {report.bundle_id}, "
        f"{bundle.root} has {bundle.id} now.",
        f"If this one was fetched again since: stage push {root} HOST:DIR updates and repairs the "
        f"copy. To carry the new files by hand, with the copy's lock: {since}   (after "
        "`stage apply` there, a report of the remaining damage still makes a patch). If it is "
        "another: give the bundle that the copy was made from.",
    )


def patch_since(root: Path, old_lock: Path, output: Path, reporter: Reporter) -> PatchOutcome:
    """Writes a patch from the bundle of an older lock to this one: contents that are new in it.

    Raises:
        UsageError: the lock cannot be read, is incomplete, or is this bundle's own.
        DamageError: this bundle is damaged where it has to be copied.
    """
    bundle = Bundle.open(root)
    try:
        data = read_file(old_lock)
    except OSError as error:
        raise UsageError(
            f"{old_lock}: {error.strerror}.",
            suggest_path(
                old_lock,
                "Give the lock of the bundle to be updated: its stage.lock.",
                lambda path: _may_be_older(path, bundle.id),
            ),
        ) from None
    old = read_lock(data, str(old_lock))
    if not old.is_complete:
        raise UsageError(
            f"{old_lock}: incomplete: no bundle was ever finished with it.", "Give its stage.lock."
        )
    base = sha256_of_bytes(data)
    if base == bundle.id:
        raise UsageError(
            f"{old_lock}: this is the lock of the same bundle: there is nothing to carry.",
            "Give the lock of the version that is on the other side.",
        )
    had = {file.sha256 for file in old.files}
    files = [file for file in bundle.lock.files if file.sha256 not in had]
    return _write(bundle, base, files, (), output, reporter)


def _may_be_older(path: Path, id: str) -> bool:
    """Whether a path is, or may lead to, the lock of another version than this one."""
    try:
        return path.is_dir() or (path.suffix == ".lock" and sha256_of_bytes(read_file(path)) != id)
    except OSError:
        return False


def _write(
    bundle: Bundle,
    base: str,
    wanted: Iterable[LockedFile],
    left: tuple[str, ...],
    output: Path,
    reporter: Reporter,
) -> PatchOutcome:
    """Writes the patch, whole or not at all.

    Args:
        base: the id of the bundle that it is for.
        wanted: payload files; of several with the same content, it has one.
        left: for the outcome.
    """
    files = {file.sha256: file for file in wanted}.values()
    if os.path.lexists(output):
        raise UsageError(
            f"{output}: is there already; nothing was changed.", "Choose another -o, or remove it."
        )
    check_folder_of(output)
    if bundle.root.resolve() in output.resolve().parents:
        raise UsageError(f"{output}: is inside the bundle.", "Put it beside the bundle.")
    check_writable(output.absolute().parent)
    tags = {name: read_tag(bundle.root, name) for name in TAGS if (bundle.root / name).is_file()}
    recorded = parse_manifest(tags[TAG_MANIFEST])
    digests = {f"data/{name}": sha256_of_bytes(text) for name, text in tags.items()}
    for name in TAG_FILES:
        if recorded.get(name) != digests.get(f"data/{name}"):
            raise _damaged_here(bundle.root / name)
    size = sum(file.size for file in files)
    check_space(output.parent, size)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        patch = work / "patch"
        with reporter.bytes_bar("patch", size) as progress:
            for file in files:
                source, target = bundle.root / file.path, patch / "data" / file.path
                digests[f"data/{file.path}"] = str(file.sha256)
                if not source.is_file():
                    raise _damaged_here(source)
                try:
                    copy_verified(source, target, file.expected, progress)
                except MismatchError:
                    raise _damaged_here(source) from None
        (patch / "data").mkdir(parents=True, exist_ok=True)
        for name, text in tags.items():
            (patch / "data" / name).write_bytes(text)
        oxum = f"{size + sum(map(len, tags.values()))}.{len(digests)}"
        texts = {
            BAGIT: BAGIT_TEXT,
            BAG_INFO: f"Payload-Oxum: {oxum}\n".encode(),
            MANIFEST: manifest_text(digests),
            PATCH_PLAN: json.dumps(plain(PatchPlan(FORMAT, base))).encode() + b"\n",
        }
        for name, text in texts.items():
            (patch / name).write_bytes(text)
        seal = {name: sha256_of_bytes(text) for name, text in texts.items()}
        write_atomically(patch / TAG_MANIFEST, manifest_text(seal))
        sync_disk(patch)
        patch.rename(output)
    finally:
        shutil.rmtree(work)
    return PatchOutcome(len(files), size, left)


def _damaged_here(path: Path) -> DamageError:
    return DamageError(
        f"{path}: damaged here too: a patch needs a sound bundle.",
        "Run `stage fetch` again into it, then this again.",
    )


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
    if not holds_bundle(patch):
        return
    if (root / PATCH_PLAN).is_file():
        raise UsageError(
            f"{root} is a patch, and {patch} is a bundle. The order is wrong: "
            "first the bundle, then the patch.",
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
    plan = root / PATCH_PLAN
    if not plan.exists():
        raise UsageError(
            f"{root}: no patch: there is no {PATCH_PLAN}.", suggest_path(root, _REMEDY)
        )
    try:
        found = {name: read_file(root / name) for name in (TAG_MANIFEST, PATCH_PLAN, MANIFEST)}
        names = parse_manifest(found[MANIFEST])
        carried = [f"data/{name}" for name in TAGS if f"data/{name}" in names]
        found |= {name: read_file(root / name) for name in carried}
    except OSError as error:
        raise _damaged(Path(error.filename or root), error.strerror or "not readable") from None
    recorded = parse_manifest(found.get(f"data/{TAG_MANIFEST}", b""))
    digests = parse_manifest(found[TAG_MANIFEST]) | names
    digests |= {f"data/{name}": digest for name, digest in recorded.items()}
    required = [name for name in TAGS if name not in (SIGNATURE, VERIFIER)]
    needed = (PATCH_PLAN, MANIFEST, *(f"data/{name}" for name in required))
    for name in (*needed, *carried):
        if sha256_of_bytes(found.get(name, b"")) != digests.get(name):
            raise _damaged(root / name, "not the sha256 that its manifest has")
    with about(str(plan)):
        document = read_document(found[PATCH_PLAN], str(plan), "a patch", (FORMAT,), _REMEDY)
        with about("not a patch"):
            base = DocumentReader(_REMEDY).read(PatchPlan, document).base
    tags = {name: found[f"data/{name}"] for name in TAGS if f"data/{name}" in found}
    lock = read_lock(tags[LOCK], str(root / "data" / LOCK))
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
            for name in (LOCK, BAG_INFO)
        )
        bundle_id, base = sha256_of_bytes(lock) if lock else "no lock", self.patch.base
        if bundle_id in (base, self.patch.lock.id):
            return tuple(read_lock(lock, str(self.root / LOCK)).files)
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
        for path in (*(file.path for file in todo), *tags, *SEAL, f"{WORKSHOP}/x"):
            self._check_place(path)
        self._build_all(todo, tags)
        sync_disk(self.root)
        folder.drop(())  # of empty folders one may be in the place of a file
        is_other_seal = TAG_MANIFEST in tags
        if self.is_update and is_other_seal:
            folder.mark_unfinished(self.wanted)
        folder.drop(self.stale)
        last = (LOCK, *SEAL)
        for path in [file.path for file in todo] + [name for name in tags if name not in last]:
            folder.put(path, self.work / path)
        sync_disk(self.root)  # the seal says that all else is on the disk
        if is_other_seal and SIGNATURE not in patch.tags:
            (self.root / SIGNATURE).unlink(missing_ok=True)
        for name in last:
            if name in tags:
                folder.put(name, self.work / name)
        shutil.rmtree(self.work, ignore_errors=True)
        (self.root / FETCH_PARTIAL).unlink(missing_ok=True)
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
                    f"Move it out of the bundle: mv {quoted(place)} ELSEWHERE",
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
