"""Instruction data: what is learned is the response and nothing else, however a row is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from runner.config.data import DatasetConfig
from runner.data.prepare import prepare
from runner.data.recipe import Recipe
from runner.data.store import Rows, Stores
from runner.from_stage import UsageError
from runner.inputs import ModelInput, SplitInput
from runner.tasks.instruction import by_parts, by_template, parts_of
from tests.runner.data.test_prepare import digest, make_tokenizer, saved, word

EOS, BOS = 3, 2
SPECIAL = {"eos_token": "[SEP]", "unk_token": "[UNK]"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelInput:
    return make_tokenizer(tmp_path_factory.mktemp("words"), 500, SPECIAL)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., SplitInput]:
    def write(**values: Any) -> SplitInput:
        import pyarrow.parquet as pq

        table = pa.table(values)
        path = tmp_path / "train.parquet"
        pq.write_table(table, path)
        return SplitInput("train", (path,), (digest(path),), table.num_rows, {})

    return write


def prepared(
    folder: Path, split: SplitInput, model: ModelInput, length: int = 16, **settings: Any
) -> Stores:
    documents = settings.pop("documents", "alone")
    dataset = DatasetConfig(asset="a", **settings)
    recipe = Recipe("instruction", length, split, dataset, None, model, documents)
    return Stores([prepare(recipe, folder / "stores", lambda line: None)])


def shown(store: Stores, index: int) -> list[tuple[int, bool]]:
    rows = store.rows([index], Rows.of)
    return [
        (int(token), bool(learned))
        for token, learned in zip(rows.ids[0], rows.learned[0], strict=True)
    ]


PAIR: dict[str, Any] = {"prompt": "ask", "response": "say"}


def test_the_response_and_the_end_of_text_are_learned_and_the_prompt_is_not(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    store = prepared(tmp_path, write(ask=["w1 w2"], say=["w3 w4"]), words, **PAIR)
    assert shown(store, 0) == [
        (word(1), False),
        (word(2), False),
        (word(3), True),
        (word(4), True),
        (EOS, True),
    ]


def test_braces_columns_and_numbers_in_a_format() -> None:
    sample = by_parts(parts_of("{{x}} {a}: {b}!"), {"a": "x{b}", "b": 7})
    assert sample is not None
    assert sample.text == "{x} x{b}: 7!"
    assert [sample.text[begin:end] for begin, end in sample.response] == ["7!"]
    assert by_parts(parts_of("{a}"), {"a": None}) is None


def chatml(messages: list[dict[str, Any]], *, asks: bool) -> str:
    return "".join(f"<{m['role']}>{m['content']}</s>" for m in messages) + (
        "<assistant>" if asks else ""
    )


def test_every_answer_of_a_conversation_is_learned() -> None:
    said = (
        ("system", "be kind"),
        ("user", "a"),
        ("assistant", "bb"),
        ("user", "c"),
        ("assistant", "dd"),
    )
    talk = [{"role": role, "content": text} for role, text in said]
    sample = by_template(talk, chatml, only_response=True)
    assert sample is not None
    assert [sample.text[begin:end] for begin, end in sample.response] == ["bb</s>", "dd</s>"]
    whole = by_template(talk, chatml, only_response=False)
    assert whole is not None and whole.response == [(0, len(whole.text))]


def test_a_template_that_rewrites_what_was_said_is_refused_and_not_guessed_at() -> None:
    def forgets(messages: list[dict[str, Any]], *, asks: bool) -> str:
        return chatml(messages[-1:], asks=asks)

    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        by_template(talk, forgets, only_response=True)


def test_long_samples_are_dropped_or_cut_and_counted(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    long, longer = " ".join(["w1"] * 6), " ".join(["w2"] * 20)
    split = write(
        ask=["w1", "w1", longer, "w5", None, ""], say=[long, longer, "w3", "", "w1", "w4"]
    )
    dropping = prepared(tmp_path, split, words, **PAIR)
    assert dropping.facts.what.endswith("from 2 texts")
    assert dropping.facts.notes == [
        "2 rows left out: empty or without an answer",
        "2 too long",
        "0 cut",
        "1 kept with an empty prompt",
    ]
    cutting = prepared(tmp_path, split, words, too_long="cut", **PAIR)
    # The prompt that fills the sequence alone leaves nothing to learn.
    assert cutting.facts.what.endswith("from 3 texts")
    assert cutting.facts.notes == [
        "3 rows left out: empty or without an answer",
        "0 too long",
        "1 cut",
        "1 kept with an empty prompt",
    ]
    assert max(cutting.lengths(range(len(cutting)))) == 16


EMPTY = ["", " \n", None, "\u200b", "[SEP]", " [SEP] [SEP]"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} [SEP] {% endfor %}"
WITH_PROMPT = TEMPLATE + "{% if add_generation_prompt %}assistant {% endif %}"


def chatting(folder: Path, template: str = WITH_PROMPT) -> ModelInput:
    """A tokenizer whose template ends each message with a token."""
    folder.mkdir()
    make_tokenizer(folder, 500, SPECIAL)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return saved(tokenizer, folder)


def _pair(ask: str | None, say: str | None) -> list[dict[str, str | None]]:
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]


WAYS: dict[str, tuple[dict[str, Any], Callable[[list[Any]], dict[str, Any]]]] = {
    "pairs": (PAIR, lambda says: {"ask": ["w1"] * len(says), "say": says}),
    "a format": (
        {"format": "{ask}: {say} [SEP]"},
        lambda says: {"ask": ["w1"] * len(says), "say": says},
    ),
    "messages": ({"messages": "talk"}, lambda says: {"talk": [_pair("w1", say) for say in says]}),
}


@pytest.mark.parametrize("loss_on", ["response", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_an_empty_answer_is_left_out_however_its_end_is_written(
    write: Callable[..., SplitInput], tmp_path: Path, way: str, loss_on: str
) -> None:
    """A template adds an end token: 20 empty rows once gave 10 sequences that teach silence."""
    settings, values = WAYS[way]
    model = chatting(tmp_path / "model")
    store = prepared(tmp_path, write(**values([*EMPTY, "w4"])), model, loss_on=loss_on, **settings)
    assert len(store) == 1
    assert store.facts.notes[0] == f"{len(EMPTY)} rows left out: empty or without an answer"
    with pytest.raises(UsageError, match=f"{len(EMPTY)} empty or without a response"):
        prepared(tmp_path / "none", write(**values(EMPTY)), model, loss_on=loss_on, **settings)


def test_of_a_conversation_only_the_answers_that_say_something_are_learned() -> None:
    talk = [*_pair("a", " "), *_pair("b", "cc")]
    sample = by_template(talk, chatml, only_response=True)
    assert sample is not None and [sample.text[begin:end] for begin, end in sample.response] == [
        "cc</s>"
    ]
    assert by_template(talk[:2], chatml, only_response=True) is None
    call: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]
    assert by_template(call, chatml, only_response=True) is not None
    parts: list[dict[str, Any]] = [{"type": "text", "text": " "}]
    assert (
        by_template([{"role": "assistant", "content": parts}], chatml, only_response=True) is None
    )
    parts.append({"type": "image"})
    assert (
        by_template([{"role": "assistant", "content": parts}], chatml, only_response=True)
        is not None
    )


def test_samples_share_sequences_and_keep_their_numbers(
    write: Callable[..., SplitInput], words: ModelInput, tmp_path: Path
) -> None:
    split = write(ask=[f"w{n}" for n in range(10)], say=[f"w{n} w{n}" for n in range(10)])
    store = prepared(tmp_path, split, words, documents="separate", **PAIR)
    assert len(store) == 3  # of 4 tokens each, 4 to a sequence
    assert sum(store.lengths(range(3))) == 40
    rows = store.rows([0, 2], Rows.of)
    assert rows.ids.shape == (2, 16) and rows.layout == "separate"
    assert rows.documents.tolist() == [
        [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4,
        [1] * 4 + [2] * 4 + [0] * 8,
    ]
    assert rows.learned[1].tolist() == [False, True, True, True] * 2 + [False] * 8


def test_a_tokenizer_that_adds_a_begin_token_begins_samples(
    write: Callable[..., SplitInput], tmp_path: Path
) -> None:
    folder = tmp_path / "beginning"
    folder.mkdir()
    make_tokenizer(folder, 500, {**SPECIAL, "bos_token": "[CLS]"})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", BOS)]
    )
    model = saved(tokenizer, folder)
    store = prepared(
        tmp_path,
        write(ask=["w1"], say=["w3"]),
        model,
        **PAIR,
    )
    assert [token for token, _ in shown(store, 0)] == [BOS, word(1), word(3), EOS]
    assert not shown(store, 0)[0][1]
