"""`stage apply` killed at any moment: the same command finishes it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from stage.bundle.bundle import LOCK, MANIFEST, verify
from stage.carry.patch import apply, patch_since
from tests.stage.bundles import make_bundle
from tests.stage.carry.patching import QUIET, new_version, patch_for, state

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.chmod", "os.truncate"}


def apply_killed_at(root: Path, patch: Path, moment: int) -> bool:
    """Applies in a child, killed before its `moment`-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        changes = 0

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal changes
            writes = (
                event == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if event in CHANGES or writes:
                changes += 1
                if changes == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            apply(root, patch, QUIET)
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 7
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("kind", ["repair", "update"])
def test_an_apply_killed_before_any_change_to_the_disk_can_be_run_again(
    tmp_path: Path, kind: str
) -> None:
    old = make_bundle(tmp_path / "old", big=False).root
    copy, target = tmp_path / "copy", old
    shutil.copytree(old, copy)
    if kind == "update":
        target = new_version(old, tmp_path / "new", big=False)
        patch_since(target, old / LOCK, tmp_path / "patch", QUIET)
    else:
        (copy / "data/models/bert/vocab.txt").unlink()
        (copy / "data/models/bert/model.safetensors").write_bytes(b"bad")
        (copy / MANIFEST).write_bytes(b"bad")
        patch_for(old, copy, tmp_path)
    after = state(target)
    ids = {verify(old).bundle_id, verify(target).bundle_id}
    moment = 1
    while True:
        root = tmp_path / f"at-{moment}"
        shutil.copytree(copy, root)
        killed = apply_killed_at(root, tmp_path / "patch", moment)
        report = verify(root)
        assert not report.ok or report.bundle_id in ids
        apply(root, tmp_path / "patch", QUIET)
        assert state(root) == after, f"killed before change {moment}"
        shutil.rmtree(root)
        if not killed:
            break
        moment += 3  # each is like the ones beside it, and takes a process
    assert moment > 20
