"""The rsync calls of a push, each with the options its case needs.

`--append-verify` goes on inside a file that is cut short and sends it again if its beginning was damaged; it leaves
files alone that are as long as they should be. Plain rsync sends what differs in size or time. `--checksum`, on its
own, finds a flipped bit under an unchanged size and time; together with `--append-verify` it would not mend it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stage.bundle import SEAL, TAG_FILES
from stage.errors import IncompleteError, UsageError, as_shown
from stage.remote import Place

_MIN_RSYNC = (3, 1)  # --info=progress2; --append-verify is older
_PATIENCE_S = 5.0  # with an rsync that was asked to end


@dataclass(frozen=True)
class Transfer:
    """The rsync calls of a push. `-s`: names go over the protocol, not through a shell there."""

    place: Place
    root: Path
    quiet: bool

    def replaced(self) -> list[str]:
        """The files that are there, and that `append` and `update` would change: of another size or time."""
        said = self._run("--dry-run", "-8", "--out-format=%i|%n", *self._but_the_last(), hear=True)
        changes = (line.partition("|")[::2] for line in said.split("\n"))
        return [name for what, name in changes if what[1:2] == "f" and what[:1] in "<>" and "+" not in what]

    def append(self, names: Sequence[str] | None = None) -> None:
        """Brings what is missing and goes on inside what is cut short; what was damaged of that is sent again.

        The only call that writes into files which are there; the others put a new one in an old one's place.

        Args:
            names: only these; None: all.
        """
        self._run("--append-verify", *self._but_the_last(), names=names)

    def update(self) -> None:
        """Brings what is of another size or time, which appending leaves alone."""
        self._run(*self._but_the_last())

    def remove_extra(self) -> list[str]:
        """Removes what is there and not here, and brings nothing; a folder's path ends in `/`."""
        brings_nothing = ("--existing", "--ignore-existing")
        said = self._run("--delete", *brings_nothing, "-8", "--out-format=%i|%n", *self._but_the_last(), hear=True)
        changes = (line.partition("|")[::2] for line in said.split("\n"))
        return sorted(name for what, name in changes if what.startswith("*deleting"))

    def finish(self) -> None:
        """Brings the tag manifest and the signature, the last by their names: now it is a bundle.

        And, by their bytes, what lies beside the payload: another bundle's lock may be as long, and of the same second.
        """
        self._run("--checksum", names=[name for name in (*TAG_FILES, *SEAL) if (self.root / name).is_file()])

    def repair(self, paths: Sequence[str]) -> None:
        """Compares these files by checksum, and brings what differs."""
        self._run("--checksum", names=paths)

    @staticmethod
    def _but_the_last() -> list[str]:
        return [f"--exclude=/{name}" for name in SEAL]

    def _run(self, *options: str, names: Sequence[str] | None = None, hear: bool = False) -> str:
        """Runs rsync; `hear`: returns what it says in place of showing it."""
        # Files shared with other bundles are read-only here; there, the next push may have to append to them.
        command = ["rsync", "-rtsO", "--chmod=Fu+w", "--partial", *options]
        if sys.stderr.isatty() and not self.quiet and not hear:
            command.append("--info=progress2")
        if self.place.target.host:
            command += ["-e", self.place.ssh]
        if names is not None:
            command += ["--from0", "--files-from=-"]
        # Absolute: rsync takes `run-12:00` for a folder on the host `run-12`.
        command += [f"{self.root.absolute()}/", self.place.rsync_target]
        listed = "".join(f"{name}\0" for name in names or ()).encode()
        code, said = _ended(command, listed, hear)
        if code != 0:
            raise IncompleteError(
                f"{self.place.target}: rsync ended with {code} ({_RSYNC.get(code, 'see above')}). What came is kept.",
                "Run the same command again: it goes on where it stopped.",
            )
        return os.fsdecode(said)


def _ended(command: list[str], listed: bytes, hear: bool) -> tuple[int, bytes]:
    """Runs it to its end. Where that is ours, too: asked to end, so that its other half keeps what came."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if hear else sys.stderr) as running:
        try:
            said, _ = running.communicate(listed)
        except BaseException:
            running.terminate()
            try:
                running.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                running.kill()
            raise
        return running.returncode, said or b""


_RSYNC = {
    11: "reading or writing failed, often a full disk or quota there",
    12: "the connection broke",
    20: "interrupted",
    23: "some files could not be written",
    30: "no bytes for a while",
    255: "no connection",
}


def require_rsync() -> None:
    """Says so if rsync here cannot do what is asked of it (macOS brings one that cannot)."""
    remedy = "Install rsync 3.1 or newer (apt install rsync; brew install rsync)."
    if shutil.which("rsync") is None:
        raise UsageError("There is no rsync on PATH.", remedy)
    text = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    version = re.match(r"rsync\s+version v?(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < _MIN_RSYNC:
        first = (text.splitlines() or ["something else"])[0]
        raise UsageError(f"The rsync on PATH is too old or another program: {as_shown(first)}.", remedy)
