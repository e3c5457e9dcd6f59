"""A bundle with models of random weights, made from their configurations: nothing is downloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.demo.repositories import paragraphs

TEXTS = "texts.json"
TIMES = 20
"""How often the text is repeated, so that a trial does not read a sequence twice."""

MOST_MERGES = 6000
"""Entries of the tokenizer. The models keep the vocabulary of the published ones."""


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        name: of the asset.
        task: of the run file.
        length: tokens per sequence.
        largest: the largest micro batch that is tried.
        settings: of the configuration's class: BertConfig or GPT2Config.
    """

    name: str
    task: str
    length: int
    largest: int
    settings: dict[str, Any]


LARGE = (
    Workload(
        "bert-large-512",
        "masked-lm",
        512,
        64,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096, "vocab_size": 30522},
    ),
    Workload(
        "gpt2-large-1024",
        "causal-lm",
        1024,
        64,
        {"n_embd": 1280, "n_layer": 36, "n_head": 20, "vocab_size": 50257},
    ),
)  # fmt: skip
"""What people train most with this tool. On a GPU."""

SMALL = (
    Workload(
        "bert-small-64",
        "masked-lm",
        64,
        2,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 128, "vocab_size": 8000},
    ),
    Workload(
        "gpt2-small-64",
        "causal-lm",
        64,
        2,
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 8000, "n_positions": 64},
    ),
)  # fmt: skip
"""The same way without a GPU: for `--dry-run`."""


def make_bundle(folder: Path, workloads: tuple[Workload, ...]) -> Path:
    """Makes models and text, stages them as a user does, and writes a run file per workload.

    Args:
        folder: holds everything.
        workloads: the models.

    Returns:
        The bundle's folder. The run files are beside it: `NAME.yaml`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for split in paragraphs().values() for _, text in split]
    texts = [f"{turn}: {text}" for turn in range(TIMES) for text in texts]
    (folder / TEXTS).write_text(json.dumps(texts))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(rows)
    assets = ["  text: {path: text.jsonl, convert: jsonl}"]
    for workload in workloads:
        make_model(folder / workload.name, workload)
        assets.append(f"  {workload.name}: {{path: {workload.name}}}")
        (folder / f"{workload.name}.yaml").write_text(_run_file(workload))
    manifest = "\n".join(["format: 1", "name: gpu-check", "assets:", *assets, ""])
    (folder / "manifest.yaml").write_text(manifest)
    subprocess.run(
        [sys.executable, "-m", "stage", "fetch", "-q", "manifest.yaml", "-o", "bundle"],
        cwd=folder,
        check=True,
    )
    return folder / "bundle"


def _run_file(workload: Workload) -> str:
    return (
        f"format: 1\nname: {workload.name}\ntask: {workload.task}\n"
        f"model: {{asset: {workload.name}}}\ndataset: {{asset: text, text: text}}\n"
        f"sequence_length: {workload.length}\nsteps: 1000\n"
        "batch: {global: auto, micro: auto}\noptimizer: {lr: 1.0e-4}\nprecision: auto\n"
    )


def make_model(folder: Path, workload: Workload) -> None:
    """Saves a model with random weights, the same in each call, and a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    if workload.task == "masked-lm":
        config: Any = transformers.BertConfig(**workload.settings)
        model: Any = transformers.BertForMaskedLM(config)
    else:
        config = transformers.GPT2Config(**workload.settings, **ids)
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {name: f"[{name[:-6].upper()}]" for name in (
        "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")}  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        (text for _, text in paragraphs()["train"]),
        trainers.BpeTrainer(vocab_size=MOST_MERGES, special_tokens=list(special.values())),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
