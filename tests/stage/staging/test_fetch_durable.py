"""A power cut at any moment: no seal before every byte and every name is on the disk."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result

from stage.files import sync_disk
from tests.support.staging import LANDING, Laptop


def calls(folder: Path, command: list[str], environment: dict[str, str]) -> list[str]:
    """The successful syncs and renames of a command, by `strace -f -y`."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    traced = "trace=fsync,syncfs,rename,sync"
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-qq", "-e", traced, "-o", "trace"]
    subprocess.run(
        [*strace, *command], cwd=folder, env=environment, check=True, capture_output=True
    )
    begun: dict[str, str] = {}
    done = []
    for line in (folder / "trace").read_text().splitlines():
        pid, text = line.split(maxsplit=1)
        if text.endswith("<unfinished ...>"):
            begun[pid] = text.removesuffix("<unfinished ...>")
        elif match := re.match(r"<\.\.\. \w+ resumed>", text):
            text = begun.pop(pid) + text[match.end() :]
        if text.endswith("= 0"):
            done.append(re.sub(r"\s*\)\s*= 0$", ") = 0", text))  # a resumed call has other spaces
    return done


def test_bytes_and_names_before_the_seal(laptop: Laptop) -> None:
    fetch = laptop.command("fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check")
    lines = calls(laptop.folder, fetch, laptop.environment())
    named = {
        path: n
        for n, line in enumerate(lines)
        for path in LANDING.values()
        if line.startswith("rename") and line.endswith(f'/{path}") = 0')
    }
    assert set(named) == set(LANDING.values())
    (sync,) = (n for n, line in enumerate(lines) if line.startswith("syncfs"))
    (seal,) = (n for n, line in enumerate(lines) if '/tagmanifest-sha256.txt") = 0' in line)
    assert max(named.values()) < sync < seal
    assert not [line for line in lines if line.startswith("sync(")], "flushes every mount"


def test_a_system_without_syncfs_syncs_each_file_and_says_so(
    stage: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tree").mkdir()
    Path("tree/a.txt").write_text("a")
    Path("m.yaml").write_text("format: 1\nassets:\n  tree: {path: tree}\n")
    synced: list[Path] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: SimpleNamespace())
    monkeypatch.setattr("stage.files.sync_folder", synced.append)
    said = stage("fetch", "m.yaml", "-o", "b", "--no-offline-check").output
    assert "no syncfs" in said and Path("b/data/files/tree/a.txt") in synced


def test_a_disk_that_lost_bytes_leaves_no_seal(
    stage: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.txt").write_text("a")
    Path("m.yaml").write_text("format: 1\nassets:\n  a: {path: a.txt}\n")
    failing = SimpleNamespace(syncfs=lambda descriptor: ctypes.set_errno(5) or -1)
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda *args, **options: failing)
        said = stage("fetch", "m.yaml", "-o", "b", "--no-offline-check", code=5).output
    assert "b: Input/output error" in said and not Path("b/tagmanifest-sha256.txt").exists()
    stage("fetch", "m.yaml", "-o", "b", "--no-offline-check")
    assert sync_disk(Path("b"))


def test_after_a_power_cut_the_next_run_reads_and_repairs_what_came(laptop: Laptop) -> None:
    """Names may have lost their bytes: empty files, or zeros of the right size."""
    first = laptop.fetched()
    (laptop.bundle / "tagmanifest-sha256.txt").unlink()
    zeros, empty, *_ = sorted(LANDING.values())
    (laptop.bundle / zeros).write_bytes(bytes((laptop.bundle / zeros).stat().st_size))
    (laptop.bundle / empty).write_bytes(b"")
    assert laptop.fetched() == first
