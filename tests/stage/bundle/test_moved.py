"""Files and folders that change places keep their `stat`. Nothing remembered answers for them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stage.bundle import verifier
from stage.bundle.bundle import verify
from stage.bundle.receipt import find_receipt, record
from tests.stage.bundles import make_bundle

MODELS = "data/models/bert"
TICK_S = 0.1


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models with files of the same sizes, and what does not change."""
    monkeypatch.setattr(verifier, "UNSURE_NS", int(TICK_S * 10**9))
    files = {
        f"{MODELS}/{version}/{part}/{name}": f"{name} of the {version} {part} one\n".encode()
        for version in ("new", "old")
        for part in ("top", "end")
        for name in ("config.json", "model.safetensors")
    }
    root = make_bundle(tmp_path / "bundle", files=files, big=False).root
    time.sleep(1.5 * TICK_S)
    return root


def _swap(root: Path, one: str, other: str) -> None:
    (root / one).rename(root / "aside")
    (root / other).rename(root / one)
    (root / "aside").rename(root / other)


MOVES: dict[str, Callable[[Path], object]] = {
    "folders": lambda root: _swap(root, f"{MODELS}/new", f"{MODELS}/old"),
    "folders inside of two": lambda root: _swap(root, f"{MODELS}/new/top", f"{MODELS}/old/top"),
    "folders of one": lambda root: _swap(root, f"{MODELS}/new/top", f"{MODELS}/new/end"),
    "files": lambda root: _swap(
        root, f"{MODELS}/new/top/config.json", f"{MODELS}/old/top/config.json"
    ),
    "a new name": lambda root: (root / MODELS / "old").rename(root / MODELS / "older"),
}


@pytest.fixture(params=MOVES)
def move(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return MOVES[str(request.param)]


def test_moved_after_a_verification_no_receipt_holds(
    bundle: Path, tmp_path: Path, move: Callable[[Path], object]
) -> None:
    state = tmp_path / "mine"
    assert record(state, verify(bundle, state=state)) is None
    shutil.copytree(tmp_path / "mine", tmp_path / "another user's")
    move(bundle)
    for user in ("mine", "another user's"):
        assert str(find_receipt(tmp_path / user, bundle)).startswith(
            "changed since it was verified"
        )


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def test_moved_after_an_interruption_it_is_read_again(
    bundle: Path, tmp_path: Path, move: Callable[[Path], object]
) -> None:
    state, notes = tmp_path / "state", list[str]()

    def end(journal: verifier.Journal, expected: object) -> None:
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(verifier.Journal, "fold", end)  # everything is read
        verify(bundle, jobs=1, state=state)
    move(bundle)
    report = verify(bundle, state=state, note=notes.append)
    moved = [finding for finding in report.findings if finding.problem != "extra"]
    resumed = int(notes[0].split()[1]) if notes else 0
    assert not report.ok and report.stamp is None and resumed == 8 - len(moved)


def test_moved_while_it_is_read_the_receipt_holds_for_nothing(
    bundle: Path, tmp_path: Path, move: Callable[[Path], object]
) -> None:
    """Each file was sound when it was read. That says nothing on what lies there now."""

    def move_once(count: int) -> None:
        if count and not moved:
            moved.append(count)
            move(bundle)

    moved: list[int] = []
    state = tmp_path / "state"
    assert record(state, verify(bundle, jobs=1, state=state, progress=move_once)) is None
    assert moved and isinstance(find_receipt(state, bundle), str)
    assert not verify(bundle).ok
