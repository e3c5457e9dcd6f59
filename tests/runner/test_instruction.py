"""Instruction data: what is learned is the response and nothing else, however a row is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.data.instruction import by_format, by_template
from runner.data.prepare import prepare
from runner.data.recipe import Recipe
from runner.data.store import TokenStore
from runner.data_config import DatasetConfig
from runner.errors import UsageError
from runner.inputs import ModelInput, SplitInput
from tests.runner.test_prepare import make_tokenizer, word

EOS, BOS = 3, 2
SPECIAL = {"eos_token": "[SEP]", "unk_token": "[UNK]"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelInput:
    return make_tokenizer(tmp_path_factory.mktemp("words"), 500, SPECIAL)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., SplitInput]:
    def write(**values: Any) -> SplitInput:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(values)
        pq.write_table(table, tmp_path / "train.parquet")
        return SplitInput("train", (tmp_path / "train.parquet",), ("d",), table.num_rows, {})

    return write


def prepared(folder: Path, split: SplitInput, model: ModelInput, length: int = 16, **settings: Any) -> TokenStore:
    documents = settings.pop("documents", "alone")
    dataset = DatasetConfig(asset="a", **settings)
    recipe = Recipe("instruction", length, split, dataset, None, model, documents)
    store = prepare(recipe, folder / "stores", lambda line: None)
    assert isinstance(store, TokenStore)
    return store


def shown(store: TokenStore, index: int) -> list[tuple[int, bool]]:
    row = store.row(index)
    return [(int(token), bool(learned)) for token, learned in zip(row.ids, row.learned, strict=True)]


PAIR = {"prompt": "ask", "response": "say"}


def test_the_response_and_the_end_of_text_are_learned_and_the_prompt_is_not(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    store = prepared(tmp_path, write(ask=["w1 w2"], say=["w3 w4"]), words, **PAIR)
    assert shown(store, 0) == [(word(1), False), (word(2), False), (word(3), True), (word(4), True), (EOS, True)]


def test_all_is_learned_where_that_is_asked_for(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    store = prepared(tmp_path, write(ask=["w1 w2"], say=["w3"]), words, loss_on="all", **PAIR)
    assert all(learned for _, learned in shown(store, 0))
    assert not (store.folder / "learned.bin").exists()


def test_what_a_format_writes_out_is_not_added_again(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    split = write(ask=["w1"], say=["w3"])
    store = prepared(tmp_path, split, words, format="w9 {ask} w8 {say} [SEP]")
    assert [token for token, _ in shown(store, 0)] == [word(9), word(1), word(8), word(3), EOS]
    assert [learned for _, learned in shown(store, 0)] == [False, False, False, True, True]


def test_braces_columns_and_numbers_in_a_format() -> None:
    sample = by_format("{{x}} {a}: {b}!", {"a": "x{b}", "b": 7})
    assert sample is not None
    assert sample.text == "{x} x{b}: 7!"
    assert [sample.text[begin:end] for begin, end in sample.response] == ["7!"]
    assert by_format("{a}", {"a": None}) is None


def chatml(messages: list[dict[str, Any]], *, asks: bool) -> str:
    return "".join(f"<{m['role']}>{m['content']}</s>" for m in messages) + ("<assistant>" if asks else "")


def test_every_answer_of_a_conversation_is_learned() -> None:
    said = (("system", "be kind"), ("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "dd"))
    talk = [{"role": role, "content": text} for role, text in said]
    sample = by_template(talk, chatml, only_response=True)
    assert [sample.text[begin:end] for begin, end in sample.response] == ["bb</s>", "dd</s>"]
    whole = by_template(talk, chatml, only_response=False)
    assert whole.response == [(0, len(whole.text))]


def test_a_template_that_rewrites_what_was_said_is_refused_and_not_guessed_at() -> None:
    def forgets(messages: list[dict[str, Any]], *, asks: bool) -> str:
        return chatml(messages[-1:], asks=asks)

    talk = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        by_template(talk, forgets, only_response=True)


def test_long_samples_are_dropped_or_cut_and_counted(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    long, longer = " ".join(["w1"] * 6), " ".join(["w2"] * 20)
    split = write(ask=["w1", "w1", longer, "w5", None, ""], say=[long, longer, "w3", "", "w1", "w4"])
    dropping = prepared(tmp_path, split, words, **PAIR)
    assert (dropping.facts.num_documents, dropping.facts.dropped_documents, dropping.facts.cut_documents) == (2, 4, 0)
    cutting = prepared(tmp_path, split, words, too_long="cut", **PAIR)
    # The prompt that fills the sequence alone leaves nothing to learn.
    assert (cutting.facts.num_documents, cutting.facts.dropped_documents, cutting.facts.cut_documents) == (3, 3, 2)
    assert max(cutting.lengths(range(len(cutting)))) == 16


def test_samples_share_sequences_and_keep_their_numbers(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    split = write(ask=[f"w{n}" for n in range(10)], say=[f"w{n} w{n}" for n in range(10)])
    store = prepared(tmp_path, split, words, documents="separate", **PAIR)
    assert len(store) == 3  # of 4 tokens each, 4 to a sequence
    assert store.facts.num_tokens == 40
    rows = store.rows([0, 2])
    assert rows.ids.shape == (2, 16) and rows.layout == "separate"
    assert rows.documents.tolist() == [[1] * 4 + [2] * 4 + [3] * 4 + [4] * 4, [1] * 4 + [2] * 4 + [0] * 8]
    assert rows.learned[1].tolist() == [False, True, True, True] * 2 + [False] * 8


def test_a_tokenizer_that_begins_texts_by_itself_begins_samples(
    write: Callable[..., SplitInput], tmp_path: Path
) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    folder = tmp_path / "beginning"
    folder.mkdir()
    model = make_tokenizer(folder, 500, {**SPECIAL, "bos_token": "[CLS]"})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", BOS)]
    )
    tokenizer.save_pretrained(folder)
    store = prepared(tmp_path, write(ask=["w1"], say=["w3"]), replace(model, digests={"tokenizer.json": "x"}), **PAIR)
    assert [token for token, _ in shown(store, 0)] == [BOS, word(1), word(3), EOS]
    assert not shown(store, 0)[0][1]


def test_nothing_to_train_on_is_told_with_numbers(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    split = write(ask=["w1", "w1 " * 30], say=["", "w2"])
    with pytest.raises(UsageError, match="1 sample longer than 16 tokens, 1 empty or without a response") as caught:
        prepared(tmp_path, split, words, **PAIR)
    assert "too_long: cut" in caught.value.remedy
    assert not list((tmp_path / "stores").iterdir())


def test_a_row_the_chat_template_refuses_is_named(write: Callable[..., SplitInput], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "strict"
    folder.mkdir()
    model = make_tokenizer(folder, 500, SPECIAL)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ m['content'] }} [SEP] {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    good = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    split = write(talk=[good, [{"role": "system", "content": "w3"}, *good]])
    with pytest.raises(UsageError, match=r"split `train`, row 1: .* no system here"):
        prepared(tmp_path, split, model, messages="talk")


@pytest.mark.parametrize("documents", ["separate", "alone"])
def test_documents_of_plain_text_stay_whole_too(
    write: Callable[..., SplitInput], tmp_path: Path, documents: str
) -> None:
    """masked-lm: each has a frame of its own; a text longer than a sequence goes on in the next."""
    names = ("PAD", "UNK", "CLS", "SEP", "MASK")
    folder = tmp_path / "bert"
    folder.mkdir()
    model = make_tokenizer(folder, 500, {f"{name.lower()}_token": f"[{name}]" for name in names})
    split = write(text=["w1 w2", " ".join(f"w{n}" for n in range(20)), "w3"])
    recipe = Recipe("masked-lm", 16, split, DatasetConfig(asset="a"), None, model, documents)
    store: Any = prepare(recipe, tmp_path / "stores", lambda line: None)
    found = []
    for index in range(len(store)):
        row = store.row(index)
        for number in range(1, int(row.documents.max()) + 1):
            found.append([int(token) for token in row.ids[row.documents == number]])
    expected = [[1, 2], list(range(14)), list(range(14, 20)), [3]]
    assert sorted(found) == sorted([[BOS, *map(word, text), EOS] for text in expected])
    assert len(store) == (2 if documents == "separate" else 4)
