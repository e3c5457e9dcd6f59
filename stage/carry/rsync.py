"""The rsync calls of a push, each with the options its case needs.

`--append-verify` resumes inside a file that is cut short. It sends the file again if its beginning
is damaged, and leaves files of full length alone. Plain rsync sends files that differ in size or
time. `--checksum` finds a flipped bit under an unchanged size and time, and repairs it, but not
together with `--append-verify`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stage.bundle.bundle import SEAL, TAG_FILES
from stage.carry.remote import RemoteShell
from stage.errors import IncompleteError, UsageError, as_shown

_MIN_RSYNC = (3, 1)  # --info=progress2; --append-verify is older
_PATIENCE_S = 5.0  # how long a terminated rsync may take to end


@dataclass(frozen=True)
class Transfer:
    """The rsync calls of a push. `-s`: names go over the protocol, not through a shell there."""

    remote: RemoteShell
    root: Path
    quiet: bool

    def replaced(self) -> list[str]:
        """Files at the target that `append` and `update` would change: of another size or time."""
        changes = self._listed_changes("--dry-run")
        return [
            name
            for change, name in changes
            if change[1:2] == "f" and change[:1] in "<>" and "+" not in change
        ]

    def append(self, names: Sequence[str] | None = None) -> None:
        """Sends missing files and resumes inside files that are cut short.

        Only this call writes into existing files; the others replace a file by a new one.

        Args:
            names: only these; None: all.
        """
        self._run("--append-verify", *self._without_seal(), names=names)

    def update(self) -> None:
        """Sends files of another size or time, which `append` leaves alone."""
        self._run(*self._without_seal())

    def remove_extra(self) -> list[str]:
        """Removes paths at the target that the bundle does not have. Sends nothing.

        Returns:
            The paths removed; a folder ends in `/`.
        """
        changes = self._listed_changes("--delete", "--existing", "--ignore-existing")
        return sorted(name for change, name in changes if change.startswith("*deleting"))

    def _listed_changes(self, *options: str) -> list[tuple[str, str]]:
        """The itemized changes of one call (rsync(1), --itemize-changes) and their paths."""
        output = self._run(
            *options, "-8", "--out-format=%i|%n", *self._without_seal(), capture=True
        )
        return [(line.partition("|")[0], line.partition("|")[2]) for line in output.split("\n")]

    def finish(self) -> None:
        """Sends the tag files, the tag manifest and the signature last: now it is a bundle.

        They are compared by checksum: another bundle's lock may have the same size and time.
        """
        self._run(
            "--checksum",
            names=[name for name in (*TAG_FILES, *SEAL) if (self.root / name).is_file()],
        )

    def repair(self, paths: Sequence[str]) -> None:
        """Compares these files by checksum, and sends those that differ."""
        self._run("--checksum", names=paths)

    @staticmethod
    def _without_seal() -> list[str]:
        return [f"--exclude=/{name}" for name in SEAL]

    def _run(self, *options: str, names: Sequence[str] | None = None, capture: bool = False) -> str:
        """Runs rsync.

        Args:
            names: the files to compare; None: all.
            capture: return its output instead of showing it.

        Raises:
            IncompleteError: it failed; files that were sent are kept.
        """
        # u+w: files of a store are read-only here, but the next push may have to append to them.
        command = ["rsync", "-rtsO", "--chmod=Fu+w", "--partial", *options]
        if sys.stderr.isatty() and not self.quiet and not capture:
            command.append("--info=progress2")
        if self.remote.target.host:
            command += ["-e", shlex.join([*shlex.split(self.remote.ssh), *self.remote.options])]
        if names is not None:
            command += ["--from0", "--files-from=-"]
        # An absolute path: rsync reads `run-12:00` as a folder on the host `run-12`.
        command += [f"{self.root.absolute()}/", self.remote.rsync_target]
        listed = "".join(f"{name}\0" for name in names or ()).encode()
        code, output = _run_to_end(command, listed, capture)
        if code != 0:
            what, remedy = _MEANING.get(code, ("see above", _ABOVE))
            if code < 0:
                what, remedy = f"killed by signal {-code}", _AGAIN
            remedy = remedy.format(there=self.remote.by_hand, bundle=shlex.quote(str(self.root)))
            raise IncompleteError(
                f"{self.remote.target}: rsync ended with {code} ({what}). Files that arrived are "
                "kept.",
                remedy,
            )
        return os.fsdecode(output)


def _run_to_end(command: list[str], listed: bytes, capture: bool) -> tuple[int, bytes]:
    """Runs a command; returns its exit code and output.

    If we are interrupted, rsync gets SIGTERM: its remote half then keeps the partial file.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if capture else sys.stderr
    ) as running:
        try:
            output, _ = running.communicate(listed)
        except BaseException:
            running.terminate()
            try:
                running.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                running.kill()
            raise
        return running.returncode, output or b""


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


def check_rsync() -> None:
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
