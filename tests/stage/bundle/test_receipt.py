"""A receipt says what was verified, how, when and where, and holds until a file is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stage.bundle import verifier
from stage.bundle.bundle import verify
from stage.bundle.receipt import Receipt, find_receipt, record
from stage.bundle.verifier import (
    EXPIRES_S,
    TICK_NS,
    UNSURE_NS,
    rests_after,
    state_folder,
    unsure_ns,
)
from tests.stage.bundles import BIG, make_bundle

TICK_S = 0.1


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle on a disk whose clock tells changes apart after `TICK_S`, not after two seconds."""
    monkeypatch.setattr(verifier, "UNSURE_NS", int(TICK_S * 10**9))
    root = make_bundle(tmp_path / "bundle").root
    time.sleep(1.5 * TICK_S)
    return root


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def verified(root: Path, state: Path) -> Receipt:
    assert record(state, verify(root, state=state)) is None
    receipt = find_receipt(state, root)
    assert isinstance(receipt, Receipt), receipt
    return receipt


def test_it_holds_for_30_days(bundle: Path, state: Path) -> None:
    verified(bundle, state)
    (path,) = (state / "receipts").iterdir()
    document = json.loads(path.read_text())
    for age_s, holds in ((EXPIRES_S - 60, True), (EXPIRES_S + 60, False)):
        times = dict.fromkeys(("began", "ended"), time.time() - age_s)
        path.write_text(json.dumps(document | times))
        found = find_receipt(state, bundle)
        assert isinstance(found, Receipt) == holds, found
    assert str(found).startswith("verified 30 days ago on ") and "holds for 30 days" in str(found)


def _flip(root: Path) -> None:
    with open(root / "data/models/bert/vocab.txt", "r+b") as file:
        file.write(b"x")


def _flip_and_set_the_time_back(root: Path) -> None:
    before = (root / "data/models/bert/vocab.txt").stat()
    _flip(root)
    os.utime(root / "data/models/bert/vocab.txt", ns=(before.st_atime_ns, before.st_mtime_ns))


SINCE = "changed since it was verified "
CHANGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    # what changed -> how, what is said, and whether it may be the ctime alone
    "a bit": (_flip, SINCE, False),
    "a bit, and the time set back": (_flip_and_set_the_time_back, SINCE, True),
    "one gone": (lambda root: (root / "data/files/notes/empty").unlink(), SINCE, False),
    "one more": (lambda root: (root / "data/models/bert/more").touch(), SINCE, False),
    "a link": (
        lambda root: (root / "data/models/bert/more").symlink_to("config.json"),
        SINCE,
        False,
    ),
    "rights": (lambda root: (root / "data/models/bert/vocab.txt").chmod(0o600), SINCE, True),
    "the seal": (lambda root: (root / "tagmanifest-sha256.txt").write_bytes(b"x"), SINCE, False),
    "no seal": (
        lambda root: (root / "tagmanifest-sha256.txt").unlink(),
        "cannot be looked at (",
        False,
    ),
    "no payload": (
        lambda root: (root / "data").rename(root / "aside"),
        "cannot be looked at (",
        False,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_bundle_changed_since_is_not_verified(bundle: Path, state: Path, change: str) -> None:
    verified(bundle, state)
    spoil, said, may_be_ctime = CHANGES[change]
    spoil(bundle)
    problem = find_receipt(state, bundle)
    assert isinstance(problem, str) and problem.startswith(said)
    assert ("only ctimes" in problem) == may_be_ctime


def test_a_copy_elsewhere_is_not_verified_by_it(bundle: Path, state: Path, tmp_path: Path) -> None:
    verified(bundle, state)
    subprocess.run(["cp", "-a", "--sparse=always", bundle, tmp_path / "copy"], check=True)
    assert find_receipt(state, tmp_path / "copy") == "not verified here"
    assert find_receipt(tmp_path / "nobody", bundle) == "not verified here"


def test_a_look_at_names_and_sizes_is_no_verification(bundle: Path, state: Path) -> None:
    assert record(state, verify(bundle, "fast", state=state)) is None
    assert find_receipt(state, bundle) == "not verified here"
    verified(bundle, state)
    record(state, verify(bundle, "fast", state=state))
    assert isinstance(find_receipt(state, bundle), Receipt), "a look takes nothing back"


def test_what_was_written_just_before_gets_none_and_is_told_why(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change within the same tick of the disk's clock, after the reading, would not be seen."""
    monkeypatch.setattr(verifier, "KERNELS_OWN", frozenset())
    root = make_bundle(tmp_path / "bundle").root
    os.utime(next(path for path in (root / "data").rglob("*") if path.is_file()))
    assert "changed just before they were read" in str(record(state, verify(root, state=state)))
    assert find_receipt(state, root) == "not verified here"


MOUNTED = """\
22 1 0:20 / / rw,relatime shared:1 - {root} /dev/vda rw
30 22 0:30 / /scratch rw - lustre mds@tcp:/s rw
31 22 0:31 / /fast/with\\040blank rw - xfs /dev/vdb rw
32 31 0:32 / /fast/with\\040blank/b/data rw - {below} server:/x rw
"""


@pytest.mark.parametrize(
    ("place", "root", "below", "stamp", "fine"),
    [
        ("/home/me/b", "ext4", "nfs4", 1_700_000_000_123_456_789, True),
        (
            "/home/me/b",
            "ext4",
            "nfs4",
            1_700_000_000_000_000_000,
            False,
        ),  # inodes of 128 bytes keep whole seconds
        ("/home/me/b", "ext4", "nfs4", 1_700_000_000_120_000_000, False),
        ("/home/me/b", "nfs4", "xfs", 1_700_000_000_123_456_789, False),
        ("/scratchy/b", "btrfs", "nfs4", 1_700_000_000_123_456_789, True),
        ("/scratch/b", "ext4", "nfs4", 1_700_000_000_123_456_789, False),
        (
            "/fast/with blank/b",
            "nfs4",
            "nfs4",
            1_700_000_000_123_456_789,
            False,
        ),  # another disk inside
        ("/fast/with blank/b", "nfs4", "xfs", 1_700_000_000_123_456_789, True),
        ("/fast/with blank/c", "nfs4", "nfs4", 1_700_000_000_123_456_789, True),
    ],
)
def test_the_patience_is_short_only_where_this_kernels_clock_stamps_and_the_disk_keeps_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    root: str,
    below: str,
    stamp: int,
    fine: bool,
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTED.format(root=root, below=below))
    monkeypatch.setattr(verifier, "MOUNTS", tmp_path / "mountinfo")
    status: os.stat_result = SimpleNamespace(st_ctime_ns=stamp)  # type: ignore[assignment]
    patience = TICK_NS if fine else UNSURE_NS
    assert rests_after(status, unsure_ns(Path(place))) == stamp + patience
    (tmp_path / "mountinfo").unlink()
    assert rests_after(status, unsure_ns(Path(place))) == stamp + UNSURE_NS


def test_the_command_leaves_one_and_goes_on_without_where_it_cannot(
    bundle: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "stage", "verify", str(bundle), "--jobs", "2"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert isinstance(find_receipt(state_folder(environment), bundle), Receipt)
    (tmp_path / "file").touch()
    done = subprocess.run(
        command,
        env={**environment, "XDG_STATE_HOME": str(tmp_path / "file")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "\nthe verdict holds; no receipt" in done.stderr
    (bundle / BIG).unlink()
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 1
    assert find_receipt(state_folder(environment), bundle) == "not verified here"


@pytest.mark.parametrize("text", ["", "{}", '{"format": 3}', "[]", '{"stamp": {}}', "\xff"])
def test_a_receipt_that_cannot_be_read_is_none(bundle: Path, state: Path, text: str) -> None:
    verified(bundle, state)
    (path,) = (state / "receipts").iterdir()
    path.write_text(text, encoding="latin-1")
    assert "cannot be read" in str(find_receipt(state, bundle))
    for other in (2, 4):
        path.write_text(json.dumps({"format": other}))
        assert f"format {other}, which" in str(find_receipt(state, bundle))
