"""The layout of a bundle on disk: a BagIt 1.0 bag (RFC 8493) with a lock in it.

The format itself is in `verifier`. Here are the texts of the files beside the payload. The payload
is written first, then the tag files, `tagmanifest-sha256.txt` last: if it exists, the bundle is
finished. `Bundle.open` opens a bundle for use; `verify` checks all of it, by `verifier`, with the
errors of `stage`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stage.bundle import verifier
from stage.bundle.verifier import (
    BAG_INFO,
    BAGIT,
    BAGIT_TEXT,
    FETCH_PARTIAL,
    LOCK,
    MANIFEST,
    PATCH_PLAN,
    PAYLOAD,
    REQUEST,
    SEAL,
    SIGNATURE,
    TAG_FILES,
    TAG_MANIFEST,
    VERIFIER,
    CannotVerify,
    VerificationReport,
    manifest_text,
    parse_manifest,
)
from stage.errors import (
    DamageError,
    IncompleteError,
    PolicyError,
    StageError,
    UsageError,
    about,
    quoted,
    suggest,
    suggest_path,
)
from stage.file_kinds import MAX_START, check_kind
from stage.files import (
    hash_file,
    read_file,
    read_start,
    sha256_of_bytes,
    sync_folder,
    write_atomically,
)

if TYPE_CHECKING:
    from stage.lock.model import LockedAsset, Lockfile
    from stage.progress import Reporter


__all__ = [  # of the format
    "BAGIT",
    "BAGIT_TEXT",
    "BAG_INFO",
    "FETCH_PARTIAL",
    "LOCK",
    "MANIFEST",
    "PATCH_PLAN",
    "PAYLOAD",
    "REQUEST",
    "SEAL",
    "SIGNATURE",
    "TAG_FILES",
    "TAG_MANIFEST",
    "VERIFIER",
    "manifest_text",
    "parse_manifest",
]


@dataclass(frozen=True)
class BundleAsset:
    """One asset of a bundle.

    Attributes:
        kind: `model`, `dataset`, `files` or `environment`.
        path: its folder of plain files; `from_pretrained(path)` loads a model.
        source: a repository on the Hub, an address or a path.
        commit: of the repository; None for other sources.
        licence: as the source states it; None if it states none.
        size: bytes of its files.
    """

    name: str
    kind: str
    path: Path
    source: str
    commit: str | None
    licence: str | None
    size: int


@dataclass(frozen=True)
class Bundle:
    """A finished bundle: its folder, its lock and its id."""

    root: Path
    lock: Lockfile
    id: str

    @staticmethod
    def open(root: Path | str) -> Bundle:
        """Opens a bundle for use. It compares the lock with the tag manifest, and reads no payload.

        Raises:
            UsageError: not a bundle, unfinished, or of a newer format.
            DamageError: the lock is not the one the bundle was finished with.
        """
        from stage.lock.model import read_lock  # slow to import; `stage verify` begins at once

        root = Path(root)
        check_is_bundle(root)
        if not (root / TAG_MANIFEST).is_file():
            raise UsageError(
                f"{root}: this bundle is unfinished: it has no {TAG_MANIFEST}.",
                "Run `stage fetch` again where it was made, or copy again: rsync had not ended.",
            )
        data = read_tag(root, LOCK)
        recorded = parse_manifest(read_tag(root, TAG_MANIFEST)).get(LOCK)
        found = sha256_of_bytes(data)
        if recorded != found:
            raise DamageError(
                f"{root / LOCK}: damaged: sha256 {found}, {TAG_MANIFEST} says {recorded}.",
                f"Run `stage verify {quoted(root)}` to see all that is damaged.",
            )
        return Bundle(root, read_lock(data, str(root / LOCK)), found)

    def __iter__(self) -> Iterator[str]:
        """The names of the assets, in the order of the lock."""
        return iter(self.lock.assets)

    def __getitem__(self, name: str) -> BundleAsset:
        """The asset of that name.

        Raises:
            UsageError: there is none; names the nearest and all there are.
        """
        asset = self.asset(name)
        return BundleAsset(
            name=name,
            kind=asset.kind,
            path=self.root / asset.folder,
            source=asset.source.location,
            commit=asset.source.commit,
            licence=asset.licence,
            size=asset.size,
        )

    def asset(self, name: str) -> LockedAsset:
        """The asset of that name.

        Raises:
            UsageError: there is none; names the nearest and all there are.
        """
        if name in self.lock.assets:
            return self.lock.assets[name]
        raise UsageError(
            f"{self.root}: no asset named `{name}` in this bundle.",
            suggest(name, self.lock.assets, f"It has: {', '.join(self.lock.assets)}."),
        )

    def asset_path(self, name: str) -> Path:
        """The folder of that asset. `from_pretrained(path)` loads a model."""
        return self.root / self.asset(name).folder


def holds_bundle(folder: Path) -> bool:
    """Whether a folder looks like a bundle, finished or not."""
    return (folder / LOCK).is_file() and (folder / BAGIT).is_file()


def check_is_bundle(root: Path) -> None:
    """Raises if `root` does not look like a bundle.

    Raises:
        UsageError: no such folder, or one without any of a bundle's files.
    """
    try:
        verifier.check_is_bundle(root)
    except verifier.CannotVerify as error:
        if root.exists() and not root.is_dir():
            with suppress(OSError), about(str(root)):  # a pipe or not readable: no bundle either
                check_kind(root, read_start(root, MAX_START), "a bundle")
        remedy = error.remedy if root.exists() else suggest_path(root)
        raise UsageError(error.message, remedy) from None


def read_tag(root: Path, name: str) -> bytes:
    """A file beside the payload.

    Raises:
        DamageError: it is missing or unreadable.
    """
    try:
        return read_file(root / name, follow=False)
    except OSError as error:
        problem = "missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
        raise DamageError(
            f"{root / name}: {problem}.",
            f"Run `stage verify {quoted(root)}` to see all that is damaged.",
        ) from None


def payload_manifest(lock: Lockfile) -> Iterator[bytes]:
    """The lines of `manifest-sha256.txt` for a complete lock."""
    return (f"{file.sha256 or ''}  {file.path}\n".encode() for file in lock.files)


def payload_oxum(lock: Lockfile) -> str:
    """BagIt's O(1) check: `<payload bytes>.<payload files>` (RFC 8493, 2.2.2)."""
    return f"{lock.size}.{len(lock.files)}"


def announced_size(root: Path) -> int:
    """Payload bytes according to `bag-info.txt`, to show progress; 0 if it cannot be read."""
    try:
        text = read_file(root / BAG_INFO, most=2**20).decode("utf-8", "replace")
    except OSError:
        return 0
    found = re.search(r"^Payload-Oxum: (\d{1,18})\.", text, re.MULTILINE)
    return int(found[1]) if found else 0


def bag_info_text(lock: Lockfile, facts: Iterable[tuple[str, str]]) -> bytes:
    """`bag-info.txt`: the only file that differs from fetch to fetch.

    Args:
        facts: label and value of facts of this fetch (date, host, endpoint, tool).
    """
    lines = [
        *facts,
        ("External-Identifier", f"sha256:{lock.id}"),
        ("Payload-Oxum", payload_oxum(lock)),
    ]
    return "".join(
        f"{label}: {' '.join(value.split())}\n" for label, value in sorted(lines)
    ).encode()


def verifier_text() -> bytes:
    """The text of `stage-verify.py`."""
    return Path(verifier.__file__).read_bytes()


def is_known_verifier(text: bytes) -> bool:
    """Whether a `stage-verify.py` is as this version writes it."""
    return text == verifier_text()


def finish_bundle(
    root: Path, lock: Lockfile, request: bytes, facts: Iterable[tuple[str, str]]
) -> Bundle:
    """Writes all files beside the payload, the tag manifest last.

    The payload is on the disk already.

    Args:
        request: the manifest's text, for `stage.yaml`.
        facts: for `bag_info_text`.
    """
    if not lock.is_complete:
        raise AssertionError("a bundle is finished only with a complete lock")

    (root / PAYLOAD).mkdir(exist_ok=True)
    write_atomically(root / LOCK, lock.pieces())  # first: then its id is known
    texts: dict[str, bytes | Iterable[bytes]] = {
        BAGIT: BAGIT_TEXT,
        BAG_INFO: bag_info_text(lock, facts),
        MANIFEST: payload_manifest(lock),
        REQUEST: request,
        VERIFIER: verifier_text(),
    }
    for name, text in texts.items():
        write_atomically(root / name, text)
    digests = {name: hash_file(root / name).sha256 for name in (LOCK, *texts)}
    write_atomically(root / TAG_MANIFEST, manifest_text(digests))
    (root / FETCH_PARTIAL).unlink(missing_ok=True)
    sync_folder(root)
    return Bundle(root, lock, lock.id)


_ERRORS: dict[int, type[StageError]] = {
    error.exit_code: error for error in (DamageError, UsageError, PolicyError, IncompleteError)
}


@contextmanager
def _errors() -> Iterator[None]:
    """Inside it, `CannotVerify` is the `StageError` of its exit code."""
    try:
        yield
    except CannotVerify as error:
        raise _ERRORS[error.exit_code](error.message, error.remedy) from None


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    bundle_id: str | None = None,
    state: Path | None = None,
    note: Callable[[str], object] | None = None,
    resume: bool = True,
    progress: Callable[[int], object] | None = None,
) -> VerificationReport:
    """Verifies a bundle. Damage is a finding; a bundle that cannot be examined is an exception.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: processes that read; None: one for each core that this process may use.
        bundle_id: the id that the bundle must have, 64 hex digits. Another bundle is one finding,
            and its payload is not read.
        state: the folder of journals (`verifier.state_folder`), for a receipt and to resume; None:
            keep nothing.
        note: prints a line: what is resumed, or why nothing can be kept.
        resume: whether to use the journal of an interrupted verification.
        progress: called with the number of payload bytes just read.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
        PolicyError: a sound lock with a path that may not be in a bundle.
        IncompleteError: a process that read was ended from outside, or by its limits.
    """
    with _errors():
        return verifier.verify(root, level, jobs, bundle_id, state, note, resume, progress)


def verify_shown(
    root: Path,
    level: str,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    bundle_id: str | None = None,
    state: Path | None = None,
    resume: bool = True,
) -> VerificationReport:
    """`verify` with a bar, where bytes are read.

    Raises:
        StageError: as for `verify`.
    """
    check_is_bundle(root)
    if level == "fast":
        return verify(root, "fast", bundle_id=bundle_id)
    with reporter.bytes_bar("verify", announced_size(root)) as bar:
        return verify(
            root,
            jobs=jobs,
            bundle_id=bundle_id,
            state=state,
            note=reporter.note,
            resume=resume,
            progress=bar,
        )


def check_outputs(root: Path, files: Mapping[str, Path | None]) -> None:
    """Checks before hours of reading that files can be written.

    Args:
        files: option -> the file that it names.

    Raises:
        UsageError: one is in the bundle, is a folder, or has none.
    """
    with _errors():
        for option, path in files.items():
            verifier.check_output(option, path, root)


def failure_of(report: VerificationReport) -> type[StageError]:
    """The error of a report with findings: where only rights to read are missing, no damage."""
    return _ERRORS[report.exit_code]
