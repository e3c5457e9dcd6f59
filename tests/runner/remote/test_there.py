"""What is asked of a cluster's folder, and the lock of those who send; with this machine's sh."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from runner.inputs.staged import Here
from runner.remote.there import sending, states_in
from stage.bundle.bundle import verify
from stage.carry.ssh import PushTarget, connected
from stage.lock.manifest import Manifest
from tests.stage.bundles import make_bundle


def test_one_sends_at_a_time_and_a_dead_one_is_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / ".airlift/sending"
    with connected(PushTarget(None, str(tmp_path))) as remote:
        with sending(remote):
            assert lock.is_dir()
        assert not lock.exists()
        lock.mkdir()
        (lock / "beat").touch()
        (lock / "holder").write_text(f"{os.uname().nodename} 999999999\n")  # was killed
        with sending(remote):
            assert str(os.getpid()) in (lock / "holder").read_text()
        assert capsys.readouterr().err == "", "nobody was waited for"
        lock.mkdir()
        (lock / "beat").touch()
        (lock / "holder").write_text("elsewhere 1\n")
        os.utime(lock / "beat", (time.time() - 90,) * 2)  # silent
        with sending(remote):  # this one is silent, and the other takes it over
            (lock / "holder").write_text("elsewhere 999999999\n")
        got = threading.Event()

        def wait() -> None:
            with sending(remote):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.5)
        for path in (*lock.iterdir(), lock):
            path.unlink() if path.is_file() else path.rmdir()
        waiting.join(20)
    said = capsys.readouterr().err
    assert got.is_set() and "elsewhere 999999999 (host, process) sends there" in said


def test_what_left_the_bundle_is_removed_there(tmp_path: Path) -> None:
    """Else no walk would find the bundle there sound."""
    there = tmp_path / "there/bundle"
    there.parent.mkdir()
    bundle = make_bundle(tmp_path / "bundle", big=False)
    make_bundle(there, big=False, files={"data/files/left.txt": b"of an asset that left"})
    (there / "my-notes.txt").write_text("the user's own")
    here = Here(Manifest.load(bundle.root / "stage.yaml"), bundle.root)
    with connected(PushTarget(None, str(there.parent))) as remote:
        here.send(remote, str(there), None, set(), quiet=True)
    assert [finding.path for finding in verify(there).findings] == ["my-notes.txt"]


@pytest.mark.parametrize("greeting", ["", "Welcome {user}\n", "{\n"])
def test_the_states_of_runs_are_read_past_a_greeting(greeting: str) -> None:
    one = {"state": "running", "job": {"state": "COMPLETED"}, "warnings": ['"state": "failed"']}
    both = {"runs": [one, {"state": "finished"}]}
    assert states_in(greeting + json.dumps(one, indent=2)) == {"running"}
    assert states_in(greeting + json.dumps(both, indent=2)) == {"running", "finished"}
