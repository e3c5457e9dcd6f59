"""What LoRA trains and what the rest weighs, known before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.inputs import ModelInput, resolve
from runner.job.memory import model_state
from runner.job.shapes import (
    Device,
    ModelShape,
    weight_shapes,
    with_lora,
)
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from tests.runner.conftest import Cluster
from tests.support.plans import decide

GIB = 2**30
A100 = Device("cuda", "A100", 80 * GIB, True, True, 500 * GIB)
HIDDEN, INNER, WORDS, LAYERS = 4096, 14336, 32000, 32
# Mistral 7B, which neural-chat is: grouped attention, a gated block, nothing tied.
LAYER = {
    "self_attn.q_proj": [HIDDEN, HIDDEN],
    "self_attn.k_proj": [1024, HIDDEN],
    "self_attn.v_proj": [1024, HIDDEN],
    "self_attn.o_proj": [HIDDEN, HIDDEN],
    "mlp.gate_proj": [INNER, HIDDEN],
    "mlp.up_proj": [INNER, HIDDEN],
    "mlp.down_proj": [HIDDEN, INNER],
    "input_layernorm": [HIDDEN],
    "post_attention_layernorm": [HIDDEN],
}
MISTRAL = {
    "model.embed_tokens.weight": [WORDS, HIDDEN],
    "lm_head.weight": [WORDS, HIDDEN],
    "model.norm.weight": [HIDDEN],
    **{f"model.layers.{n}.{name}.weight": s for n in range(LAYERS) for name, s in LAYER.items()},
}
SHAPE = ModelShape(7_241_732_096, 32768, HIDDEN, LAYERS, WORDS)
QLORA = Path(__file__).parents[3] / "runs" / "neural-chat-qlora.yaml"


def test_the_parameters_of_the_tutorials_job_are_those_peft_prints() -> None:
    """6,815,744 of 7B: rank 8 on q, k, v and o of Mistral."""
    shape = with_lora(SHAPE, RunConfig.load(QLORA), MISTRAL, [])
    assert shape.num_trained == 6_815_744
    assert (
        shape.num_quantized
        == LAYERS * sum(s[0] * s[1] for s in LAYER.values() if len(s) == 2)
        == 6_979_321_856
    )


def test_no_stage_that_partitions_packed_bytes_is_chosen_automatically() -> None:
    config = RunConfig.load(QLORA, ["optimizer.name=adamw", "engine={}"])
    shape = with_lora(SHAPE, config, MISTRAL, [])
    assert decide(config, shape, A100, 4).zero == 1
    with pytest.raises(UsageError, match="at any ZeRO stage up to 2") as raised:
        decide(config, shape, replace(A100, memory=4 * GIB), 4)
    assert "zero: 3" not in raised.value.remedy


def test_weights_with_a_broken_header_are_refused_with_their_path(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x09" + bytes(7) + b"{")
    model = ModelInput("bert", tmp_path, "acme/bert", None, {"model.safetensors": ""}, {})
    with pytest.raises(UsageError) as raised:
        weight_shapes(model)
    assert str(tmp_path / "model.safetensors") in raised.value.message
    assert "its header would have 9 bytes, the file has 9" in raised.value.message


def test_where_no_target_is_named_they_are_those_of_peft(cluster: Cluster) -> None:
    """GPT-2's c_attn: 64 in, 192 out, two layers."""
    config = RunConfig.load(
        cluster.write(task="causal-lm", model={"asset": "tiny-gpt2"}, lora={"rank": 4})
    )
    run = TrainingRun(config, resolve(config, cluster.bundle), RunFolder(Path()), Path(), ())
    assert run.shape.num_trained == 4 * (64 + 192) * 2


def test_gradients_and_moments_are_counted_for_what_is_trained_alone() -> None:
    config = RunConfig.load(QLORA, ["quantization=null", "optimizer.name=adamw", "engine={}"])
    shape = with_lora(SHAPE, config, MISTRAL, [])
    assert model_state(config, shape, 0, 4) == 18 * 6_815_744 + 2 * SHAPE.num_parameters
    assert model_state(config, shape, 3, 4) == (18 * 6_815_744 + 2 * SHAPE.num_parameters) // 4
    plan = decide(config, shape, A100, 4)
    assert plan.zero == 1
    (why,) = [choice.reason for choice in plan.choices if choice.key == "engine.zero"]
    assert "18 bytes x 6.82 M parameters that are trained and 14.5 GB that are not" in why
