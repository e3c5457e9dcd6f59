"""One hostile input: how it is made, which command reads it, and the result that must follow.

For any input the command ends with the promised exit code. Its message names the object and the
remedy. It prints no terminal control codes. Files outside its folder stay unchanged.
"""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import stage.staging.sources.source
from stage.cli import main
from stage.download.retry import RetryPolicy
from tests.stage.bundles import make_bundle
from tests.support.rights import as_another_user
from tests.support.servers.liar import Liar, lying

# A command may write to these names in its folder; all other files must stay unchanged.
MAY_WRITE: Mapping[str, set[str]] = {
    "fetch": {"bundle", "m.lock"},
    "lock": {"m.lock"},
    "patch": {"patch"},
    "apply": {"bundle"},
    "verify": set(),
    "show": set(),
    "sign": set(),
    "init": set(),
    "env": set(),
    "push": set(),
}
MEMORY = 3 * 2**30  # bytes of address space: a bomb hits this limit, not the machine
TIMEOUT_S = 60
# These servers never recover: with the patience for a real network, a case would take a minute.
IMPATIENT = """
from functools import partial
import stage.staging.sources.source
from stage.cli import main
from stage.download.retry import RetryPolicy
stage.staging.sources.source.RetryPolicy = partial(RetryPolicy, attempts=2, first_s=0.01)
main()
"""


@dataclass
class Place:
    """The folder of a case, and a lying server if the case needs one."""

    folder: Path
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)
    _liar: Liar | None = None

    @property
    def liar(self) -> Liar:
        """A server of its own for each case."""
        if self._liar is None:
            self._liar = self.stack.enter_context(lying())
        return self._liar

    def write(self, name: str, data: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def bundle(self) -> Path:
        """A sound bundle, for the case to change."""
        return make_bundle(self.folder / "bundle", big=False).root


@dataclass(frozen=True)
class Case:
    """A hostile input.

    Attributes:
        code: the exit code of the command.
        says: parts of the message (all of them must be printed).
        prepare: sets the case up, and returns the arguments of `stage`.
        how: `here` (in this process), `process` (in its own, with little memory), `nobody` (the
            same, without root's right to read everything).
        after: checks more conditions afterwards.
    """

    name: str
    code: int
    says: tuple[str, ...]
    prepare: Callable[[Place], list[str]]
    how: str = "here"
    after: Callable[[Place], None] | None = None


def run(case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a case and checks the promises of every case; returns the output."""
    arguments = case.prepare(place)
    before = snapshot(place.folder)
    monkeypatch.chdir(place.folder)
    if case.how == "here":
        code, printed, _ = _here(arguments, place, monkeypatch)
    else:
        done = in_a_process(arguments, case, place)
        code, printed = done.returncode, done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    assert code == case.code, f"exit code {code}: {printed}"
    for words in case.says:
        assert words in printed, printed
    if code:
        problem, arrow, remedy = printed.partition("\n  -> ")
        assert "error: " in problem and arrow and remedy.strip(), f"without a remedy: {printed}"
    assert all(c.isprintable() or c == "\n" for c in printed), ascii(printed)
    may_write = MAY_WRITE[arguments[0]]
    after = snapshot(place.folder)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    outside = {path for path in changed if path.split("/")[0] not in may_write}
    assert not outside, f"changed outside: {outside}"
    if code and arguments[0] == "fetch":
        assert not (place.folder / "bundle" / "tagmanifest-sha256.txt").exists(), "looks finished"
    if case.after is not None:
        case.after(place)
    return printed


def printed(arguments: list[str], case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of the command on stdout, run as the case requires."""
    if case.how == "here":
        return _here(arguments, place, monkeypatch)[2]
    return in_a_process(arguments, case, place).stdout


def _here(
    arguments: list[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Returns the exit code, the whole output, and the part on stdout."""
    for name, value in _environment(place).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        stage.staging.sources.source, "RetryPolicy", partial(RetryPolicy, attempts=2, first_s=0.01)
    )
    done = CliRunner().invoke(main, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output, done.stdout


def in_a_process(
    arguments: list[str], case: Case, place: Place, command: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `stage`, or another command, in a process with little memory."""

    def limited() -> None:
        if sys.platform == "linux":  # elsewhere, libraries take more
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    words = as_another_user() if case.how == "nobody" else []
    return subprocess.run(
        [*words, *(command or [sys.executable, "-c", IMPATIENT]), *arguments],
        cwd=place.folder,
        env={**os.environ, **_environment(place)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=limited,
    )


def _environment(place: Place) -> dict[str, str]:
    home = {"HOME": str(place.folder.parent), "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    return {**home, **place.environment}


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Path -> kind, size and content (or link target) of all files in the folder and beside it."""
    found = {}
    # By descriptors: the names together may be too long for one path.
    for place, folders, files, descriptor in os.fwalk(folder.parent):
        for name in (*folders, *files):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(name, dir_fd=descriptor)
            elif stat.S_ISREG(status.st_mode) and status.st_size < 2**20:
                with suppress(PermissionError):
                    file = os.open(name, os.O_RDONLY, dir_fd=descriptor)
                    content = hashlib.sha256(os.read(file, 2**20)).hexdigest()
                    os.close(file)
            path = os.path.relpath(os.path.join(place, name), folder)  # noqa: PTH118
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            found[path] = (stat.S_IFMT(status.st_mode), size, content)
    return found
