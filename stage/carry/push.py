"""`stage push`: sends a finished bundle to another machine or disk, and verifies it there.

This bundle is read first, unless a receipt says that it was read already: its damage must not
replace a sound file (docs/adr/0007). Then rsync appends to files that are cut short there, and
sends all others that differ, over one ssh connection, the tag manifest last: until all files are
there, the remote bundle is unfinished. Then the remote host verifies every byte. Damaged files are
sent once more, compared by checksum (a bit flip keeps size and time), and verified again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    LOCK,
    MANIFEST,
    SEAL,
    TAG_FILES,
    TAG_MANIFEST,
    VERIFIER,
    Bundle,
    failure_of,
    is_known_verifier,
    verify,
)
from stage.bundle.receipt import Receipt, find_receipt, record, wait_until_at_rest
from stage.carry.ssh import QUIET_S, PushTarget, RemoteShell, connected, socket_folder
from stage.errors import DamageError, IncompleteError, UsageError, as_shown, quoted
from stage.files import hash_file, human_count, join_limited, read_file, sha256_of_bytes
from stage.paths import printable
from stage.progress import Reporter

_SHOWN = 10  # names in one line
# The tag manifest and its signature are sent last: until then the bundle there is unfinished.
_WITHOUT_SEAL = [f"--exclude=/{name}" for name in SEAL]
_MIN_RSYNC = (3, 1)  # --info=progress2; --append-verify is older
_PATIENCE_S = 5.0  # for a terminated rsync, which still keeps what came of a file (--partial)
_NO_VERIFIER = (
    "there is neither `stage` nor a python3 (3.6 or newer) that can run this bundle's "
    f"{VERIFIER} there"
)


@dataclass(frozen=True)
class PushOutcome:
    """What a push did.

    Attributes:
        verified_with: `stage` or `stage-verify.py`; "": it was not verified there.
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
    delete: Literal["nothing", "payload", "all"],
    reporter: Reporter,
    quiet: bool,
    state: Path,
    remote: RemoteShell | None = None,
    verify_there: bool = True,
) -> PushOutcome:
    """Sends a bundle to its target and verifies it there.

    Args:
        ssh: the command for all connections.
        delete: which files that the bundle does not have are removed at the target: those in
            `data/`, where only bundles have files, or all.
        state: the folder of verification receipts (`stage.bundle.verifier.state_folder`).
        remote: a connection to that host that is open already.
        verify_there: False: another step will; the outcome then has no report.

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
            f"stage verify {quoted(root)}",
        )
    _check_not_itself(root, target)
    _check_rsync()
    opened = connected(target, ssh) if remote is None else nullcontext(remote)
    with opened as there:
        remote = replace(there, target=target)
        found = inspect_remote(remote, root)
        _check_not_another(root, target, found, bundle)
        first = found.verifiers[0] if found.verifiers else "none"
        reporter.note(f"{target}: {found.state}; verifier there: {first}")
        if verify_there and not found.verifiers:
            reporter.warn(f"{target}: the copy will not be verified: {_NO_VERIFIER}")
        _check_sound_here(bundle, state, reporter)
        _send(remote, bundle, found, reporter, delete=delete, quiet=quiet)
        if not verify_there:
            return PushOutcome(target, bundle.id, "", 0, {})
        if found.verifiers:
            reporter.note(f"{target}: every byte is read there now; this can take long")
        verifier, report = verify_remote(remote, found.verifiers, state)
        damaged = _damaged_of(bundle, report)
        if damaged:
            files = human_count(len(damaged), "file")
            reporter.warn(f"{target}: {files} not as sent; sending again with checksums")
            run_rsync(remote, root, "--checksum", names=damaged, quiet=quiet)
            verifier, report = verify_remote(remote, found.verifiers, state)
    return PushOutcome(target, bundle.id, verifier, len(damaged), report)


def _check_not_itself(root: Path, target: PushTarget) -> None:
    here, there = root.resolve(), Path(target.folder).resolve()
    if target.host is None and (here == there or here in there.parents or there in here.parents):
        raise UsageError(
            f"{target}: lies inside {root}, or {root} inside it.", "Give another folder."
        )


def _check_rsync() -> None:
    """Checks that rsync here is new enough. That of macOS is not.

    Raises:
        UsageError: there is no rsync, or it is too old, or it is another program.
    """
    remedy = "Install rsync 3.1 or newer (apt install rsync; brew install rsync)."
    if shutil.which("rsync") is None:
        raise UsageError("There is no rsync on PATH.", remedy)
    text = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    version = re.match(r"rsync\s+version v?(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < _MIN_RSYNC:
        first = (text.splitlines() or ["something else"])[0]
        raise UsageError(
            f"The rsync on PATH is too old or another program: {as_shown(first)}.", remedy
        )


def _check_not_another(root: Path, target: PushTarget, found: RemoteState, bundle: Bundle) -> None:
    """Refuses to turn a bundle of another name into this one: the target may be a typing error.

    Raises:
        UsageError: a bundle of another name is there.
    """
    if found.name is None or found.name == bundle.lock.name:
        return
    beside = PushTarget(target.host, f"{target.folder}-{bundle.lock.name}")
    remove = shlex.join(["rm", "-r", target.folder])
    raise UsageError(
        f"{target}: another bundle is there: {printable(found.name)}; "
        f"{root} is {printable(bundle.lock.name)}. Nothing was changed.",
        "Give it a folder of its own: "
        f"{shlex.join(['stage', 'push', str(root), str(beside)])}   "
        "(for runner submit: another `folder:` in clusters.yaml; or, if that other bundle "
        f"is not needed any more, remove it there: {remove})",
    )


def _check_sound_here(bundle: Bundle, state: Path, reporter: Reporter) -> None:
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
        record(state, report)
    if not report.ok:
        raise _damaged_here(bundle, [f.path for f in report.findings], "Nothing was sent.")


def _damaged_here(bundle: Bundle, damaged: Sequence[str], done: str) -> DamageError:
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    root = quoted(bundle.root)
    return DamageError(
        f"{bundle.root}: damaged here: {damaged[0]}{more}: not as fetched. {done}",
        f"Repair this copy, then push again: stage fetch MANIFEST -o {root}   (or from a sound "
        f"copy: stage verify {root} --report FILE, and where that copy is: "
        "stage patch COPY --report FILE -o PATCH)",
    )


def _send(
    remote: RemoteShell,
    bundle: Bundle,
    found: RemoteState,
    reporter: Reporter,
    *,
    delete: Literal["nothing", "payload", "all"],
    quiet: bool,
) -> None:
    """Sends all files, the tag manifest last; with `delete`, removes others there."""
    root, target = bundle.root, remote.target
    # The first file shows that it is ours, should the disk end after some folders and files.
    script = f"mkdir -p {quoted(remote.folder)} && : >>{remote.inside(BAGIT)}"
    if found.lock_sha256 != bundle.id:  # until all is there, it is no finished bundle
        script += f" && rm -f {' '.join(remote.inside(name) for name in SEAL)}"
    remote.run(script, f"{target}: cannot make the folder, or remove an old tag manifest")
    is_new = found.state == "nothing there"
    names = None if is_new else _appendable(remote, bundle)
    # Resumes inside files that are cut short. The other calls replace a file by a new one.
    run_rsync(remote, root, "--append-verify", *_WITHOUT_SEAL, names=names, quiet=quiet)
    run_rsync(remote, root, *_WITHOUT_SEAL, quiet=quiet)
    if delete != "nothing" and not is_new:
        removed = _remove_others(remote, root, in_payload_only=delete == "payload")
        if removed:
            shown = join_limited(removed, _SHOWN)
            reporter.note(f"{target}: removed there, as not of this bundle: {shown}")
    # By checksum: another bundle's lock may have the same size and time.
    last = [name for name in (*TAG_FILES, *SEAL) if (root / name).is_file()]
    run_rsync(remote, root, "--checksum", names=last, quiet=quiet)
    reporter.note(f"{target}: all files are sent")


def _appendable(remote: RemoteShell, bundle: Bundle) -> list[str]:
    """The files of the bundle that rsync may append to at the target.

    What has other names there (in a store, a snapshot) would change under all of them. What is
    read-only cannot be opened to append.
    """
    find = "find . -type f \\( -links +1 -o ! -perm -200 \\) -print0"
    problem = f"{remote.target}: cannot find out which files there have other names (hard links)"
    shared = remote.run(f"cd {quoted(remote.folder)} && {find}", problem).split("\0")
    files = {f"./{file.path}": file.path for file in bundle.lock.files}
    return [files[path] for path in files.keys() - set(shared)]


def _remove_others(remote: RemoteShell, root: Path, *, in_payload_only: bool) -> list[str]:
    """Removes files there that the bundle does not have, and sends none; returns their names."""
    only = ["--include=/data/***", "--exclude=/*"] if in_payload_only else []
    options = ("--delete", "--existing", "--ignore-existing", "-8", "--out-format=%i|%n")
    changes = run_rsync(remote, root, *options, *_WITHOUT_SEAL, *only, quiet=True, capture=True)
    lines = sorted(line for line in changes.split("\n") if line.startswith("*deleting"))
    return [printable(line.partition("|")[2]) for line in lines]


def _damaged_of(bundle: Bundle, report: dict[str, Any]) -> list[str]:
    """Files of the bundle that a remote report names and that can be sent again.

    Raises:
        DamageError: they are damaged here, on a disk that changed them after they were read.
    """
    expected = {file.path: file.sha256 for file in bundle.lock.files}
    ours = {*expected, *TAG_FILES, *SEAL}
    paths = [finding["path"] for finding in report["findings"]]
    damaged = [path for path in paths if path in ours and (bundle.root / path).is_file()]
    here = [
        path
        for path in damaged
        if path in expected and hash_file(bundle.root / path).sha256 != expected[path]
    ]
    if here:
        raise _damaged_here(bundle, here, "The copy there has that damage too.")
    return damaged


def run_rsync(
    remote: RemoteShell,
    root: Path,
    *options: str,
    names: Iterable[str] | None = None,
    quiet: bool,
    capture: bool = False,
) -> str:
    """Runs rsync from a bundle to the target.

    Args:
        names: the files to compare; None: all.
        capture: return its output instead of showing it.

    Raises:
        IncompleteError: it failed; files that were sent are kept.
    """
    # -s: names go over the protocol, not through a shell there. u+w: files of a store are
    # read-only here, but the next push may have to append to them.
    command = ["rsync", "-rtsO", "--chmod=Fu+w", "--partial", *options]
    if sys.stderr.isatty() and not quiet:
        command.append("--info=progress2")
    command += remote.rsync_options()
    if names is not None:
        command += ["--from0", "--files-from=-"]
    # An absolute path: rsync reads `run-12:00` as a folder on the host `run-12`.
    command += [f"{root.absolute()}/", remote.rsync_target]
    listed = "".join(f"{name}\0" for name in names or ()).encode()
    output = subprocess.PIPE if capture else sys.stderr
    with (
        _alone(remote.target) as lock,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, pass_fds=(lock.fileno(),)
        ) as running,
    ):
        print(os.getpid(), running.pid, file=lock, flush=True)
        try:
            while True:
                try:
                    printed, _ = running.communicate(listed, timeout=QUIET_S)
                    break
                except subprocess.TimeoutExpired:
                    remote.check_alive()
        except BaseException:  # SIGTERM: its remote half then keeps the partial file
            running.terminate()
            try:
                running.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                running.kill()
            raise
    code = running.returncode
    if code == 0:
        return os.fsdecode(printed or b"")
    if code in _OF_SSH and remote.log and remote.log.stat().st_size:
        raise remote.fault()
    what, remedy = _MEANING.get(code, ("see above", _ABOVE))
    if code < 0:
        what, remedy = f"killed by signal {-code}", _AGAIN
    raise IncompleteError(
        f"{remote.target}: rsync ended with {code} ({what}). Files that arrived are kept.",
        remedy.format(there=remote.by_hand, bundle=quoted(root)),
    )


@contextmanager
def _alone(target: PushTarget) -> Iterator[IO[str]]:
    """Lets one rsync of this machine at a time send to a target.

    rsync inherits the lock, so that it holds it even if this process is killed. Then the next
    command ends it: what arrived is kept, and is not sent again.
    """
    name = sha256_of_bytes(str(target).encode())[:16]
    with open(socket_folder() / f"rsync.{name}", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            _wait_for_or_end(lock.read().split(), target)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)  # the numbers of an earlier rsync may be another program's now
        yield lock


def _wait_for_or_end(written: Sequence[str], target: PushTarget) -> None:
    """Prints what is waited for, and ends the rsync of a command that was killed.

    Args:
        written: the process numbers in the lock: of the command, then of its rsync; none while
            that command has not written them yet.
    """
    if len(written) == 2:
        command, rsync = map(int, written)
        try:
            os.kill(command, 0)  # 0 sends nothing: it asks whether that process is there
        except OSError:  # it is gone, or the number is another user's process by now
            print(f"{target}: the rsync of a killed command is ended first", file=sys.stderr)
            with suppress(ProcessLookupError):
                os.kill(rsync, signal.SIGTERM)
            return
    print(f"{target}: another command sends there: waited for", file=sys.stderr)


_AGAIN = "Run the same command again: it resumes."
_ABOVE = f"Its lines above say why: correct that, then: {_AGAIN}"
_VERSIONS = "Compare `{there}rsync --version` with `rsync --version`: both need 3.1 or newer."
_NOISE = f"`{{there}}true` must print nothing. {_VERSIONS}"
_MEMORY = f"More memory (`ulimit -v`) or processes (`ulimit -u`), here or there; then: {_AGAIN}"
_RUNS = "`{there}rsync --version` must work: load rsync in ~/.bashrc there, for all shells."
# Exit codes of rsync(1) and its errcode.h, and of the ssh that it runs: what they mean, what helps.
_MEANING = {
    1: ("an option that the rsync here or there does not know", _VERSIONS),
    2: ("what came back is not what an rsync says", _NOISE),
    3: ("a folder could not be entered or made", _ABOVE),
    4: ("something that the rsync here or there cannot do", _VERSIONS),
    5: ("the rsync there did not begin to talk", _NOISE),
    6: ("a log file could not be written", _ABOVE),
    10: ("the connection failed", _AGAIN),
    11: (
        "reading or writing failed, often a full disk or quota there",
        f"Free space or quota there, then: {_AGAIN}",
    ),
    12: (
        "the connection broke, or the rsync there ended",
        f"{_AGAIN} If it ends at once each time: {_NOISE}",
    ),
    13: ("a message could not be read or written", _AGAIN),
    14: ("a process or a pipe could not be made", _MEMORY),
    15: ("another process of rsync crashed", _MEMORY),
    16: ("another process of rsync was killed", _MEMORY),
    19: ("interrupted", _AGAIN),
    20: ("interrupted", _AGAIN),
    21: ("another process of rsync was lost", _MEMORY),
    22: ("no memory", _MEMORY),
    23: ("some files could not be read here or written there", _ABOVE),
    24: ("files of this bundle vanished while they were sent", "stage verify {bundle}"),
    30: ("no bytes for a while", _AGAIN),
    35: ("no answer for a while", _AGAIN),
    124: ("the shell there failed", _NOISE),
    125: ("the shell there was killed", _AGAIN),
    126: ("rsync may not be run there", _RUNS),
    127: ("no rsync is found there", _RUNS),
    255: ("ssh: no connection, or it broke", f"{_AGAIN} If it fails each time: {{there}}true"),
}
_OF_SSH = (10, 12, 255)  # where ssh's own words say more


@dataclass(frozen=True)
class RemoteState:
    """What the probe found at the target.

    Attributes:
        state: of the folder, in words.
        lock_sha256: digest of the lock there; None: there is no lock, or no `sha256sum`.
        name: the name of the bundle there, from its lock; None where that cannot be read.
        verifiers: the programs that can verify there, the best first: `stage`, `stage-verify.py`.
    """

    state: str
    lock_sha256: str | None
    name: str | None
    verifiers: tuple[str, ...]


# A folder that is refused belongs to something else: never written to. Keys of a lock are sorted,
# and `name` is the last, on its own line.
_PROBE = """
d={folder}
if [ ! -e "$d" ]; then echo "state=nothing there"
elif [ ! -d "$d" ]; then echo "refused=a file"
elif ! find "$d" ! -type d 2>&1 | read -r first; then echo "state=nothing there"
elif [ -f "$d/{tags}" ]; then echo "state=a bundle is there"
elif [ -f "$d/{bagit}" ] || [ -f "$d/{info}" ]; then echo "state=part of a bundle is there"
else echo "refused=a folder with other things in it"; fi
if [ -f "$d/{lock}" ]; then
  echo "lock=$(sha256sum "$d/{lock}" 2>/dev/null | cut -c1-64)"
  echo "end_of_lock=$(tail -c 2000 "$d/{lock}" 2>/dev/null | tail -n 2)"
fi
if command -v rsync >/dev/null 2>&1; then echo rsync=yes; fi
if stage --version >/dev/null 2>&1; then echo stage=yes; fi
if python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null
then echo python=yes; fi
"""


def inspect_remote(remote: RemoteShell, root: Path) -> RemoteState:
    """Looks at the target before anything is sent.

    Raises:
        UsageError: a file or a folder of something else is there; or there is no rsync.
        IncompleteError: no connection, or no shell.
    """
    script = _PROBE.format(
        folder=quoted(remote.folder),
        tags=TAG_MANIFEST,
        bagit=BAGIT,
        info=BAG_INFO,
        lock=LOCK,
    )
    output = remote.run(script, f"{remote.target}: cannot look there")
    answers = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    if "refused" in answers:
        raise UsageError(
            f"{remote.target}: is {answers['refused']}, not a bundle.",
            f"Give a new folder: {remote.target}/bundle",
        )
    if "rsync" not in answers:
        raise UsageError(
            f"{remote.target}: there is no rsync there.",
            "Load or install it there, or carry the folder another way.",
        )
    try:
        name = json.loads(f"{{{answers.get('end_of_lock', '')}}}").get("name")
    except ValueError:
        name = None
    verifiers = list[str]()
    if remote.target.host is None or "stage" in answers:
        verifiers.append("stage")
    if "python" in answers and _is_ours(root):
        verifiers.append(VERIFIER)
    return RemoteState(answers.get("state", ""), answers.get("lock"), name, tuple(verifiers))


def _is_ours(root: Path) -> bool:
    """Whether airlift wrote the bundle's own verifier: it could be any program."""
    try:
        return is_known_verifier(read_file(root / VERIFIER, follow=False))
    except OSError:
        return False


def verify_remote(
    remote: RemoteShell, verifiers: tuple[str, ...], state: Path
) -> tuple[str, dict[str, Any]]:
    """Verifies the bundle at the target, and leaves a receipt there, as `stage verify` does.

    Args:
        verifiers: `RemoteState.verifiers`.
        state: the folder of receipts of this machine, for a target that is a folder here.

    Returns:
        The program that verified, and its report as `stage verify --json` prints it.

    Raises:
        IncompleteError: nothing there can verify, or the verifier could not finish.
    """
    folder = quoted(remote.folder)
    if remote.target.host is None:
        drop_from_memory(Path(remote.target.folder).rglob("*"))
        wait_until_at_rest(Path(remote.target.folder))
        found = verify(Path(remote.target.folder), state=state)
        with suppress(OSError):  # the verdict holds without
            record(state, found)
        return "stage", found.to_json()
    for program in verifiers:
        command = "stage verify" if program == "stage" else f"python3 -I {remote.inside(VERIFIER)}"
        problem = (
            f"{remote.target}: all files are sent, but `{program}` could not verify them there"
        )
        again = f"Run it on {remote.target.host}: {command} {folder}"
        try:
            done = remote.ask(f"{command} --json {folder}")
        except IncompleteError as error:
            raise IncompleteError(f"{problem}. {error.message}", again) from None
        if done.code == 2 and program != verifiers[-1]:
            continue  # an older `stage`, which has printed why
        with suppress(ValueError, TypeError, KeyError):
            report = json.loads(done.text)
            if done.code in (0, 1) and isinstance(report["findings"], list):
                return program, report
        raise IncompleteError(f"{problem} (exit code {done.code}).", again)
    check = f"cd {folder} && sha256sum -c --quiet {TAG_MANIFEST} {MANIFEST}"
    raise IncompleteError(
        f"{remote.target}: all files are sent, but the copy is NOT VERIFIED: {_NO_VERIFIER}.",
        f"Check the bytes with coreutils; no output means that they are right: "
        f"{remote.by_hand}{quoted(check)}\n"
        "     (it does not report extra files). Or make python3 available to "
        f"`{remote.by_hand}python3`, and push again.",
    )


def drop_from_memory(paths: Iterable[Path]) -> None:
    """Writes files out and forgets their pages, so that a reader reads the disk.

    Only where the system can (Linux): elsewhere what is read may be what was just written.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with suppress(OSError):  # the verification names it
            if path.is_file() and not path.is_symlink():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def suggest_repairs(outcome: PushOutcome, bundle: Path, report: Path, ssh: str) -> list[str]:
    """Lines with commands for damage that a push could not repair.

    Args:
        report: the file with the findings of the remote verification.
        ssh: the command the push connected with.
    """
    problems = {finding["problem"] for finding in outcome.report["findings"]}
    option = ["--ssh", ssh] if ssh != "ssh" else []
    again = shlex.join(["stage", "push", str(bundle), str(outcome.target), *option])
    patch = f"{bundle.resolve().name}.patch"
    make = ["stage", "patch", str(bundle), "--report", str(report), "-o", patch]
    lines: list[str] = []
    if problems - {"extra"}:
        lines += [
            "Sent twice and still damaged: check the disk or the file system there; then: " + again,
            f"To carry only the damaged files: {shlex.join(make)}",
            f"and there: {shlex.join(['stage', 'apply', outcome.target.folder, patch])}",
        ]
    if "extra" in problems:
        lines.append(
            f"Files are there that the bundle does not have. To remove them: {again} --delete"
        )
    return lines
