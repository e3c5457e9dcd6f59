"""Masked-lm with DistributedDataParallel: torchrun --nproc_per_node=2 train_ddp.py --steps 4"""

import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
steps = parser.parse_args().steps

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)

tokenizer = AutoTokenizer.from_pretrained("acme/tiny-bert")
model = DistributedDataParallel(AutoModelForMaskedLM.from_pretrained("acme/tiny-bert"))
dataset = load_dataset("airlift-demo/pride-and-prejudice", "chapters", split="train")
dataset = dataset.map(
    lambda rows: tokenizer(rows["text"], truncation=True, padding="max_length", max_length=16),
    batched=True,
    remove_columns=dataset.column_names,
)
loader = DataLoader(
    dataset,
    batch_size=8,
    sampler=DistributedSampler(dataset),
    collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, batch in zip(range(steps), loader, strict=False):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} done", flush=True)
dist.destroy_process_group()
