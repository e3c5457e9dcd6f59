"""A power cut at any moment: no finished name without its bytes on the disk, no finished bundle without its names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.sources.partial import SYNC_EVERY, Partial
from tests.support.staging import LANDING, Laptop

Event = tuple[str, str, str]  # ("sync", path, "") or ("rename", from, to), in the order they came to their ends
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
            yield "rename", os.path.join(cwd, old), os.path.join(cwd, new)  # noqa: PTH118 - an absolute path stays


def test_bytes_before_names_and_names_before_the_seal(laptop: Laptop) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = laptop.folder / "trace"
    command = laptop.command("fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check")
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-qq", "-e", "trace=fsync,rename", "-o", str(trace)]
    subprocess.run([*strace, *command], cwd=laptop.folder, env=laptop.environment(), check=True, capture_output=True)

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


def test_what_the_disk_said_of_earlier_bytes_is_not_lost() -> None:
    """A disk tells of a failed write once, and while bytes come nobody may be listening. /dev/null refuses an fsync."""
    piece = bytes(2**20)
    with Partial(Path("/dev/null"), 16 * SYNC_EVERY, git=False, progress=lambda count: None) as partial:
        with pytest.raises(OSError, match=r"Invalid argument: '/dev/null'"):
            while not partial.is_whole:
                partial.append(piece)
        assert partial.size >= SYNC_EVERY - len(piece)
