"""Names of settings in other trainers, which people write first, and the keys they have here."""

from __future__ import annotations

NAMES_ELSEWHERE = {
    "add_tokens": "tokenizer.add_tokens",
    "batch_size": "batch.global",
    "bf16": "precision",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_steps": "evaluation.patience",
    "eval_steps": "evaluation.every",
    "fp16": "precision",
    "gpus": "slurm.gpus_per_node",
    "gradient_checkpointing": "activation_checkpointing",
    "label_smoothing_factor": "label_smoothing",
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "checkpoint.best",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "schedule.name",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_steps": "steps",
    "mlm_probability": "masked_share",
    "micro_batch_size": "batch.micro",
    "model_name_or_path": "model.asset",
    "num_train_epochs": "epochs",
    "partition": "slurm.partition",
    "per_device_train_batch_size": "batch.micro",
    "save_steps": "checkpoint.every",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "weight_decay": "optimizer.weight_decay",
}
"""Name of Trainer, of LLaMA-Factory or of everyday speech -> the dotted key of a run file."""
