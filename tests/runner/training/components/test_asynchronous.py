"""The thread that writes checkpoints."""

from __future__ import annotations

import threading

import pytest
import torch

from runner.training.components.asynchronous import Background


def test_the_thread_uses_the_gpu_of_its_rank_and_not_number_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread has its own current device, as in CUDA: number 0 at first."""
    current, seen = threading.local(), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "number", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: setattr(current, "number", n))
    torch.cuda.set_device(3)
    background = Background()
    background.start(lambda: seen.append(torch.cuda.current_device()))
    assert background.finish()
    assert seen == [3]


def test_without_a_gpu_the_thread_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    background = Background()
    background.start(lambda: None)
    assert background.finish()
