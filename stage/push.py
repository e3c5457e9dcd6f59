"""`stage push`: a finished bundle to another machine or disk, by rsync over ssh, and proof at the other end.

Three transfers over one connection. First what is missing or cut short there, appended and checked (an interrupted
push goes on inside a file, unless that file has other names there, in a store or another bundle); then what rsync's
own quick look (size and time) finds different; the tag manifest last, so that a bundle there is unfinished until all
of it has come. Then the other end verifies every byte. What it finds damaged although it looks right is sent once
more with rsync's checksums, and verified again: a bit flip leaves size and time as they were, and only `-c` on its own
repairs that.

Whatever replaces a file there is read here first: damage of this copy must not take the place of a sound one
(docs/adr/0030). To a new place all of it is read first, unless a receipt says that it was (docs/adr/0041): a bundle
that is found damaged after a night of sending was sent for nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import bundle as layout
from stage.asset import LockedFile
from stage.bundle import Bundle
from stage.digest import hash_file
from stage.disk import human_count, human_size, some_of
from stage.errors import DamageError, UsageError
from stage.farend import Facts, not_to_append_to, probe, verified_there
from stage.names import printable
from stage.progress import Reporter, human_time
from stage.receipts import Receipt
from stage.receipts import find as find_receipt
from stage.receipts import record as record_receipt
from stage.remote import Target, connected
from stage.rsync import Transfer, require_rsync
from stage.verify import verify

_READERS = 4  # files read at a time: more do not make one disk faster
_SHOWN = 10  # names in one line


@dataclass(frozen=True)
class PushOutcome:
    """What a push did.

    Attributes:
        verified_with: `stage`, `stage-verify.py` or `sha256sum`.
        repaired: files that had to be sent again although they looked right.
        removed: what `--delete` removed there, relative to the bundle; a folder's path ends in `/`.
        report: the last report of the other end, as `stage verify --json` prints it.
    """

    target: Target
    bundle_id: str
    verified_with: str
    repaired: int
    report: dict[str, Any]
    removed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "target": str(self.target),
            "bundle_id": self.bundle_id,
            "verified_with": self.verified_with,
            "repaired": self.repaired,
            "removed": list(self.removed),
            "report": self.report,
        }


def push(
    root: Path, target: Target, *, ssh: str, delete: bool, reporter: Reporter, quiet: bool, state: Path
) -> PushOutcome:
    """Brings a bundle to its target and has it verified there.

    Args:
        ssh: the command that rsync and we connect with.
        delete: remove files at the target that the bundle does not have.
        state: where receipts of verifications lie (`receipts.state_folder`).

    Returns:
        The outcome; its report's `ok` says whether the other end found every byte right.

    Raises:
        UsageError: no finished bundle; the target is a folder of something else; no rsync here or there.
        DamageError: this bundle is damaged already.
        IncompleteError: the connection or the disk there ended it; run again.
    """
    bundle = Bundle.open(root)
    here = verify(root, "fast")
    if not here.ok:
        raise DamageError(
            f"{root}: not pushed: {human_count(len(here.findings), 'finding')}, the first: {here.findings[0]}.",
            f"stage verify {root}",
        )
    _refuse_itself(root, target)
    require_rsync()
    with connected(target, ssh) as place:
        facts = probe(place, root)
        _refuse_another(root, target, facts, bundle)
        reporter.note(f"{target}: {facts.in_words()}; to verify there: {facts.verifier}")
        if facts.state in ("absent", "empty"):
            _require_sound_bundle(bundle, state, reporter)
        transfer = Transfer(place, root, quiet=quiet)
        place.run(f"mkdir -p {shlex.quote(place.folder)}", f"{target}: cannot make the folder")
        appended = None
        if facts.state in ("finished", "begun"):
            replaced = transfer.replaced()
            _require_sound_here(bundle, replaced, target, reporter)
            appended = _appended(bundle, replaced, not_to_append_to(place), target, reporter)
        if facts.is_finished and not facts.has(bundle):
            place.run(f"rm -f {place.inside(layout.TAG_MANIFEST)} {place.inside(layout.SIGNATURE)}", f"{target}")
        transfer.append(appended)
        transfer.update()
        removed = transfer.remove_extra() if delete else []
        if removed:
            told = some_of([printable(path) for path in removed], _SHOWN)
            reporter.note(f"{target}: removed there, as not of this bundle: {told}")
        transfer.finish()
        reporter.note(f"{target}: all of it is sent; reading every byte there, which takes its time")
        report = verified_there(place, facts, bundle)
        ours = {*(file.path for file in bundle.lock.files), *layout.tag_paths(bundle.lock), *layout.SEAL}
        damaged = [f["path"] for f in report["findings"] if f["path"] in ours and (root / f["path"]).is_file()]
        if damaged:
            _require_sound_here(bundle, damaged, target, reporter, were_sent=True)
            reporter.warn(f"{target}: {human_count(len(damaged), 'file')} not as sent; sending again with checksums")
            transfer.repair(damaged)
            report = verified_there(place, facts, bundle)
    return PushOutcome(target, bundle.id, facts.verifier, len(damaged), report, tuple(removed))


def _require_sound_bundle(bundle: Bundle, state: Path, reporter: Reporter) -> None:
    """Reads all of this bundle, unless a verification did and nothing was touched since.

    Raises:
        DamageError: something is not as it was fetched.
    """
    receipt = find_receipt(state, bundle.root)
    if isinstance(receipt, Receipt):
        reporter.note(f"{bundle.root}: {receipt.in_words(time.time())}, and not touched since: not read again here")
        return
    reporter.note(f"{bundle.root}: read here first: {receipt}")
    with reporter.bytes_bar("read here", bundle.lock.size) as progress:
        report = verify(bundle.root, "full", progress=progress)
    if not report.ok:
        raise _damaged_here(bundle, [finding.path for finding in report.findings], "Nothing was sent.")
    with suppress(OSError):  # without a receipt it is read again next time, no more
        record_receipt(state, report)


def _require_sound_here(
    bundle: Bundle, paths: Collection[str], target: Target, reporter: Reporter, *, were_sent: bool = False
) -> None:
    """Reads those payload files of this bundle that are going to replace something there.

    Args:
        were_sent: whether they went there already, and are to be sent again.

    Raises:
        DamageError: some are not as they were fetched.
    """
    wanted = set(paths)
    files = [file for file in bundle.lock.files if file.path in wanted]
    if not files:
        return
    size, began = sum(file.size for file in files), time.monotonic()
    with reporter.bytes_bar("read here", size) as progress:

        def is_damaged(file: LockedFile) -> bool:
            return hash_file(bundle.root / file.path, progress=progress).sha256 != file.sha256

        pool = ThreadPoolExecutor(_READERS)
        try:
            damaged = [file.path for file, bad in zip(files, pool.map(is_damaged, files), strict=True) if bad]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts waits for no file of 50 GB
    if damaged:
        done = "What lies there has that damage too." if were_sent else "Nothing was sent."
        raise _damaged_here(bundle, damaged, done)
    if not were_sent:
        them = f"{human_count(len(files), 'file')} ({human_size(size)})"
        took = human_time(time.monotonic() - began)
        reporter.note(f"{bundle.root}: read {them} in {took} that replace what is there: sound here")


def _appended(
    bundle: Bundle, replaced: Collection[str], kept: Collection[str], target: Target, reporter: Reporter
) -> list[str] | None:
    """The files that rsync may go on inside at the target; None: all.

    Args:
        kept: those there that nobody may write into (`not_to_append_to`).
    """
    if not kept:
        return None
    if changing := sorted({*replaced} & {*kept}):
        told = some_of([printable(path) for path in changing], _SHOWN)
        reporter.note(f"{target}: replaced there, never written into, as hard-linked or read-only: {told}")
    ours = [*(file.path for file in bundle.lock.files), *sorted(layout.tag_paths(bundle.lock))]
    return [path for path in ours if path not in kept]


def _damaged_here(bundle: Bundle, damaged: Sequence[str], done: str) -> DamageError:
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return DamageError(
        f"{bundle.root}: damaged here: {damaged[0]}{more}: not as fetched. {done}",
        f"Mend it here, then push again: stage fetch MANIFEST -o {bundle.root}   (or with a sound copy's help: "
        f"stage verify {bundle.root} --report FILE, and where it is: stage patch COPY --report FILE -o PATCH)",
    )


def _refuse_another(root: Path, target: Target, facts: Facts, bundle: Bundle) -> None:
    """A bundle of another name is another bundle, and not to be turned into this one by a slip of the hand.

    Raises:
        UsageError: one is there.
    """
    if facts.name is None or facts.name == bundle.lock.name:
        return
    folder = target.folder.rpartition("/")[0]
    beside = Target(target.host, f"{folder}/{root.resolve().name}" if folder else root.resolve().name)
    if beside == target:
        beside = Target(target.host, f"{target.folder}-{bundle.lock.name}")
    gone = shlex.join(["rm", "-r", target.folder])
    raise UsageError(
        f"{target}: another bundle is there: {printable(facts.name)}; {root} is {printable(bundle.lock.name)}. "
        "Nothing was changed.",
        f"Give it a folder of its own: {shlex.join(['stage', 'push', str(root), str(beside)])}   (or, if that other "
        f"bundle is not needed any more, remove it there: {gone})",
    )


def _refuse_itself(root: Path, target: Target) -> None:
    if target.host is not None:
        return
    here, there = root.resolve(), Path(target.folder).resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"{target}: lies inside {root}, or the other way round.", "Give another folder.")
