"""Makes patches from a sound bundle: only the files that another copy needs.

Either a verification report names the damage of the copy (`--report`), or the copy is an older
bundle (`--since OLD.lock`). Bytes are copied only after they are compared with the lock.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stage.bundle import bundle as layout
from stage.bundle.bundle import Bundle
from stage.bundle.report import VerificationReport
from stage.carry.patch import PatchPlan, write_patch
from stage.digests import sha256_of_bytes
from stage.download.partial_file import copy_hashed
from stage.errors import DamageError, UsageError, suggest_path
from stage.files import check_folder_of, check_space, check_writable, read_file, sync_folder
from stage.lock.model import LockedFile
from stage.lock.read import read_lock
from stage.paths import printable
from stage.progress import Reporter


@dataclass(frozen=True)
class PatchOutcome:
    """A patch that was written.

    Attributes:
        left: the findings that no patch repairs.
    """

    plan: PatchPlan
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
    if unloadable := [
        finding.path for finding in report.findings if finding.problem == "unloadable"
    ]:
        raise UsageError(
            f"{unloadable[0]}: every byte is as it was fetched, and it does not load: a patch "
            "repairs nothing there.",
            "Fetch another revision, then: stage patch --since OLD.lock.",
        )
    files = {file.path: file for file in bundle.lock.files}
    paths = {finding.path for finding in report.findings}
    repair = tuple(sorted(paths & files.keys()))
    maker = _Maker(bundle)
    for path in repair:
        maker.add_file(files[path])
    tags = _tags_to_repair(bundle, paths)
    for path in tags:
        maker.add_tag(path)
    others = {*files, *tags}
    left = tuple(finding.path for finding in report.findings if finding.path not in others)
    if not repair and not tags:
        raise _nothing_to_repair(left)
    plan = maker.plan("repair", bundle.id, repair)
    maker.write(plan, output, reporter)
    return PatchOutcome(plan, left)


def _of_another_state(bundle: Bundle, report: VerificationReport, output: Path) -> UsageError:
    """The error for a report of another bundle: a file of the same name may have other bytes."""
    root = shlex.quote(str(bundle.root))
    lock = shlex.quote(str(report.root / layout.LOCK))
    since = f"stage patch {root} --since {lock} -o {shlex.quote(str(output))}"
    return UsageError(
        "The report is of another bundle, or of this one as it was before: the copy at "
        f"{printable(str(report.root))} has the id {report.bundle_id}, "
        f"{bundle.root} has {bundle.id} now.",
        f"If this one was fetched again since: stage push {root} HOST:DIR updates and repairs the "
        f"copy. To carry the new files by hand, with the copy's lock: {since}   (after "
        "`stage apply` there, a report of the remaining damage still makes a patch). If it is "
        "another: give the bundle that the copy was made from.",
    )


def _nothing_to_repair(left: tuple[str, ...]) -> UsageError:
    nothing = "The report names nothing that a patch can repair"
    if left:
        return UsageError(
            f"{nothing}: {left[0]} is not of the bundle.", "Move what is extra out of the bundle."
        )
    return UsageError(f"{nothing}.", "There is nothing to do.")


def _tags_to_repair(bundle: Bundle, paths: set[str]) -> list[str]:
    """All files beside the payload if one of them is damaged: they have to fit together."""
    return _tag_files(bundle) if paths & {*layout.TAG_FILES, *layout.SEAL} else []


def _tag_files(bundle: Bundle) -> list[str]:
    names = (*layout.TAG_FILES, *layout.SEAL)
    return [name for name in names if (bundle.root / name).is_file()]


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
            suggest_path(old_lock, "Give the lock of the bundle to be updated: its stage.lock."),
        ) from None
    old = read_lock(data, str(old_lock))
    if not old.is_complete:
        raise UsageError(
            f"{old_lock}: incomplete: no bundle was ever finished with it.", "Give its stage.lock."
        )
    if sha256_of_bytes(data) == bundle.id:
        raise UsageError(
            f"{old_lock}: this is the lock of the same bundle: there is nothing to carry.",
            "Give the lock of the version that is on the other side.",
        )
    had = {file.sha256 for file in old.files}
    maker = _Maker(bundle)
    for file in bundle.lock.files:
        if file.sha256 not in had:
            maker.add_file(file)
    for path in _tag_files(bundle):
        maker.add_tag(path)
    plan = maker.plan("update", sha256_of_bytes(data), ())
    maker.write(plan, output, reporter)
    return PatchOutcome(plan)


class _Maker:
    """Collects contents, and knows for each where in the bundle it lies."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._recorded = layout.parse_manifest(layout.read_tag(bundle.root, layout.TAG_MANIFEST))
        self._contents: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._where: dict[str, str] = {}

    def add_file(self, file: LockedFile) -> None:
        """Takes a payload file."""
        digest = str(file.sha256)
        self._where[digest], self._contents[digest] = file.path, file.size

    def add_tag(self, path: str) -> None:
        """Takes a file beside the payload."""
        text = self._sound_tag(path)
        digest = sha256_of_bytes(text)
        self._tags[path] = digest
        self._where[digest], self._contents[digest] = path, len(text)

    def _sound_tag(self, path: str) -> bytes:
        text = layout.read_tag(self._bundle.root, path)
        vouched = path in layout.SEAL or self._recorded.get(path) == sha256_of_bytes(text)
        if not vouched:
            raise _damaged_here(self._bundle.root / path)
        return text

    def plan(self, kind: str, base: str, repair: tuple[str, ...]) -> PatchPlan:
        """The plan of all that was added."""
        return PatchPlan(kind, base, self._bundle.id, self._contents, repair, self._tags)

    def write(self, plan: PatchPlan, output: Path, reporter: Reporter) -> None:
        """Writes the patch, whole or not at all."""
        if os.path.lexists(output):
            raise UsageError(
                f"{output}: is there already; nothing was changed.",
                "Choose another -o, or remove it.",
            )
        check_folder_of(output)
        if self._bundle.root.resolve() in output.resolve().parents:
            raise UsageError(f"{output}: is inside the bundle.", "Put it beside the bundle.")
        check_writable(output.absolute().parent)
        check_space(output.parent, plan.size)
        work = Path(
            tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent)
        )
        try:
            with reporter.bytes_bar("patch", plan.size) as progress:
                write_patch(
                    work / "patch",
                    plan,
                    lambda digest, target: self._bring(digest, target, progress),
                )
            (work / "patch").rename(output)
            sync_folder(output.absolute().parent)
        finally:
            shutil.rmtree(work)

    def _bring(self, expected: str, target: Path, progress: Callable[[int], None]) -> None:
        path = self._bundle.root / self._where[expected]
        if copy_hashed(path, target, self._contents[expected], progress).sha256 != expected:
            raise _damaged_here(path)


def _damaged_here(path: Path) -> DamageError:
    return DamageError(
        f"{path}: damaged here too: a patch needs a sound bundle.",
        "Run `stage fetch` again into it, then this again.",
    )
