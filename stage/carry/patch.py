"""Makes patches from a sound bundle: a folder with the files that another copy needs, whole.

Either a verification report names the damage of the copy (`--report`), or the copy is an older
bundle (`--since OLD.lock`). Below `data/` a patch has payload files (a content once) and all files
beside the payload, each at its path in the bundle; `patch.json` has the id of the bundle that it is
for. It is a BagIt bag: `sha256sum -c` and bagit validate it. Bytes are copied only after they are
compared with the lock. `stage.carry.apply` applies it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stage.bundle import bundle as layout
from stage.bundle.bundle import Bundle
from stage.bundle.verifier import VerificationReport
from stage.digests import MismatchError, sha256_of_bytes
from stage.download.partial_file import copy_verified
from stage.errors import DamageError, UsageError, suggest_path
from stage.files import (
    check_folder_of,
    check_space,
    check_writable,
    read_file,
    sync_disk,
    write_atomically,
)
from stage.lock.document import sha256_digits
from stage.lock.model import LockedFile
from stage.lock.read import read_lock
from stage.lock.reader import described, plain
from stage.paths import printable
from stage.progress import Reporter

FORMAT = 1


@dataclass(frozen=True)
class PatchPlan:
    """The keys of `patch.json`.

    Attributes:
        base: the id of the bundle that the patch is for.
    """

    format: int
    base: str = field(metadata=described(convert=sha256_digits))


TAGS = (*layout.TAG_FILES, *layout.SEAL)


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
    tags = {
        name: layout.read_tag(bundle.root, name) for name in TAGS if (bundle.root / name).is_file()
    }
    recorded = layout.parse_manifest(tags[layout.TAG_MANIFEST])
    digests = {f"data/{name}": sha256_of_bytes(text) for name, text in tags.items()}
    for name in layout.TAG_FILES:
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
            layout.BAGIT: layout.BAGIT_TEXT,
            layout.BAG_INFO: f"Payload-Oxum: {oxum}\n".encode(),
            layout.MANIFEST: layout.manifest_text(digests),
            layout.PATCH_PLAN: json.dumps(plain(PatchPlan(FORMAT, base))).encode() + b"\n",
        }
        for name, text in texts.items():
            (patch / name).write_bytes(text)
        seal = {name: sha256_of_bytes(text) for name, text in texts.items()}
        write_atomically(patch / layout.TAG_MANIFEST, layout.manifest_text(seal))
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
