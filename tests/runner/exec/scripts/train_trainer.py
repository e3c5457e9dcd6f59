"""Causal-lm with Trainer.

torchrun --nproc_per_node=2 train_trainer.py --deepspeed auto.json --output_dir out
"""

import json

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained("acme/tiny-gpt2")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("acme/tiny-gpt2")
rows = load_dataset("airlift-demo/pride-and-prejudice", "chapters", split="train[:64]")
rows = rows.map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=16),
    remove_columns=rows.column_names,
)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
trainer.train()
if trainer.is_world_process_zero():
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    engine = trainer.model_wrapped
    print(
        json.dumps(
            [
                type(engine).__name__,
                engine.world_size,
                engine.train_batch_size(),
                engine.config,
                losses,
            ]
        )
    )
