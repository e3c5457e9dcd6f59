"""Makes patches from a sound bundle: only the parts that another copy needs.

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
from stage.errors import DamageError, UsageError, suggest_path
from stage.lock.model import LockedFile
from stage.lock.read import read_lock
from stage.transfer.patch import Content, PatchPlan, Piece, in_volumes, write_volume
from stage.util.digests import BLOCK_SIZE, BLOCKS_ABOVE, sha256_of_bytes
from stage.util.files import check_folder_of, check_space, check_writable, read_file, sync_folder
from stage.util.paths import printable
from stage.util.progress import Reporter
from stage.verify.report import Ranges, VerificationReport


@dataclass(frozen=True)
class PatchOutcome:
    """A patch that was written.

    Attributes:
        left: the findings that no patch repairs.
    """

    plan: PatchPlan
    left: tuple[str, ...] = ()


def patch_damage(
    root: Path,
    report: VerificationReport,
    output: Path,
    volume_size: int | None,
    reporter: Reporter,
) -> PatchOutcome:
    """Writes a patch that repairs the damage in a report.

    Raises:
        UsageError: the report is of another bundle, or names no damage that a patch can repair.
        DamageError: this bundle is damaged at the same bytes.
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
    bad: dict[str, list[tuple[LockedFile, Ranges]]] = {}
    for finding in report.findings:
        if (file := files.get(finding.path)) is not None:
            if finding.ranges and finding.ranges[-1][1] > file.size:
                raise UsageError(
                    f"The report names bytes of {file.path} up to {finding.ranges[-1][1]}; "
                    f"it has {file.size}.",
                    f"Is it a report of {root}? Verify the copy again: "
                    "stage verify COPY --report FILE.",
                )
            bad.setdefault(str(file.sha256), []).append((file, finding.ranges))
    maker = _Maker(bundle)
    for several in bad.values():
        maker.add_file(several[0][0], [ranges for _, ranges in several])
    tags = _tags_to_repair(bundle, {finding.path for finding in report.findings})
    for path in tags:
        maker.add_tag(path)
    repair = tuple(sorted({file.path for several in bad.values() for file, _ in several}))
    others = {*files, *tags}
    left = tuple(finding.path for finding in report.findings if finding.path not in others)
    if not repair and not tags:
        raise _nothing_to_repair(left)
    plan = maker.plan("repair", bundle.id, repair)
    return PatchOutcome(maker.write(plan, output, volume_size, reporter), left)


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
    """Damaged files beside the payload: single block lists; of the others all, to fit together."""
    covered = layout.tag_paths(bundle.lock)
    blocks = sorted(p for p in paths & covered if p.startswith(f"{layout.BLOCKS}/"))
    if paths & {*layout.TAG_FILES, *layout.SEAL}:
        return [*blocks, *_seal_files(bundle)]
    return blocks


def _seal_files(bundle: Bundle) -> list[str]:
    names = (*layout.TAG_FILES, *layout.SEAL)
    return [name for name in names if (bundle.root / name).is_file()]


def patch_since(
    root: Path, old_lock: Path, output: Path, volume_size: int | None, reporter: Reporter
) -> PatchOutcome:
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
            maker.add_file(file, [])
    new_blocks = layout.tag_paths(bundle.lock) - layout.tag_paths(old) - set(layout.TAG_FILES)
    for path in [*sorted(new_blocks), *_seal_files(bundle)]:
        maker.add_tag(path)
    plan = maker.plan("update", sha256_of_bytes(data), ())
    return PatchOutcome(maker.write(plan, output, volume_size, reporter))


class _Maker:
    """Collects contents, and knows for each piece where in the bundle it lies."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._recorded = layout.parse_manifest(layout.read_tag(bundle.root, layout.TAG_MANIFEST))
        self._contents: dict[str, Content] = {}
        self._tags: dict[str, str] = {}
        self._where: dict[str, tuple[str, int, int]] = {}

    def add_file(self, file: LockedFile, bad: list[Ranges]) -> None:
        """Adds a payload file: the blocks that `bad` touches, or all if one has no ranges."""
        sha256 = str(file.sha256)
        pieces = self._blocks(file) if file.size > BLOCKS_ABOVE else [Piece(0, file.size, sha256)]
        if bad and all(bad):
            spans = [span for ranges in bad for span in ranges]
            pieces = [
                p for p in pieces if any(start < p.end and p.start < end for start, end in spans)
            ]
        for piece in pieces:
            self._where.setdefault(piece.sha256, (file.path, piece.start, piece.end))
        self._contents[sha256] = Content(file.size, tuple(piece for piece in pieces if piece.end))

    def _blocks(self, file: LockedFile) -> list[Piece]:
        path = layout.blocks_path(str(file.sha256))
        text = self._sound_tag(path)
        digests = text.decode("ascii", "replace").split()
        starts = range(0, file.size, BLOCK_SIZE)
        if len(digests) != len(starts) or file.blocks not in (None, sha256_of_bytes(text)):
            raise _damaged_here(self._bundle.root / path)
        return [
            Piece(s, min(s + BLOCK_SIZE, file.size), d)
            for s, d in zip(starts, digests, strict=True)
        ]

    def add_tag(self, path: str) -> None:
        """Takes a file beside the payload."""
        text = self._sound_tag(path)
        digest = sha256_of_bytes(text)
        self._tags[path] = digest
        self._where[digest] = (path, 0, len(text))
        self._contents[digest] = Content(len(text), (Piece(0, len(text), digest),) if text else ())

    def _sound_tag(self, path: str) -> bytes:
        text = layout.read_tag(self._bundle.root, path)
        vouched = path in layout.SEAL or self._recorded.get(path) == sha256_of_bytes(text)
        if not vouched:
            raise _damaged_here(self._bundle.root / path)
        return text

    def plan(self, kind: str, base: str, repair: tuple[str, ...]) -> PatchPlan:
        """The plan of all that was added."""
        return PatchPlan(kind, base, self._bundle.id, self._contents, repair, self._tags, {}, 1)

    def write(
        self, plan: PatchPlan, output: Path, volume_size: int | None, reporter: Reporter
    ) -> PatchPlan:
        """Writes the patch, whole or not at all: one bag, or a folder of bags (volumes)."""
        if os.path.lexists(output):
            raise UsageError(
                f"{output}: is there already; nothing was changed.",
                "Choose another -o, or remove it.",
            )
        check_folder_of(output)
        if self._bundle.root.resolve() in output.resolve().parents:
            raise UsageError(f"{output}: is inside the bundle.", "Put it beside the bundle.")
        check_writable(output.absolute().parent)
        plan = in_volumes(plan, volume_size)
        check_space(output.parent, plan.size)
        work = Path(
            tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent)
        )
        try:
            with reporter.bytes_bar("patch", plan.size) as progress:
                for number in range(1, plan.count + 1):
                    root = (
                        work / "patch"
                        if volume_size is None
                        else work / "patch" / _volume_name(number, plan.count)
                    )
                    write_volume(
                        root,
                        plan,
                        number,
                        lambda piece, target: self._bring(piece, target, progress),
                    )
            (work / "patch").rename(output)
            sync_folder(output.absolute().parent)
        finally:
            shutil.rmtree(work)
        return plan

    def _bring(self, piece: str, target: Path, progress: Callable[[int], None]) -> None:
        path, start, end = self._where[piece]
        with open(self._bundle.root / path, "rb", buffering=0) as source:
            data = _read(source.fileno(), start, end)
        if sha256_of_bytes(data) != piece:
            raise _damaged_here(self._bundle.root / path)
        with open(target, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        progress(len(data))


def _read(descriptor: int, start: int, end: int) -> bytes:
    """Up to 64 MiB: a block or a small file."""
    parts: list[bytes] = []
    at = start
    while at < end and (data := os.pread(descriptor, end - at, at)):
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def _volume_name(number: int, count: int) -> str:
    return f"volume-{number:0{len(str(count))}d}-of-{count}"


def _damaged_here(path: Path) -> DamageError:
    return DamageError(
        f"{path}: damaged here too: a patch needs a sound bundle.",
        "Run `stage fetch` again into it, then this again.",
    )
