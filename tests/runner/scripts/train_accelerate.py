"""Causal-lm with Accelerate and DeepSpeed.

accelerate launch --config_file accelerate.yaml train_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

accelerator = Accelerator()
set_seed(1 + accelerator.local_process_index)
accelerator.print("Creating model")

tokenizer = AutoTokenizer.from_pretrained("acme/tiny-gpt2")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("acme/tiny-gpt2")
rows = load_dataset("airlift-demo/pride-and-prejudice", "chapters", split="train[:64]")


def collate(batch):
    texts = tokenizer(
        [row["text"] for row in batch],
        truncation=True,
        padding=True,
        max_length=16,
        return_tensors="pt",
    )
    return {**texts, "labels": texts["input_ids"]}


loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.4f}")
accelerator.save_state("states")
accelerator.wait_for_everyone()
accelerator.print(
    f"{type(model).__name__} at stage {model.zero_optimization_stage()} on {model.world_size} ranks"
)
accelerator.end_training()
