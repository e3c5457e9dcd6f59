"""A power cut at any moment: no name before its bytes are on disk, no seal before all names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.digests import FileDigests
from stage.download.partial_file import SYNC_EVERY, Partial
from stage.errors import UsageError
from stage.lock.model import LockedFile
from stage.staging.sources.copy_many import MANY, copy_many
from tests.support.staging import LANDING, Laptop

# ("sync", path, "") or ("rename", from, to), in the order in which the calls ended.
Event = tuple[str, str, str]
CALL = re.compile(r"(\d+) +(fsync|rename)\((.*)")
RESUMED = re.compile(r"(\d+) +<\.\.\. (fsync|rename) resumed>(.*)")


def events(trace: Path, cwd: Path) -> Iterator[Event]:
    """The successful fsyncs and renames of a strace (`-f -y`), by absolute path."""
    begun: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        if match := CALL.fullmatch(line):
            pid, name, rest = match.groups()
            if rest.endswith("<unfinished ...>"):
                begun[pid] = rest
                continue
        elif match := RESUMED.fullmatch(line):
            pid, name, end = match.groups()
            rest = begun.pop(pid) + end
        else:
            continue
        if not rest.endswith("= 0"):
            continue
        if name == "fsync":
            yield "sync", re.match(r"\d+<(.*?)>", rest)[1], ""  # type: ignore[index]
        else:
            old, new = re.findall(r'"(.*?)"', rest)
            yield "rename", os.path.join(cwd, old), os.path.join(cwd, new)  # noqa: PTH118 - keeps an absolute path


def test_bytes_before_names_and_names_before_the_seal(laptop: Laptop) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = laptop.folder / "trace"
    command = laptop.command("fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check")
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-qq",
        "-e",
        "trace=fsync,rename",
        "-o",
        str(trace),
    ]
    subprocess.run(
        [*strace, *command],
        cwd=laptop.folder,
        env=laptop.environment(),
        check=True,
        capture_output=True,
    )

    synced: set[str] = set()
    open_names: set[Path] = set()
    landed: list[str] = []
    for what, path, target in events(trace, laptop.folder):
        if what == "sync":
            synced.add(path)
            open_names -= {name for name in open_names if str(name.parent) == path}
        elif target.startswith(f"{laptop.bundle}/"):
            assert path in synced, f"{target} got its name before its bytes were on the disk"
            if target.endswith("/tagmanifest-sha256.txt"):
                assert not open_names, "the bundle was finished before its names were on the disk"
            landed.append(os.path.relpath(target, laptop.bundle))
            open_names.add(Path(target))
    assert set(LANDING.values()) < set(landed) and landed[-1] == "tagmanifest-sha256.txt"
    folders = {str(parent) for name in landed for parent in (laptop.bundle / name).parents}
    assert {folder for folder in folders if folder.startswith(f"{laptop.bundle}/")} < synced


def test_of_many_local_files_no_name_before_the_one_sync_of_all_bytes(tmp_path: Path) -> None:
    """One fsync per file takes 0.8 ms: 80 s for 100,000 files."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    (tmp_path / "tree").mkdir()
    for number in range(MANY + 6):
        (tmp_path / "tree" / f"{number}.txt").write_text(f"text {number}\n")
    (tmp_path / "many.yaml").write_text("format: 1\nname: many\nassets:\n  tree:\n    path: tree\n")
    calls = "trace=fsync,syncfs,rename"
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-qq", "-e", calls, "-o", "trace"]
    stage = [sys.executable, "-m", "stage", "fetch", "many.yaml", "-o", "bundle"]
    environment = {**os.environ, "AIRLIFT_STORE": "none"}
    subprocess.run(
        [*strace, *stage], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    lines = [line.split(" ", 1)[1].strip() for line in (tmp_path / "trace").open()]
    named = [n for n, line in enumerate(lines) if "/data/files/tree/" in line and "rename" in line]
    syncs = [n for n, line in enumerate(lines) if line.startswith("syncfs")]
    assert len(named) == MANY + 6
    fsynced = [line for line in lines[: named[0]] if "copy-" in line and "fsync" in line]
    if syncs:
        assert len(syncs) == 1 and syncs[0] < named[0] and not fsynced
    else:  # a file system or kernel without a syncfs that reports errors
        assert len(fsynced) == MANY + 6


def test_a_local_file_that_changed_leaves_no_partial_file_and_names_itself(tmp_path: Path) -> None:
    """The second batch fails; the files of the first are ready for the next run."""
    files = [LockedFile(f"data/files/t/{n}", 1, "0" * 64, None, str(n)) for n in range(2001)]
    for file in files:
        (tmp_path / file.origin).write_bytes(b"x")
    (tmp_path / "2000").unlink()

    def check(source: str, file: LockedFile, digests: FileDigests | None) -> FileDigests:
        if digests is None:
            raise UsageError(f"{source}: gone")
        return digests

    pairs = [(str(tmp_path / file.origin), file) for file in files]
    with pytest.raises(UsageError, match="2000: gone"):
        copy_many(pairs, tmp_path / "bundle", check, lambda count: None)
    names = {path.name for path in (tmp_path / "bundle/data/files/t").iterdir()}
    assert names == {str(n) for n in range(2000)}


def test_what_the_disk_said_of_earlier_bytes_is_not_lost() -> None:
    """A disk reports a failed write once, maybe during the download. /dev/null rejects fsync."""
    piece = bytes(2**20)
    with Partial(
        Path("/dev/null"), 16 * SYNC_EVERY, git=False, progress=lambda count: None
    ) as partial:
        with pytest.raises(OSError, match=r"Invalid argument: '/dev/null'"):
            while not partial.is_whole:
                partial.append(piece)
        assert partial.size >= SYNC_EVERY - len(piece)
