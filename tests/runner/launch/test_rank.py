"""What a rank does before torch is imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from runner.launch.rank import flight_recorder


@pytest.mark.parametrize(
    ("torch", "size"),
    [("2.6.0+cu118", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.13.0", "TORCH_FR_BUFFER_SIZE")],
)
def test_every_torch_writes_its_last_collectives_to_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, size: str
) -> None:
    """By default newer torch writes them to ~/.cache, and torch 2.6 keeps none."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: torch)
    ours = flight_recorder(tmp_path, {"TORCH_FR_DUMP_TEMP_FILE": "/mine/"})
    assert ours == {
        size: "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/flight-rank-",
    }, "what the user set wins"
