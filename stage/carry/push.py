"""`stage push`: sends a finished bundle to another machine or disk, and verifies it there.

rsync sends in three steps over one ssh connection. First it sends missing files, and appends to
files that are cut short (not to files that have other names there, such as those of a store). Then
it sends files of another size or time. The tag manifest comes last: until all files are there, the
remote bundle is unfinished. Then the remote host verifies every byte. Damaged files are sent once
more with rsync's checksums, and verified again: a bit flip keeps size and time, and only
`--checksum` without `--append-verify` repairs it.

Files that replace a remote file are read here first: damage of this copy must not replace a sound
file (docs/adr/0007). For a new target the whole bundle is read first, unless a receipt says that it
was read already.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.bundle import Bundle
from stage.bundle.receipt import Receipt
from stage.bundle.receipt import find as find_receipt
from stage.bundle.receipt import record as record_receipt
from stage.bundle.verify import failure_of, verify
from stage.carry.remote import PushTarget, connected
from stage.carry.remote_bundle import (
    NO_VERIFIER,
    RemoteState,
    files_to_replace,
    inspect_remote,
    verify_remote,
)
from stage.carry.rsync import Transfer, check_rsync
from stage.digests import hash_file
from stage.errors import DamageError, UsageError
from stage.files import format_age, human_count, human_size, join_limited
from stage.lock.model import LockedFile
from stage.paths import printable
from stage.progress import Reporter
from stage.threads import together

_READERS = 4  # files read at a time; more do not make one disk faster
_SHOWN = 10  # names in one line


@dataclass(frozen=True)
class PushOutcome:
    """What a push did.

    Attributes:
        verified_with: `stage` or `stage-verify.py`.
        repaired: how many files were sent again although they had the right size and time.
        report: the last report of the remote verification, as `stage verify --json` prints it.
    """

    target: PushTarget
    bundle_id: str
    verified_with: str
    repaired: int
    report: dict[str, Any]


def push(
    root: Path,
    target: PushTarget,
    *,
    ssh: str,
    delete: bool,
    reporter: Reporter,
    quiet: bool,
    state: Path,
) -> PushOutcome:
    """Sends a bundle to its target and verifies it there.

    Args:
        ssh: the command for all connections.
        delete: remove files at the target that the bundle does not have.
        state: the folder of verification receipts (`stage.bundle.receipt.state_folder`).

    Returns:
        The outcome; its report's `ok` says whether every byte at the target is right.

    Raises:
        UsageError: no finished bundle; the target is a folder of something else; no rsync here or
            there.
        DamageError: this bundle is damaged.
        IncompleteError: the connection or the remote disk failed; or all is sent, and nothing there
            can verify it.
    """
    bundle = Bundle.open(root)
    here = verify(root, "fast")
    if not here.ok:
        findings = human_count(len(here.findings), "finding")
        raise failure_of(here)(
            f"{root}: not pushed: {findings}, the first: {here.findings[0]}.",
            f"stage verify {root}",
        )
    _check_not_itself(root, target)
    check_rsync()
    with connected(target, ssh) as remote:
        found = inspect_remote(remote, root)
        _check_not_another(root, target, found, bundle)
        reporter.note(f"{target}: {found.describe()}; verifier there: {_first(found.verifiers)}")
        if not found.verifiers:
            reporter.warn(f"{target}: the copy will not be verified: {NO_VERIFIER}")
        if found.state in ("absent", "empty"):
            _check_sound_bundle(bundle, state, reporter)
        transfer = Transfer(remote, root, quiet=quiet)
        remote.run(f"mkdir -p {shlex.quote(remote.folder)}", f"{target}: cannot make the folder")
        _send(transfer, bundle, found, reporter, delete=delete)
        reporter.note(f"{target}: all files are sent")
        if found.verifiers:
            reporter.note(f"{target}: every byte is read there now; this can take long")
        verifier, report = verify_remote(remote, found.verifiers, state)
        damaged = _damaged_of(bundle, report)
        if damaged:
            _check_sound_here(bundle, damaged, target, reporter, were_sent=True)
            files = human_count(len(damaged), "file")
            reporter.warn(f"{target}: {files} not as sent; sending again with checksums")
            transfer.repair(damaged)
            verifier, report = verify_remote(remote, found.verifiers, state)
    return PushOutcome(target, bundle.id, verifier, len(damaged), report)


def _first(verifiers: Sequence[str]) -> str:
    return verifiers[0] if verifiers else "none"


def _send(
    transfer: Transfer, bundle: Bundle, found: RemoteState, reporter: Reporter, *, delete: bool
) -> None:
    """Sends all files, the tag manifest last; with `delete`, removes what is not of the bundle."""
    remote, target = transfer.remote, transfer.remote.target
    appendable = None
    if found.state in ("finished", "begun"):
        replaced = transfer.replaced()
        _check_sound_here(bundle, replaced, target, reporter)
        appendable = _appendable(bundle, replaced, files_to_replace(remote), target, reporter)
    if found.is_finished and not found.has(bundle.id):
        seal = " ".join(remote.inside(name) for name in (layout.TAG_MANIFEST, layout.SIGNATURE))
        remote.run(f"rm -f {seal}", f"{target}: cannot remove the old tag manifest")
    transfer.append(appendable)
    transfer.update()
    removed = transfer.remove_extra() if delete else []
    if removed:
        names = join_limited([printable(path) for path in removed], _SHOWN)
        reporter.note(f"{target}: removed there, as not of this bundle: {names}")
    transfer.finish()


def _damaged_of(bundle: Bundle, report: dict[str, Any]) -> list[str]:
    """Files of the bundle that a remote report names and that are here to be sent again."""
    payload = {file.path for file in bundle.lock.files}
    ours = {*payload, *layout.TAG_FILES, *layout.SEAL}
    paths = [finding["path"] for finding in report["findings"]]
    return [path for path in paths if path in ours and (bundle.root / path).is_file()]


def _check_sound_bundle(bundle: Bundle, state: Path, reporter: Reporter) -> None:
    """Reads the whole bundle, unless a receipt covers it: verified, and no file touched since.

    Raises:
        DamageError: a file is not as it was fetched.
    """
    receipt = find_receipt(state, bundle.root)
    if isinstance(receipt, Receipt):
        known = receipt.describe(time.time())
        reporter.note(f"{bundle.root}: {known}, and not touched since: not read again here")
        return
    reporter.note(f"{bundle.root}: {receipt}; every byte is read here first")
    with reporter.bytes_bar("read here", bundle.lock.size) as progress:
        report = verify(bundle.root, "full", state=state, progress=progress)
    with suppress(OSError):  # without a receipt, the next push reads the bundle again
        record_receipt(state, report)
    if not report.ok:
        raise _damaged_here(
            bundle, [finding.path for finding in report.findings], "Nothing was sent."
        )


def _check_sound_here(
    bundle: Bundle,
    paths: Collection[str],
    target: PushTarget,
    reporter: Reporter,
    *,
    were_sent: bool = False,
) -> None:
    """Reads those payload files of this bundle that will replace a file at the target.

    Args:
        were_sent: whether they were sent already and will be sent again.

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

        are_damaged = together(is_damaged, files, _READERS)
    damaged = [file.path for file, bad in zip(files, are_damaged, strict=True) if bad]
    if damaged:
        done = "The copy there has that damage too." if were_sent else "Nothing was sent."
        raise _damaged_here(bundle, damaged, done)
    if not were_sent:
        which = f"{human_count(len(files), 'file')} ({human_size(size)})"
        took = format_age(time.monotonic() - began)
        reporter.note(
            f"{bundle.root}: read {which} in {took} that will replace files there: sound here"
        )


def _appendable(
    bundle: Bundle,
    replaced: Collection[str],
    kept: Collection[str],
    target: PushTarget,
    reporter: Reporter,
) -> list[str] | None:
    """The files that rsync may append to at the target; None: all.

    Args:
        kept: files there that rsync must not write into (`files_to_replace`).
    """
    if not kept:
        return None
    if changing := sorted({*replaced} & {*kept}):
        names = join_limited([printable(path) for path in changing], _SHOWN)
        reporter.note(
            f"{target}: replaced there, never written into, as hard-linked or read-only: {names}"
        )
    ours = [*(file.path for file in bundle.lock.files), *sorted(layout.TAG_FILES)]
    return [path for path in ours if path not in kept]


def _damaged_here(bundle: Bundle, damaged: Sequence[str], done: str) -> DamageError:
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    root = shlex.quote(str(bundle.root))
    return DamageError(
        f"{bundle.root}: damaged here: {damaged[0]}{more}: not as fetched. {done}",
        f"Repair this copy, then push again: stage fetch MANIFEST -o {root}   (or from a sound "
        f"copy: stage verify {root} --report FILE, and where that copy is: "
        "stage patch COPY --report FILE -o PATCH)",
    )


def _check_not_another(root: Path, target: PushTarget, found: RemoteState, bundle: Bundle) -> None:
    """Refuses to turn a bundle of another name into this one: the target may be a typing error.

    Raises:
        UsageError: a bundle of another name is there.
    """
    if found.name is None or found.name == bundle.lock.name:
        return
    folder = target.folder.rpartition("/")[0]
    name = root.resolve().name
    beside = PushTarget(target.host, f"{folder}/{name}" if folder else name)
    if beside == target:
        beside = PushTarget(target.host, f"{target.folder}-{bundle.lock.name}")
    remove = shlex.join(["rm", "-r", target.folder])
    raise UsageError(
        f"{target}: another bundle is there: {printable(found.name)}; "
        f"{root} is {printable(bundle.lock.name)}. Nothing was changed.",
        "Give it a folder of its own: "
        f"{shlex.join(['stage', 'push', str(root), str(beside)])}   "
        f"(or, if nobody needs that other bundle, remove it there: {remove})",
    )


def _check_not_itself(root: Path, target: PushTarget) -> None:
    if target.host is not None:
        return
    here, there = root.resolve(), Path(target.folder).resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(
            f"{target}: lies inside {root}, or {root} inside it.", "Give another folder."
        )
