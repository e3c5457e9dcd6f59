"""The footprint of a micro batch on the meta device, beside hooks that see what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.job import activations
from runner.job.activations import Footprint, bucket_bytes, estimated
from runner.job.plan import decide
from runner.job.shapes import Device, ModelShape
from runner.training.components.device import DTYPES
from runner.training.footprint import (
    SIZES,
    LiveMemory,
    _step,
    built,
    footprint,
    measure,
    micro_batch,
)
from runner.training.tasks import language

LENGTH = 64
COMMON = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**COMMON, "vocab_size": 500, "max_position_embeddings": 80, "pad_token_id": 0}
# No dropout: CPUs have no fused one. Its bytes have a test of their own.
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 256, "attention_dropout": 0.0}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bert": ("masked-lm", lambda: transformers.BertConfig(**TEXT, **CALM, intermediate_size=384)),
    "roberta": (
        "masked-lm",
        lambda: transformers.RobertaConfig(**TEXT, **CALM, intermediate_size=384),
    ),
    "gpt2": (
        "causal-lm",
        lambda: transformers.GPT2Config(
            vocab_size=500, n_positions=80, n_embd=96, n_layer=3, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    ),
    "llama": ("causal-lm", lambda: transformers.LlamaConfig(**TEXT, **GROUPED)),
    "qwen2": ("causal-lm", lambda: transformers.Qwen2Config(**TEXT, **GROUPED)),
    "bert-for-texts": (
        "text-classification",
        lambda: transformers.BertConfig(**TEXT, **CALM, intermediate_size=384),
    ),
    "bert-for-words": (
        "token-classification",
        lambda: transformers.BertConfig(**TEXT, **CALM, intermediate_size=384),
    ),
    "vit": (
        "image-classification",
        lambda: transformers.ViTConfig(
            **COMMON, **CALM, intermediate_size=384, image_size=32, patch_size=4
        ),
    ),
}  # fmt: skip


def run_of(
    folder: Path, kind: str, *overrides: str, **settings: Any
) -> tuple[RunConfig, ModelInput]:
    task, make = MODELS[kind]
    config = make()
    config.update(settings)
    config.save_pretrained(folder)
    path = folder / "run.yaml"
    path.write_text(
        f"format: 1\ntask: {task}\nmodel: {{asset: {kind}}}\ndataset: {{asset: text}}\n"
    )
    return RunConfig.load(path, overrides), ModelInput(kind, folder, "acme/model", "0" * 40, {}, {})


def kept_by_hooks(module: torch.nn.Module, batch: dict[str, Any]) -> int:
    """The bytes that autograd keeps: each storage once, without weights and what is given."""
    given = [*module.parameters(), *module.buffers(), *batch.values()]
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(**batch)
    assert loss.isfinite()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("settings", [("precision=fp32",), ("precision=bf16", "engine.zero=2")])
@pytest.mark.parametrize("kind", MODELS)
def test_the_plan_is_what_hooks_see(tmp_path: Path, kind: str, settings: tuple[str, ...]) -> None:
    config, model = run_of(tmp_path, kind, *settings)
    module = built(config, model).to_empty(device="cpu")
    with torch.no_grad():
        for weight in [*module.parameters(), *module.buffers()]:
            weight.zero_()
    seen = []
    for rows in SIZES:
        batch = {
            # A mask (bool) that hides everything would give nan.
            name: torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)
            for name, tensor in micro_batch(module, config, LENGTH, rows).items()
        }
        seen.append(kept_by_hooks(module, batch))
    expected = (seen[1] - seen[0]) / (SIZES[1] - SIZES[0])
    found = measure(config, model, LENGTH, 2, 2)
    assert found.kept == pytest.approx(expected, rel=0.1)
    assert found.kept <= found.each < 2 * found.kept


def measured(folder: Path, kind: str, *overrides: str, **settings: Any) -> Footprint:
    config, model = run_of(folder, kind, *overrides, **settings)
    return measure(config, model, LENGTH, 2, 2)


def test_checkpointing_keeps_a_fraction(tmp_path: Path) -> None:
    whole, less = (
        measured(tmp_path, "llama", f"activation_checkpointing={value}", "precision=bf16")
        for value in ("false", "true")
    )
    assert less.kept < 0.4 * whole.kept
    assert less.kept < less.each < whole.each  # a layer is there again in the backward pass


def test_autocast_keeps_more_than_weights_in_16_bits_and_casts_each_once(tmp_path: Path) -> None:
    cast, auto, wide = (
        measured(tmp_path, "gpt2", *settings)
        for settings in (
            ("engine.zero=2", "precision=bf16"),
            ("engine.name=ddp", "precision=bf16"),
            ("engine.name=ddp", "precision=fp32"),
        )
    )
    assert cast.kept < auto.kept < wide.kept
    matrices = 3 * 12 * 96 * 96 + 500 * 96
    assert auto.fixed - wide.fixed == pytest.approx(2 * matrices, rel=0.1)


def test_dropout_keeps_a_byte_for_each_element(tmp_path: Path) -> None:
    calm = measured(tmp_path, "gpt2", "precision=bf16")
    dropped = measured(tmp_path, "gpt2", "precision=bf16", resid_pdrop=0.1, embd_pdrop=0.1)
    # After the embeddings, and two in each of three layers.
    assert dropped.kept - calm.kept == pytest.approx(7 * LENGTH * 96, rel=0.01)


def test_lora_keeps_less_and_fsdp_counts_what_it_gathers(tmp_path: Path) -> None:
    whole = measured(tmp_path, "llama", "precision=bf16")
    adapted = measured(tmp_path, "llama", "precision=bf16", "lora={rank: 4, targets: [q_proj]}")
    assert adapted.kept < whole.kept and adapted.buffers < whole.buffers
    assert measured(tmp_path, "llama", "precision=bf16", "engine.name=fsdp").buffers > 0


def test_a_tensor_counts_until_it_is_freed() -> None:
    with LiveMemory() as memory:
        first = torch.empty(100, device="meta")
        view = first.view(10, 10)
        second = first + 1
        assert memory.live == 800
        del first, second
        assert memory.live == 400
        del view
    assert (memory.live, memory.peak) == (0, 800)


def test_a_model_that_cannot_be_measured_is_estimated_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = run_of(tmp_path, "gpt2", "precision=bf16")

    def needs_values(self: Any, **_: Any) -> None:
        torch.empty(1, device="meta").item()

    monkeypatch.setattr(language.Language, "forward", needs_values)
    shape = ModelShape(1_000_000, 80, 96, 3, 500)
    found = footprint(config, LENGTH, 2, model=model, shape=shape, world_size=2)
    assert "does not run on torch's meta device" in found.why_estimated
    assert found.each == estimated(config, shape, LENGTH, 2, "").each > 0


def test_a_model_is_measured_once_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def here(work: Any, arguments: Any, *_: str) -> Footprint:
        started.append(arguments)
        return Footprint(len(started), 2, 3, 4, "" if len(started) < 4 else "it failed")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("runner.job.activations.in_child", here)
    shape = ModelShape(500_000, 80, 96, 3, 500)

    def each(*overrides: str, length: int = LENGTH) -> int:
        config, model = run_of(tmp_path, "gpt2", *overrides)
        found = activations.measured(config, length, 2, model=model, shape=shape, world_size=2)
        return found.each

    assert [each(), each(), each("seed=7", "steps=9")] == [1, 1, 1]
    assert [each(length=8), each("activation_checkpointing=true"), each()] == [2, 3, 1]
    assert [each(length=9), each(length=9)] == [4, 5]  # an estimate is not kept


def test_the_micro_batch_that_is_chosen_fits_and_one_more_does_not(tmp_path: Path) -> None:
    config, model = run_of(
        tmp_path, "gpt2", "engine.name=ddp", f"sequence_length={LENGTH}", "batch.global=4096"
    )
    shape = ModelShape(500_000, 80, 96, 3, 500)
    small = Device("cuda", "Tiny", 2**26, True, True)
    ask = partial(footprint, model=model, shape=shape, world_size=1)
    plan = decide(config, shape, small, 1, ask)
    (reason,) = (choice.reason for choice in plan.choices if choice.key == "batch.micro")
    assert "measured on the meta device" in reason
    _, peak = step_of(config, model, plan.micro)
    _, doubled = step_of(config, model, 2 * plan.micro)
    state = 16 * shape.num_parameters
    assert state + peak <= 0.9 * small.memory < state + doubled


def step_of(config: RunConfig, model: ModelInput, rows: int) -> tuple[int, int]:
    low = replace(config, precision="bf16")
    return _step(built(low, model), low, LENGTH, rows)


def test_buckets_are_deepspeeds(tmp_path: Path) -> None:
    many = 10**9
    assert bucket_bytes({}, "bf16", 0, many, many) == 0
    assert bucket_bytes({}, "fp32", 2, many, many) == 2 * 4 * 50_000_000
    assert bucket_bytes({"reduce_bucket_size": 1e6}, "bf16", 1, many, many) == 8_000_000
    at_3 = bucket_bytes({"overlap_comm": False}, "bf16", 3, 10 * many, 1000)
    assert at_3 == 6 * 1000 + 2 * (10**9 + 50_000_000)


def test_a_gpu_too_small_for_one_sequence_says_what_helps(tmp_path: Path) -> None:
    config, _ = run_of(tmp_path, "gpt2", "engine.name=ddp", "sequence_length=80")
    shape = ModelShape(1000, 80, 96, 3, 500)
    tiny = Device("cuda", "Tiny", 2**20, True, True)
    (reason,) = (
        choice.reason
        for choice in decide(config, shape, tiny, 1).choices
        if choice.key == "batch.micro"
    )
    assert "estimated: without the model's code" in reason
    assert "activation_checkpointing: true" in reason


def test_dtypes_are_the_engines(tmp_path: Path) -> None:
    config, model = run_of(tmp_path, "bert", "precision=fp16", "engine.zero=1")
    assert {p.dtype for p in built(config, model).parameters()} == {DTYPES["fp16"]}
    config, model = run_of(tmp_path, "bert", "precision=fp16", "engine.name=ddp")
    assert {p.dtype for p in built(config, model).parameters()} == {torch.float32}


def test_batch_norm_that_would_be_in_16_bits_is_refused_where_memory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `runner check`: the model is built there, in a child process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    config, model = run_of(tmp_path, "vit", "precision=bf16", "engine.name=fsdp")
    settings.save_pretrained(tmp_path)  # in place of ViT's
    shape = ModelShape(1000, 0, 8, 1, 0)
    with pytest.raises(UsageError, match="batch norm, which cannot be trained in bf16 with fsdp"):
        activations.measured(config, 0, 3, model=model, shape=shape, world_size=2)


def test_a_wrong_target_of_lora_is_the_users_mistake(tmp_path: Path) -> None:
    config, model = run_of(tmp_path, "llama", "precision=bf16", "lora={targets: [nothing]}")
    with pytest.raises(UsageError, match="nothing"):
        footprint(config, LENGTH, 2, model=model, shape=ModelShape(1, 1, 1, 1, 1), world_size=1)
