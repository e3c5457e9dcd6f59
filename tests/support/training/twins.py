"""Tiny twins of the tutorials' jobs: real architectures and layouts, random weights, real English.

Files that a user has beside the manifest (a CSV of prompts, CIFAR-10's tarball), and repositories
of a Hub (models, chats).
"""

from __future__ import annotations

import csv
import io
import json
import pickle
import tarfile
from pathlib import Path
from random import Random
from typing import Any

from scripts.lib.demo.repositories import DATASET, dataset_files, paragraphs
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.support.servers.web import serve
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_model_files, tiny_tokenizer

MANIFEST = """\
format: 1
name: twins
assets:
  tiny-chat: {model: acme/tiny-chat}
  gpt2-bare: {model: acme/gpt2-bare}
  still-bert: {model: acme/still-bert}
  tiny-vit: {model: acme/tiny-vit}
  tiny-resnet: {model: acme/tiny-resnet}
  reference: {dataset: DATASET, config: chapters}
  chats: {dataset: acme/chats}
  glue-mrpc: {dataset: acme/glue}
  conll2003: {dataset: acme/conll}
  prompts: {path: ./midjourney_prompt_dataset.csv, convert: csv}
  cifar-10: {url: "TARBALL", unpack: true, convert: cifar}
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def model_files(folder: Path, kind: str) -> dict[str, bytes]:
    """A model repository without dropout.

    Args:
        folder: to save in.
        kind: `chat` (Llama with a chat template), `still` (BERT), `vit` or `resnet`.
    """
    import torch
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
    )
    from transformers import ViTForImageClassification as ViT

    torch.manual_seed(0)
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    tokenizer: Any = None
    model: Any
    if kind == "resnet":
        shape: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
        model = ResNetForImageClassification(
            ResNetConfig(**shape, layer_type="basic", num_labels=3)
        )
    elif kind == "vit":
        model = ViT(ViTConfig(**small, image_size=32, patch_size=8, num_labels=3))
    elif kind == "chat":
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = tiny_tokenizer(special, 1024, wordpiece=False)
        tokenizer.chat_template = CHAT_TEMPLATE
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForCausalLM(
            LlamaConfig(**small, vocab_size=len(tokenizer), max_position_embeddings=128, **ids)
        )
    else:
        names = ("unk", "sep", "pad", "cls", "mask")
        tokenizer = tiny_tokenizer(
            {f"{name}_token": f"[{name.upper()}]" for name in names}, 1024, wordpiece=True
        )
        still = {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 128,
        }
        model = BertForMaskedLM(BertConfig(**small, **still, vocab_size=len(tokenizer)))
    for part in (model, tokenizer):
        if part is not None:
            part.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stage_twins(laptop: Path) -> None:
    """Stages `bundle` in a folder: models and chats from a Hub, a tarball by URL, a local CSV."""
    (laptop / "midjourney_prompt_dataset.csv").write_bytes(prompts_csv())
    with LoopbackHub(laptop / "hub") as hub, serve() as web:
        web.files["/~kriz/cifar-10-python.tar.gz"] = cifar_tarball()
        manifest = MANIFEST.replace("DATASET", DATASET).replace(
            "TARBALL", web.url("/~kriz/cifar-10-python.tar.gz")
        )
        (laptop / "twins.yaml").write_text(manifest)
        for kind in ("chat", "still", "vit", "resnet"):
            name = "still-bert" if kind == "still" else f"tiny-{kind}"
            hub.repositories.commit("models", f"acme/{name}", model_files(laptop / kind, kind))
        hub.repositories.commit(
            "models", "acme/gpt2-bare", tiny_model_files(laptop / "gpt2", "gpt2")
        )
        hub.repositories.commit("datasets", DATASET, dataset_files())
        hub.repositories.commit("datasets", "acme/chats", chats())
        hub.repositories.commit("datasets", "acme/glue", pairs())
        hub.repositories.commit("datasets", "acme/conll", sentences())
        fetch_bundle(laptop, "twins", hub.endpoint)


def _short(text: str) -> str:
    return text.partition(". ")[0][:120]


def prompts_csv() -> bytes:
    """A CSV as in the tutorial: `User` and `Prompt`, with quotes, commas and empty fields."""
    sink = io.StringIO()
    rows = csv.writer(sink)
    rows.writerow(["User", "Prompt"])
    for chapter, text in paragraphs()["train"][:200]:
        rows.writerow([f'What does "{chapter}" say?', _short(text)])
    rows.writerow(["asked, and never answered", ""])
    return sink.getvalue().encode()


def chats() -> dict[str, bytes]:
    """A dataset of conversations with two answers each, train and validation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {}
    for split, number in (("train", 80), ("validation", 24)):
        talks = [
            [
                {"role": "user", "content": f"Tell me about {chapter}."},
                {"role": "assistant", "content": _short(text)},
                {"role": "user", "content": "Which chapter was that?"},
                {"role": "assistant", "content": chapter},
            ]
            for chapter, text in paragraphs()[split][:number]
        ]
        sink = io.BytesIO()
        pq.write_table(
            pa.table({"messages": talks, "grade": [str(n) for n in range(number)]}), sink
        )
        files[f"data/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files


def labelled_parquet(columns: dict[str, Any], feature: dict[str, Any]) -> bytes:
    """A parquet file with the features of some columns, as `datasets` writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {"huggingface": json.dumps({"info": {"features": feature}})}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), sink)
    return sink.getvalue()


SAME = ("not_equivalent", "equivalent")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def pairs() -> dict[str, bytes]:
    """GLUE's layout: two sentences, and a class that only the second one shows."""
    random, files = Random(0), {}
    feature = {"label": {"names": list(SAME), "_type": "ClassLabel"}}
    for split, number in (("train", 200), ("validation", 40)):
        texts = [" ".join(text.split()[:3]) for _, text in paragraphs()[split][:number]]
        labels = [random.randrange(2) for _ in texts]
        words = (("no", "yes")[label] for label in labels)
        table = {
            "sentence1": texts,
            "sentence2": [f"{word}, {word}, {word}!" for word in words],
            "label": labels,
        }
        files[f"data/{split}-00000-of-00001.parquet"] = labelled_parquet(table, feature)
    return files


def sentences() -> dict[str, bytes]:
    """CoNLL's layout: lists of words, and of classes: people and places of the novel."""
    random, files = Random(1), {}
    classes = {"names": list(TAGS), "_type": "ClassLabel"}
    feature = {"ner_tags": {"feature": classes, "_type": "Sequence"}}
    people: list[tuple[str, ...]] = [(name,) for name in ("Elizabeth", "Jane", "Lydia")]
    people += [("Mr.", name) for name in ("Darcy", "Bingley", "Collins")]
    places = [("Longbourn",), ("Netherfield", "Park"), ("Rosings",), ("Hunsford",)]
    frames = ["{} went to {} .", "At {1} , {0} was seen .", "{} left {} with her sister ."]
    for split, number in (("train", 200), ("validation", 40)):
        table: dict[str, list[Any]] = {"tokens": [], "ner_tags": []}
        for _ in range(number):
            found = (random.choice(people), random.choice(places))
            words, tags = list[str](), list[int]()
            for word in random.choice(frames).format("0-", "1-").split():
                kind = int(word[0]) if word in ("0-", "1-") else None
                words += [word] if kind is None else found[kind]
                begin = 1 + 2 * (kind or 0)
                tags += [0] if kind is None else [begin, *[begin + 1] * (len(found[kind]) - 1)]
            table["tokens"].append(words)
            table["ner_tags"].append(tags)
        files[f"data/{split}-00000-of-00001.parquet"] = labelled_parquet(table, feature)
    return files


def cifar_tarball(rows: int = 40) -> bytes:
    """CIFAR-10's layout with few images: one colour per class, with noise."""
    import numpy as np

    random = np.random.default_rng(0)
    colours = random.integers(40, 216, (10, 3, 1))
    files: dict[str, Any] = {
        "batches.meta": {
            b"label_names": [name.encode() for name in CLASSES],
            b"num_cases_per_batch": rows,
            b"num_vis": 3072,
        }
    }
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        labels = random.integers(0, 10, rows)
        pixels = np.clip(
            colours[labels] + random.integers(-40, 41, (rows, 3, 1024)), 0, 255
        ).astype(np.uint8)
        files[name] = {
            b"data": pixels.reshape(rows, 3072),
            b"labels": [int(label) for label in labels],
            b"filenames": [f"{name}_{n}.png".encode() for n in range(rows)],
        }
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as archive:
        for name, batch in files.items():
            data = pickle.dumps(batch, protocol=2)
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return sink.getvalue()
