"""`engine: {accelerate: fsdp.yaml}`: the file that `accelerate config` wrote works as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.errors import UsageError

RUN = """\
format: 1
task: causal-lm
model: {asset: gpt2}
dataset: {asset: words, text: text}
"""
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def load(folder: Path, theirs: str, more: str = "engine: {accelerate: their.yaml}\n") -> RunConfig:
    (folder / "their.yaml").write_text(theirs)
    (folder / "run.yaml").write_text(RUN + more)
    return RunConfig.load(folder / "run.yaml")


def test_fsdp_settings_become_those_of_the_engine_each_with_its_reason(tmp_path: Path) -> None:
    config = load(tmp_path, FSDP)
    engine = config.engine
    assert (engine.name, engine.sharding, engine.offload) == ("fsdp", "grad_op", "cpu")
    assert engine.wrap == {"layer": "GPT2Block"}
    assert config.precision == "bf16" and config.activation_checkpointing
    said = {note.key: (note.value, note.reason) for note in config.explain()}
    assert said["engine.sharding"] == ("grad_op", "fsdp_sharding_strategy: SHARD_GRAD_OP")
    assert said["num_processes: 2"][0] == "left out" and "slurm:" in said["num_processes: 2"][1]
    assert said["fsdp_backward_prefetch: BACKWARD_PRE"][0] == "left out"
    assert "downcast_bf16: no" not in said


def test_fsdp_of_version_2_and_a_size_to_wrap_by(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "distributed_type: FSDP\nmixed_precision: no\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: true\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
        "  fsdp_min_num_params: 1000\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
    )
    assert config.engine.sharding == "full" and config.engine.wrap == {"min_params": 1000}
    assert config.precision == "fp32" and config.compile


def test_deepspeed_settings_and_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    config = load(
        tmp_path,
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
        "  zero3_init_flag: true\n",
    )
    assert config.engine.zero == 3 and config.engine.config == str(tmp_path / "ds.json")
    config = load(
        tmp_path,
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "  gradient_clipping: 0.5\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n  gradient_accumulation_steps: 4\n",
    )
    assert (config.engine.name, config.engine.zero, config.engine.offload) == (
        "deepspeed",
        2,
        "cpu",
    )
    assert config.optimizer.clip == 0.5
    assert "gradient_accumulation_steps: 4" in {note.key for note in config.explain()}


def test_several_gpus_without_either_are_ddp(tmp_path: Path) -> None:
    assert load(tmp_path, "distributed_type: MULTI_GPU\n").engine.name == "ddp"


def test_a_contradiction_names_both_files(tmp_path: Path) -> None:
    more = "engine: {accelerate: their.yaml, sharding: full}\nprecision: auto\n"
    with pytest.raises(UsageError) as error:
        load(tmp_path, FSDP, more)
    assert "their.yaml says fsdp_sharding_strategy: SHARD_GRAD_OP" in str(error.value)
    assert "run.yaml:5 says engine.sharding: full" in str(error.value)
    agreeing = more.replace("full", "grad_op")
    assert load(tmp_path, FSDP, agreeing).precision == "bf16"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("distributed_type: MEGATRON_LM\n", "their.yaml:1: MEGATRON_LM cannot be done here"),
        ("distributed_type: FSDP\nmixed_precision: fp8\n", "their.yaml:2: fp8 cannot"),
        (FSDP.replace("SHARD_GRAD_OP", "HYBRID_SHARD"), "their.yaml:12: HYBRID_SHARD cannot"),
        ("distributed_type: [FSDP\n", "their.yaml"),
    ],
)
def test_what_changes_the_training_and_is_not_here_is_refused(
    tmp_path: Path, theirs: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        load(tmp_path, theirs)


@pytest.mark.parametrize("value", ["none.yaml", "3", "[a]"])
def test_a_path_that_is_no_file_is_refused_with_the_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match=r"run.yaml:5"):
        load(tmp_path, FSDP, f"engine: {{accelerate: {value}}}\n")
