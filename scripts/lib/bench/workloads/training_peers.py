"""The programs that `runner train` is measured beside: what people write today, on the same text.

python training_peers.py PROGRAM SETTINGS.json, started once or by torch.distributed.run

Each writes {"seconds": ...} to the answer file: the seconds for `unit` real tokens (padding does
not count) or, of `bare-*`, of one step; the median over the steps, without the first ones.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WARM_UP = 3
IGNORED = -100


def padded(settings: dict[str, Any]) -> float:
    """The usual first script: each text is padded to the longest length, one DDP model per rank."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

    dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = [
        tokenizer(text, truncation=True, padding="max_length", max_length=settings["pad_to"])
        for text in _texts(settings)
    ]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15)
    loader: Any = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=settings["padded_batch"],
        sampler=DistributedSampler(rows),  # type: ignore[arg-type]
        collate_fn=collate,
    )
    model = DistributedDataParallel(AutoModelForMaskedLM.from_pretrained(settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    bf16 = settings["precision"] == "bf16"

    def steps() -> Iterator[tuple[float, float]]:
        for batch in loader:
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield _summed(batch["attention_mask"]), time.perf_counter() - began

    return _seconds_per_unit(steps(), settings)


def trainer(settings: dict[str, Any]) -> float:
    """transformers' Trainer as its examples run_mlm.py and run_clm.py use it: texts joined, cut."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    joined = [
        token
        for text in _texts(settings)
        for token in tokenizer(text, return_special_tokens_mask=False)["input_ids"]
    ]
    length = settings["length"]
    rows = [
        {"input_ids": joined[begin : begin + length]}
        for begin in range(0, len(joined) - length + 1, length)
    ]
    seconds: list[float] = []
    on_gpu, masked = torch.cuda.is_available(), settings["task"] == "masked-lm"
    of_task = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.append(now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] = now() - seconds[-1]

    arguments = transformers.TrainingArguments(
        output_dir=f"{settings['answer']}.trainer",
        per_device_train_batch_size=settings["batch"],
        max_steps=settings["steps"],
        bf16=settings["precision"] == "bf16",
        fp16=settings["precision"] == "fp16",
        use_cpu=not on_gpu,
        save_strategy="no",
        logging_steps=500,
        report_to=[],
        ddp_backend="nccl" if on_gpu else "gloo",
    )
    transformers.Trainer(
        model=of_task.from_pretrained(settings["model"]),
        args=arguments,
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm=masked, mlm_probability=0.15
        ),
        callbacks=[Clock()],
    ).train()
    tokens = settings["batch"] * length * arguments.world_size
    return float(settings["unit"] * statistics.median(seconds[WARM_UP:]) / tokens)


def bare_ddp(settings: dict[str, Any]) -> float:
    """A loop of ten lines around the same module and the same batches, in memory."""
    from torch.nn.parallel import DistributedDataParallel

    module, batches = _module_and_batches(settings)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        loss = model(**batch) / settings["predictions"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def bare_deepspeed(settings: dict[str, Any]) -> float:
    """The same with DeepSpeed's engine at ZeRO stage 2."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module, batches = _module_and_batches(settings)
    dist.init_process_group("gloo")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True),
        config={
            "train_micro_batch_size_per_gpu": settings["batch"],
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
        },
        dist_init_required=False,
    )
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        loss = engine(**batch) / settings["predictions"]
        engine.backward(loss)
        engine.step()
        loss.item()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def encode(settings: dict[str, Any]) -> float:
    """Only the tokenizer's own work: `encode_batch_fast` of all texts, and the file written."""
    from tokenizers import Tokenizer

    texts = _texts(settings) * settings["repeat"]
    tokenizer = Tokenizer.from_file(f"{settings['model']}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    began = time.perf_counter()
    encoded = tokenizer.encode_batch_fast(texts)
    ids = np.concatenate([np.asarray(one.ids, dtype=np.uint16) for one in encoded])
    ids.tofile(f"{settings['answer']}.bin")
    return time.perf_counter() - began


def _texts(settings: dict[str, Any]) -> list[str]:
    return list(json.loads(Path(settings["texts"]).read_text()))


def _summed(mask: torch.Tensor) -> float:
    """Real tokens of a batch, over all ranks."""
    count = mask.sum().float()
    dist.all_reduce(count)
    return float(count)


def _seconds_per_unit(steps: Iterator[tuple[float, float]], settings: dict[str, Any]) -> float:
    """The unit's seconds: the median step divided by the mean of its tokens, which vary."""
    found = [step for step, _ in zip(steps, range(settings["steps"]), strict=False)][WARM_UP:]
    tokens = statistics.mean(tokens for tokens, _ in found)
    return float(settings["unit"] * statistics.median(seconds for _, seconds in found) / tokens)


def _module_and_batches(settings: dict[str, Any]) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """`runner train`'s own module and its batches of this rank: what differs is the loop alone.

    Before the process group is made: without one, each rank reads the weights itself.
    """
    from runner.job.training_run import TrainingRun
    from runner.tasks import task_named
    from runner.training.components.batches import Order, WeightedDataset
    from scripts.lib.bench.workloads.training import opened_stores

    run = TrainingRun.load(
        Path(settings["run_file"]), Path(settings["bundle"]), Path(settings["output"]), ()
    )
    stores = opened_stores(run)
    task = task_named(run.config.task).objective(run.config, run.inputs.model, stores.facts)
    order = Order([WeightedDataset(len(stores), 1.0)], run.config.seed)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = []
    for step in range(settings["steps"]):
        (part,) = order.step(step, settings["batch"] * ranks, rank, ranks, settings["batch"])
        batches.append(task.collate(stores.rows([s.index for s in part], task.rows), part))
    return task.module.train(), batches


PROGRAMS = {
    "padded": padded,
    "trainer": trainer,
    "bare-ddp": bare_ddp,
    "bare-deepspeed": bare_deepspeed,
    "encode": encode,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(Path(sys.argv[2]).read_text())
    result = PROGRAMS[sys.argv[1]](asked)
    if os.environ.get("RANK", "0") == "0":
        Path(asked["answer"]).write_text(json.dumps({"seconds": result}))
