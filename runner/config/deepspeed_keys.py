"""The keys at the top of a ds_config.json: those that DeepSpeed reads, has removed, or that do
nothing here.

DeepSpeed itself judges their values, where it is installed (`runner.training.engines.deepspeed`).
A laptop or login node without it has these tables, and a test compares them with the installed
version (deepspeed/runtime/config.py).
"""

from __future__ import annotations

from typing import Any

KNOWN = frozenset({
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet",
    "comms_logger", "communication_data_type", "compile", "csv_monitor", "data_efficiency",
    "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation",
    "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip
REMOVED = frozenset({
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity",
    "graph_harvesting", "nebula", "progressive_layer_drop", "quantize_training",
    "sparse_attention", "sparse_gradients",
})  # fmt: skip
"""DeepSpeed 0.19 raises an error for these (github.com/deepspeedai/DeepSpeed/issues/8489)."""
REMOVED_FROM_ZERO = frozenset({
    "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param",
})  # fmt: skip
"""The same, of `zero_optimization`."""
WITHOUT_EFFECT = {
    "activation_checkpointing": "the run file's key of that name decides",
    "autotuning": "only DeepSpeed's launcher reads it; `runner bench` tries batch sizes",
    "comet": "it reports over the network",
    "data_efficiency": "only DeepSpeed's data loader reads it",
    "dataloader_drop_last": "only DeepSpeed's data loader reads it",
    "hybrid_engine": "only generation uses it",
    "pipeline": "only a model that is made as a pipeline reads it",
    "vocabulary_size": "DeepSpeed only prints a warning about it",
    "wall_clock_breakdown": "metrics.jsonl has the times of each step",
    "wandb": "it reports over the network; the run file's key of that name does not",
    "zero_allow_untested_optimizer": "the optimizers of a run file are tested",
    "zero_force_ds_cpu_optimizer": "torch's optimizer is used, also with offload",
}
"""Key -> why it changes nothing in a run of ours. A file with one is accepted, with a line."""
_PARALLEL = "the ranks of `runner train` are all data-parallel"
_OF_ITS_OWN = "it works with an optimizer of DeepSpeed's own alone, and `runner train` uses torch's"
_OFF = ("none", "false", "0")  # str() of None, too: an absent key
REFUSED = {
    "sequence_parallel_size": ((*_OFF, "1"), _PARALLEL),
    "tensor_parallel.autotp_size": ((*_OFF, "1"), _PARALLEL),
    "tensor_parallel.tp.tp_size": ((*_OFF, "1"), _PARALLEL),
    "expert_parallel.enabled": (_OFF, _PARALLEL),
    "gradient_allreduce_op": (
        ("none", "mean"),
        "a sum would multiply the gradient by the number of ranks, as the loss of `runner train` "
        "is a mean over all of them",
    ),
    "managed_gradient_accumulation": (
        ("none", "true"),
        "it would update the weights after each micro batch, which `runner train` lets DeepSpeed "
        "count",
    ),
    "zero_optimization.zenflow": (_OFF, _OF_ITS_OWN),
    "zero_optimization.offload_optimizer.super_offload": (_OFF, _OF_ITS_OWN),
}
"""Key -> the values that change nothing, and why all others are refused."""
CLIP = 1.0
"""What `gradient_clipping` is in DeepSpeed 0.19.8 where a file has none; older versions have 0."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adamw", {"lr": 1e-3, "weight_decay": 0.0}),
    "adamw": ("adamw", {"lr": 1e-3, "weight_decay": 0.0}),
    "lion": ("lion", {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0}),
    "SGD": ("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
}
"""`optimizer.type` -> the optimizer of a run file, and DeepSpeed's defaults that differ from its.

DeepSpeed reads its own names in any case, and others as names in torch.optim.
"""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""`scheduler.type` -> the schedule of a run file that is nearest to it."""
