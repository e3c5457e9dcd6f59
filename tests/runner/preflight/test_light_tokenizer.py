"""`runner check` imports no transformers where the tokenizer's files say enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.data.tokenizing import frame, load_tokenizer
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.job.vocabulary import serves
from tests.runner.conftest import Cluster

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
MASK = {"__type": "AddedToken", "content": "[MASK]", "lstrip": True}
NAMED = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": MASK}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}


def tokenizer(words: list[str], kind: str = "WordPiece") -> dict[str, Any]:
    vocabulary = {word: number for number, word in enumerate(words)}
    model: dict[str, Any] = {"type": kind, "vocab": vocabulary}
    model |= {"merges": []} if kind == "BPE" else {"unk_token": "[UNK]"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    added = [
        {
            "id": number, "content": word, "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }
        for number, word in enumerate(words)
        if word[0] in "[<"
    ]  # fmt: skip
    return {"version": "1.0", "added_tokens": added, "model": model}


def model(folder: Path, kind: str, settings: object, vocabulary: object) -> ModelInput:
    files = {"config.json": {"model_type": kind}, "tokenizer.json": vocabulary}
    if settings is not None:
        files["tokenizer_config.json"] = settings
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return ModelInput("m", folder, "a/m", None, dict.fromkeys(files, ""), {"model_type": kind})


GPT2 = tokenizer(["<|endoftext|>", "a", "b"], "BPE")
SURE: dict[str, tuple[str, str, object, object]] = {
    "all tokens are named": ("masked-lm", "bert", GENERIC, tokenizer(BERT)),
    "those of the class": (
        "masked-lm", "bert", {"tokenizer_class": "BertTokenizer"}, tokenizer(BERT),
    ),
    "those of the old class": (
        "masked-lm", "bert", {"tokenizer_class": "BertTokenizerFast"}, tokenizer(BERT),
    ),
    "as google-bert has it": ("masked-lm", "bert", {"do_lower_case": True}, tokenizer(BERT)),
    "as gpt2 has it": ("causal-lm", "gpt2", {"model_max_length": 1024}, GPT2),
    "no settings": ("causal-lm", "gpt2", None, GPT2),
}  # fmt: skip
UNSURE: dict[str, tuple[str, str, object, object]] = {
    "no mask token": (
        "masked-lm", "bert", {"tokenizer_class": "PreTrainedTokenizerFast"}, tokenizer(BERT),
    ),
    "a mask token that is no token": (
        "masked-lm", "bert", GENERIC | {"mask_token": "<mask>"}, tokenizer(BERT),
    ),
    "a token without its type": (
        "masked-lm", "bert", GENERIC | {"mask_token": {"content": "[MASK]"}}, tokenizer(BERT),
    ),
    "a null": ("masked-lm", "bert", {"mask_token": None}, tokenizer(BERT)),
    "code": ("masked-lm", "bert", GENERIC | {"auto_map": {}}, tokenizer(BERT)),
    "another class": ("masked-lm", "bert", {"tokenizer_class": "XTokenizer"}, tokenizer(BERT)),
    "another model": ("masked-lm", "nobody", {}, tokenizer(BERT)),
    "a path as model type": ("masked-lm", "../bert", {}, tokenizer(BERT)),
    "torn": ("masked-lm", "bert", GENERIC, '{"version": "1.0"'),
    "settings are a list": ("masked-lm", "bert", [], tokenizer(BERT)),
    "no words": ("masked-lm", "bert", GENERIC, tokenizer(BERT[:5])),
    "chats": ("instruction", "bert", GENERIC, tokenizer(BERT)),
}  # fmt: skip


@pytest.mark.parametrize("case", SURE)
def test_where_it_says_yes_transformers_agrees(tmp_path: Path, case: str) -> None:
    task, *files = SURE[case]
    asset = model(tmp_path, *files)
    assert serves(task, asset)
    real = load_tokenizer(asset)
    before, separator, _ = frame(task, real)
    wanted = ["[CLS]", "[SEP]"] if task == "masked-lm" else ["<|endoftext|>"]
    assert real.convert_ids_to_tokens([*before, separator]) == wanted
    assert set(real.get_vocab()) - set(real.all_special_tokens)


@pytest.mark.parametrize("case", UNSURE)
def test_what_is_not_sure_is_left_to_transformers(tmp_path: Path, case: str) -> None:
    task, *files = UNSURE[case]
    assert not serves(task, model(tmp_path, *files))


def test_settings_that_transformers_cannot_use_are_a_message(tmp_path: Path) -> None:
    """Once transformers' TypeError came through, with a traceback."""
    _, *files = UNSURE["a token without its type"]
    with pytest.raises(UsageError, match="no tokenizer can be loaded: Special token mask_token"):
        load_tokenizer(model(tmp_path, *files))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_second_check_imports_no_transformers(cluster: Cluster, kind: str) -> None:
    """Two thirds of the time of `runner check` were its import."""
    cluster.write(
        task="masked-lm" if kind == "bert" else "causal-lm", model={"asset": f"tiny-{kind}"},
        dataset={"asset": "reference"},
    )  # fmt: skip
    # What only transformers can say (is its class content with config.json?) is kept.
    assert cluster.run("check", "tiny.yaml", "--processes", "2").returncode == 0
    done = cluster.run("check", "tiny.yaml", "--processes", "2", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "runner.job.preflight" in imported and "transformers" not in imported
