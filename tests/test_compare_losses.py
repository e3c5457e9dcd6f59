"""Losses of two revisions are compared bit for bit; the training itself is no part of the suite."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.lib.compare_losses import ALL, Trained, compare, digest, main, numbers


def trained(*losses: float) -> Trained:
    return Trained([f"step {step}: loss {loss!r}" for step, loss in enumerate(losses, 1)], "ab")


def test_the_last_bit_of_a_loss_makes_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [6.5] * (ALL - 1)
    assert compare("ddp", trained(*losses, 6.5), trained(*losses, 6.5))
    assert not compare("ddp", trained(*losses, 6.5), trained(*losses, np.nextafter(6.5, 7).item()))
    assert "step 8: loss 6.5 | step 8: loss 6.500000000000001" in capsys.readouterr().out


def test_a_training_that_did_not_go_to_its_end_is_a_difference() -> None:
    assert not compare("ddp", trained(6.5), trained(6.5))
    assert not compare("ddp", trained(*[6.5] * ALL), trained(*[6.5] * (ALL - 1)))


def test_numbers_keep_every_bit_and_speeds_are_left_out(tmp_path: Path) -> None:
    line = {"step": 1, "loss": 0.1 + 0.2, "tokens_per_s": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert numbers(tmp_path / "metrics.jsonl") == ["step 1: loss 0.30000000000000004"]


def test_one_bit_of_a_weight_changes_the_digest(tmp_path: Path) -> None:
    found = set()
    for value in (1.0, 1.0, float(np.nextafter(np.float32(1), np.float32(2)))):
        save_file({"w": np.array([value], np.float32)}, tmp_path / "model.safetensors")
        found.add(digest(tmp_path))
    assert len(found) == 2


def test_a_revision_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.lib.compare_losses.make_materials", lambda _folder: None)
    assert main(["no-such-revision"]) == 2
    assert "no-such-revision" in capsys.readouterr().err
