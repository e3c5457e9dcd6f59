"""Which kernels a step uses, whether it waits for the device, and whether it compiles once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import MakeTrainer
from tests.runner.tasks.test_flex import assert_like_a_mask

FUSED = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_of_a_causal_model_is_fused(
    trainer: MakeTrainer, twins_bundle: Path, compiled: bool
) -> None:
    made = trainer(
        bundle=twins_bundle,
        task="causal-lm",
        model={"asset": "tiny-chat"},  # without dropout, which CPUs have no fused kernel for
        engine={"name": "ddp"},
        precision="bf16",
        compile=compiled,
    )
    made.train_step()
    with torch.profiler.profile() as profile:
        made.train_step()
    kernels = {e.key for e in profile.key_averages() if "scaled_dot_product" in e.key}
    assert any(part in name for name in kernels for part in FUSED), kernels
    assert not any("attention_math" in name for name in kernels), kernels


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_documents_are_kept_apart_by_compiled_flex_attention(
    cuda: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("flex attention needs compute capability 8.0")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert_like_a_mask(kind, "cuda", 1e-3)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_no_step_waits_for_the_device(
    cuda: torch.device, trainer: MakeTrainer, engine: str
) -> None:
    made = trainer(engine={"name": engine}, precision="bf16")
    for _ in range(2):
        made.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_step_compiles_once(trainer: MakeTrainer) -> None:
    made = trainer(engine={"name": "ddp"}, compile=True, precision="fp32")
    for _ in range(2):
        made.train_step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        made.train_step()
