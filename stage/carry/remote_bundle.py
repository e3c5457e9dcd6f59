"""The target of a push: what is in the folder there, what can verify a bundle there, its findings.

All questions are small shell scripts, so the remote host needs nothing of ours.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.bundle.bundle import VERIFIER
from stage.bundle.receipt import record, wait_until_at_rest
from stage.bundle.verify import verify
from stage.carry.remote import RemoteShell
from stage.errors import IncompleteError, UsageError
from stage.files import read_file


@dataclass(frozen=True)
class RemoteState:
    """What the probe found at the target.

    Attributes:
        state: of the folder: `absent`, `empty`, `begun` or `finished`.
        lock_sha256: digest of the lock there; None: there is no lock, or no `sha256sum`.
        name: the name of the bundle there, from its lock; None where that cannot be read.
        verifiers: the programs that can verify there, the best first: `stage`, `stage-verify.py`.
    """

    state: str
    lock_sha256: str | None
    name: str | None
    verifiers: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def has(self, bundle_id: str) -> bool:
        return self.lock_sha256 == bundle_id

    def describe(self) -> str:
        return {"finished": "a bundle is there", "begun": "part of a bundle is there"}.get(
            self.state, "nothing there"
        )


# `state=` is a `RemoteState.state`. `file` and `other` belong to somebody: never written to.
_PROBE = """
echo begin=yes
d={folder}
if [ ! -e "$d" ]; then echo state=absent
elif [ ! -d "$d" ]; then echo state=file
elif [ -z "$(ls -A "$d")" ]; then echo state=empty
elif [ -f "$d/{tags}" ]; then echo state=finished
elif [ -f "$d/{bagit}" ] || [ -f "$d/{info}" ]; then echo state=begun
else echo state=other; fi
if [ -f "$d/{lock}" ]; then
  echo "lock=$(sha256sum "$d/{lock}" 2>/dev/null | cut -c1-64)"
  echo "end_of_lock=$(tail -c 2000 "$d/{lock}" 2>/dev/null | tail -n 2)"
fi
if command -v rsync >/dev/null 2>&1; then echo rsync=yes; fi
if stage --version >/dev/null 2>&1; then echo stage=yes; fi
if python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null
then echo python=yes; fi
echo end=yes
"""


def inspect_remote(remote: RemoteShell, root: Path) -> RemoteState:
    """Looks at the target before anything is sent.

    Raises:
        UsageError: a file or somebody's folder is there; or there is no rsync.
        IncompleteError: no connection, or no shell.
    """
    script = _PROBE.format(
        folder=shlex.quote(remote.folder),
        tags=layout.TAG_MANIFEST,
        bagit=layout.BAGIT,
        info=layout.BAG_INFO,
        lock=layout.LOCK,
    )
    output = remote.run(script, f"{remote.target}: cannot look there")
    greeting, begins, output = output.rpartition("begin=yes\n")
    answers = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    state = answers.get("state", "")
    if not begins or "end" not in answers or not state:
        raise IncompleteError(
            f"{remote.target}: its shell does not answer as `sh` does.",
            f"Give a login node, where `{remote.by_hand}'echo a; echo b'` prints two lines.",
        )
    if greeting:
        raise UsageError(
            f"{remote.target}: its shell prints text before each command: "
            f"{' '.join(greeting.split())[:60]!r}. rsync takes that for its own and ends.",
            "Print it in terminals only: in ~/.bashrc there, put `[ -t 1 ] &&` before the command "
            f"that prints it. `{remote.by_hand}true` must print nothing.",
        )
    if state in ("file", "other"):
        what = "a file" if state == "file" else "a folder with other things in it"
        raise UsageError(
            f"{remote.target}: is {what}, not a bundle.",
            f"Give a new folder: {remote.target}/bundle",
        )
    if "rsync" not in answers:
        raise UsageError(
            f"{remote.target}: there is no rsync there.",
            "Load or install it there, or carry the folder another way.",
        )
    return RemoteState(
        state,
        answers.get("lock"),
        _name(answers.get("end_of_lock", "")),
        _verifiers(remote, answers, root),
    )


def _name(end_of_lock: str) -> str | None:
    """The bundle's name. Keys of a lock are sorted and `name` is the last, on its own line."""
    try:
        name = json.loads(f"{{{end_of_lock}}}")["name"]
    except (ValueError, KeyError):
        return None
    return name if isinstance(name, str) else None


def _verifiers(remote: RemoteShell, answers: dict[str, str], root: Path) -> tuple[str, ...]:
    """The programs that can verify at the target, the best first.

    The bundle's own script runs there only if a version of airlift wrote it: the maker of the
    bundle could have put any program there.
    """
    has = {
        "stage": remote.target.host is None or "stage" in answers,
        VERIFIER: "python" in answers and _has_known_verifier(root),
    }
    return tuple(name for name, is_there in has.items() if is_there)


def _has_known_verifier(root: Path) -> bool:
    try:
        return layout.is_known_verifier(read_file(root / VERIFIER, follow=False))
    except OSError:
        return False


def files_to_replace(remote: RemoteShell) -> frozenset[str]:
    """The files at the target that rsync must reremote, never append to; relative to the folder.

    A file with several names (in a store, or a `cp -al` snapshot) would change under all of them.
    A read-only file cannot be opened to append.

    Raises:
        IncompleteError, UsageError: the search failed.
    """
    output = remote.run(
        f"cd {shlex.quote(remote.folder)} && "
        "find . -type f \\( -links +1 -o ! -perm -200 \\) -print0",
        f"{remote.target}: cannot find out which files there have other names (hard links)",
    )
    return frozenset(name.removeprefix("./") for name in output.split("\0") if name)


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
    if not verifiers:
        raise _not_verified(remote)
    program, *others = verifiers
    if remote.target.host is None:
        wait_until_at_rest(Path(remote.target.folder))
        found = verify(Path(remote.target.folder), state=state)
        with suppress(OSError):  # the verdict holds without
            record(state, found)
        return program, found.to_json()
    command = "stage verify" if program == "stage" else f"python3 -I {remote.inside(VERIFIER)}"
    done = remote.ask(f"{command} --json {shlex.quote(remote.folder)}")
    if done.returncode == 2 and others:  # an older `stage`, which has printed why
        return verify_remote(remote, tuple(others), state)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = None
    if (
        done.returncode not in (0, 1)
        or not isinstance(report, dict)
        or not isinstance(report.get("findings"), list)
    ):
        how = "the connection broke" if done.returncode == 255 else f"exit code {done.returncode}"
        raise IncompleteError(
            f"{remote.target}: all files are sent, but `{program}` could not verify them there "
            f"({how}).",
            f"Run it on {remote.target.host}: {command} {shlex.quote(remote.folder)}",
        )
    return program, report


def _not_verified(remote: RemoteShell) -> IncompleteError:
    """The target has no verifier. `sha256sum` can check the bytes there, but nobody ran it yet."""
    check = f"cd {shlex.quote(remote.folder)} && sha256sum -c --quiet {TAG_AND_PAYLOAD}"
    return IncompleteError(
        f"{remote.target}: all files are sent, but the copy is NOT VERIFIED: {NO_VERIFIER}.",
        f"Check the bytes with coreutils; no output means that they are right: "
        f"{remote.by_hand}{shlex.quote(check)}\n"
        "     (it does not report extra files). Or make python3 available to "
        f"`{remote.by_hand}python3`, and push again.",
    )


NO_VERIFIER = (
    "there is neither `stage` nor a python3 (3.6 or newer) that can run this bundle's "
    f"{VERIFIER} there"
)
TAG_AND_PAYLOAD = f"{layout.TAG_MANIFEST} {layout.MANIFEST}"
