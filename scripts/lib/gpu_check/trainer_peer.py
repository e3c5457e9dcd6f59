"""transformers' Trainer on given tokens: the peer of `runner train` in the same call.

python -m torch.distributed.run ... trainer_peer.py MODEL TOKENS TASK MICRO STEPS COMPILED ANSWER
FOLDER
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

WARM_UP = 3  # steps that are not counted


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The seconds of each step, waited for on the device."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = _now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(_now() - self._began)


def main(
    model_folder: str,
    tokens: str,
    task: str,
    micro: str,
    steps: str,
    compiled: str,
    answer: str,
    folder: str,
) -> None:
    """Trains a few steps and writes their speed."""
    rows = np.load(tokens)
    masked = task == "masked-lm"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    kind: Any = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(model_folder, attn_implementation="sdpa", dtype=torch.float32)
    on_gpu = torch.cuda.is_available()
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=int(micro),
        max_steps=int(steps) + WARM_UP,
        bf16=not on_gpu or torch.cuda.is_bf16_supported(),
        fp16=on_gpu and not torch.cuda.is_bf16_supported(),
        torch_compile=compiled == "True",
        use_cpu=not on_gpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        optim="adamw_torch_fused",
        learning_rate=1e-4,
    )
    clock = Clock()
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row.tolist()} for row in rows],
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm=masked, mlm_probability=0.15
        ),
        callbacks=[clock],
    ).train()
    if arguments.process_index == 0:
        seconds = statistics.median(clock.steps[WARM_UP:])
        tokens_per_step = int(micro) * rows.shape[1] * arguments.world_size
        found = {
            "micro": int(micro), "tokens/s": tokens_per_step / seconds, "step s": seconds,
        }  # fmt: skip
        if on_gpu:
            found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        Path(answer).write_text(json.dumps(found))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:])
