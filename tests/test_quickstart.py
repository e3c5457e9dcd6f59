"""The links of the README and of its translations; its lines, its model and its data, for tests."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BY_HAND = ROOT / "docs/howto/by-hand.md"
TRANSLATIONS = [ROOT / "docs" / f"README.{name}.md" for name in ("zh-CN", "ru")]
PAGES = [README, *TRANSLATIONS]


def code(page: Path) -> list[tuple[str, str]]:
    """(command, comment) of each line of the page's code blocks."""
    lines = re.findall(r"^    (\S.*|  \S.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    parts = [line.strip().partition("  #") for line in lines]
    return [(command.strip(), comment.strip()) for command, _, comment in parts]


def links(page: Path) -> list[str]:
    """Where the links and pictures of the page lead, from the root of the checkout."""
    found = []
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        place = link if "://" in link else os.path.relpath(page.parent / link, ROOT)
        found.append(place)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    found = links(page)
    assert len(found) > 15
    assert [link for link in found if "://" not in link and not (ROOT / link).exists()] == []


def small_bert(folder: Path) -> dict[str, bytes]:
    """A model repository with the files of BERT-large, and few weights."""
    from transformers import BertConfig, BertForMaskedLM

    from tests.support.training.models import tiny_tokenizer

    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokenizer = tiny_tokenizer(special, 1024, wordpiece=True)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **size)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wikitext() -> dict[str, bytes]:
    """A dataset repository with the layout of Salesforce/wikitext."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scripts.lib.demo.repositories import paragraphs

    config = "wikitext-2-raw-v1"
    splits = ("test", "train", "validation")
    card = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    head = f"---\nlicense: cc-by-sa-3.0\nconfigs:\n- config_name: {config}\n  data_files:\n"
    files = {"README.md": f"{head}{card}---\n".encode()}
    for split in splits:
        sink = io.BytesIO()
        texts = [text for _, text in paragraphs()["train"]]
        pq.write_table(pa.table({"text": texts}), sink)
        files[f"{config}/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files
