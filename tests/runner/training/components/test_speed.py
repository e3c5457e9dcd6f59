"""torch's settings for GPUs: each is said, none changes what the user has set. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from runner.job.devices import peak_flops
from runner.training.components.device import tune, uses_tf32


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the allocator is told; torch's settings are as before afterwards."""
    told: list[str] = []

    def change(setting: str) -> bool:
        told.append(setting)
        return True

    monkeypatch.setattr("runner.training.components.device.change_allocator", change)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    yield told
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def tuned(environ: dict[str, str], *, images: bool = False, device: str = "cuda") -> str:
    return "\n".join(tune(torch.device(device), images=images, environ=environ))


def is_on() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


def test_a_gpu_is_tuned_and_each_setting_names_its_switch(settings: list[str]) -> None:
    said = tuned({}, images=True)
    assert is_on() == (True, True, True)
    assert settings == ["expandable_segments:True"]
    for name in ("TF32: on", "cudnn.benchmark: on", "expandable_segments:True"):
        (line,) = [line for line in said.splitlines() if name in line]
        assert "AIRLIFT_KERNELS=reference turns it off" in line


@pytest.mark.parametrize(
    ("theirs", "untouched"),
    [
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "TF32: as NVIDIA_TF32_OVERRIDE=0 says"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512 says"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "PYTORCH_ALLOC_CONF=backend:native says"),
    ],
)
def test_what_the_user_has_set_stays(
    settings: list[str], theirs: dict[str, str], untouched: str
) -> None:
    environ: dict[str, Any] = dict(theirs)
    assert untouched in tuned(environ)
    if "NVIDIA_TF32_OVERRIDE" in theirs:
        assert is_on() == (False, False, False)
    else:
        assert settings == [] and environ == theirs


def test_the_reference_kernels_change_nothing(settings: list[str]) -> None:
    assert "AIRLIFT_KERNELS=reference" in tuned({"AIRLIFT_KERNELS": "reference"})
    assert is_on() == (False, False, False) and settings == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 156e12),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, 19.5e12),
        ({"AIRLIFT_KERNELS": "reference"}, 19.5e12),
        ({"NVIDIA_TF32_OVERRIDE": "1", "AIRLIFT_KERNELS": "reference"}, 156e12),
    ],
)
def test_mfu_in_float32_is_of_the_peak_of_the_kernels_in_use(
    environ: dict[str, str], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    a100 = "NVIDIA A100-SXM4-80GB"
    assert peak_flops(a100, "tf32" if uses_tf32(environ) else "fp32") == expected
