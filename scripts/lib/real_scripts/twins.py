"""Tiny twins of models and datasets of the Hub: the same names, columns and files, other content.

Models have some thousand parameters with random weights, datasets some rows of a novel.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.demo.repositories import paragraphs
from scripts.lib.hub.repositories import Content, Repositories
from scripts.lib.real_scripts.tiny_models import MODELS

MOVED = {
    "models": {
        "roberta-base": "FacebookAI/roberta-base",
        "bert-base-cased": "google-bert/bert-base-cased",
        "bert-base-uncased": "google-bert/bert-base-uncased",
        "gpt2": "openai-community/gpt2",
    },
    "datasets": {"wikitext": "Salesforce/wikitext", "glue": "nyu-mll/glue"},
}
"""Old names that scripts still use -> the names to which the Hub redirects them."""

Splits = Mapping[str, Mapping[str, Sequence[Any]]]
Configs = Mapping[str, tuple[Splits, Mapping[str, Any]]]
NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")


def make_twins(repositories: Repositories, models: Sequence[str], datasets: Sequence[str]) -> None:
    """Commits the twins of these repositories, and the redirects to them."""
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            MODELS[name](Path(folder))
            repositories.commit("models", name, Path(folder))
    for name in datasets:
        repositories.commit("datasets", name, _files(DATASETS[name]()))
    for kind, here in (("models", models), ("datasets", datasets)):
        for old, new in MOVED[kind].items():
            if new in here:
                repositories.configure(kind, old, moved_to=new)


def _files(configs: Configs) -> dict[str, Content]:
    """A dataset repository: parquet files by split, and a card that declares the configs."""
    import datasets

    files: dict[str, Content] = {}
    lines = ["---", "license: other", "configs:"]
    for config, (splits, features) in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        kinds = datasets.Features(features) if features else None
        for split, columns in splits.items():
            table = datasets.Dataset.from_dict(dict(columns), features=kinds)
            sink = io.BytesIO()
            table.to_parquet(sink)
            files[f"{config}/{split}-00000-of-00001.parquet"] = sink.getvalue()
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    files["README.md"] = "\n".join([*lines, "---", "# A twin of a few rows", ""]).encode()
    return files


def _texts(split: str, number: int) -> list[str]:
    source = paragraphs()["train" if split == "train" else "validation"]
    return [text[:400] for _, text in source[:number]]


def _split(names: str, rows: Callable[[str], Mapping[str, Sequence[Any]]]) -> Splits:
    return {name: rows(name) for name in names.split()}


def _wikitext() -> Configs:
    # A script takes the first 500 rows of `train`.
    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        return {"text": _texts(split, 80) * (8 if split == "train" else 1)}

    splits = _split("train validation test", rows)
    return {"wikitext-2-raw-v1": (splits, {}), "wikitext-2-v1": (splits, {})}


def _glue() -> Configs:
    import datasets

    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        words = [text[:80] for text in _texts(split, 40)]
        labels = [number % 2 for number in range(len(words))]
        pairs = [a if same else b for a, b, same in zip(words, words[::-1], labels, strict=True)]
        ids = list(range(len(words)))
        return {"sentence1": words, "sentence2": pairs, "label": labels, "idx": ids}

    features = {name: datasets.Value("string") for name in ("sentence1", "sentence2")}
    label = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    every = {**features, "label": label, "idx": datasets.Value("int32")}
    return {"mrpc": (_split("train validation test", rows), every)}


def _conll() -> Configs:
    import datasets

    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        tokens = [text.split()[:12] for text in _texts(split, 40)]
        tags = [[1 if word[0].isupper() else 0 for word in line] for line in tokens]
        return {"id": [str(i) for i in range(len(tokens))], "tokens": tokens, "ner_tags": tags}

    tag = datasets.ClassLabel(names=list(NER))
    strings = datasets.Value("string")
    features = {"id": strings, "tokens": datasets.List(strings), "ner_tags": datasets.List(tag)}
    return {"default": (_split("train validation test", rows), features)}


def _chat(text: str) -> list[dict[str, str]]:
    half = len(text) // 2
    return [
        {"role": "user", "content": text[:half]},
        {"role": "assistant", "content": text[half:]},
    ]


def _chats() -> Configs:
    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        texts = _texts(split, 24)
        return {"source": ["novel"] * len(texts), "messages": [_chat(text) for text in texts]}

    return {"default": (_split("train test", rows), {})}


def _ultrafeedback() -> Configs:
    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        texts = _texts(split, 24)
        chosen = [_chat(text) for text in texts]
        other = [[*pair[:1], {"role": "assistant", "content": "No."}] for pair in chosen]
        scores = {"score_chosen": [2.0] * len(texts), "score_rejected": [1.0] * len(texts)}
        return {"chosen": chosen, "rejected": other, **scores}

    return {name: (_split("train test", rows), {}) for name in ("default", "other")}


def _alpaca() -> Configs:
    def rows(split: str) -> Mapping[str, Sequence[Any]]:
        texts = _texts(split, 40)
        halves = [text[:60] for text in texts]
        return {"output": halves, "input": [""] * len(texts), "instruction": halves[::-1]}

    return {"default": (_split("train", rows), {})}


DATASETS: Mapping[str, Callable[[], Configs]] = {
    "Salesforce/wikitext": _wikitext,
    "nyu-mll/glue": _glue,
    "tomaarsen/conll2003": _conll,
    "trl-lib/Capybara": _chats,
    "trl-lib/ultrafeedback_binarized": _ultrafeedback,
    "yahma/alpaca-cleaned": _alpaca,
}
