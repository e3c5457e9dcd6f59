"""Rows become tokens with classes as transformers' own examples do it; what is lost is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.config.data import DatasetConfig
from runner.data.prepare import check_together, prepare
from runner.data.recipe import Recipe
from runner.data.store import IGNORED, LabelledRows, Stores
from runner.data.tokenizing import load_tokenizer
from runner.from_stage import UsageError
from runner.inputs import ModelInput, SplitInput
from runner.job.run_data import check_split
from runner.tasks.token_classification import needs_space
from tests.runner.data.test_prepare import digest


@pytest.fixture(scope="module")
def model(bundle: Path) -> ModelInput:
    return ModelInput("bert", bundle / "data/models/tiny-bert", "", None, {}, {})


def stored(
    folder: Path, model: ModelInput, task: str, table: dict[str, Any], length: int = 64, **keys: Any
) -> Stores:
    recipe = recipe_of(folder, model, task, table, length, **keys)
    return Stores([prepare(recipe, folder / "stores", print)])


def recipe_of(
    folder: Path, model: ModelInput, task: str, table: dict[str, Any], length: int = 64, **keys: Any
) -> Recipe:
    pq.write_table(pa.table(table), folder / "a.parquet")
    rows = len(next(iter(table.values())))
    path = folder / "a.parquet"
    split = SplitInput("train", (path,), (digest(path),), rows, {})
    data = DatasetConfig(asset="a", **keys)
    return Recipe(task, length, split, data, None, model, "alone")


def test_a_split_with_nothing_to_learn_is_refused(tmp_path: Path, model: ModelInput) -> None:
    table = {"text": ["", " "], "label": ["a", "b"]}
    with pytest.raises(UsageError, match="nothing to train on: 2 rows without a text or a label"):
        stored(tmp_path, model, "text-classification", table)


def test_a_pair_is_encoded_as_the_tokenizer_does_it(tmp_path: Path, model: ModelInput) -> None:
    table = {"a": ["she was very happy", "", "no"], "b": ["he is", "", "yes"], "y": [1, 0, 0]}
    store = stored(tmp_path, model, "text-classification", table, text="a", pair="b", label="y")
    assert len(store) == 2 and store.facts.notes[0].startswith("1 row left out")
    rows, tokenizer = store.rows([0, 1], LabelledRows.of), load_tokenizer(model)
    expected = tokenizer("she was very happy", "he is")
    assert rows.ids[0].tolist() == expected["input_ids"]
    assert (rows.documents[0] - 1).tolist() == expected["token_type_ids"]
    assert rows.labels.tolist() == [1, 0]
    assert rows.documents[1].tolist()[-1] == 0, "padding"


def test_a_words_class_is_at_its_first_token(tmp_path: Path, model: ModelInput) -> None:
    words, tags = ["Mr.", "Xqzvw", "was", "happy"], ["B-PER", "I-PER", "O", "O"]
    store = stored(
        tmp_path, model, "token-classification",
        {"tokens": [words, None], "ner_tags": [tags, None]},
    )  # fmt: skip
    encoded = load_tokenizer(model)([words], is_split_into_words=True)
    labels = store.rows([0], LabelledRows.of_words).labels[0]
    names, seen = store.facts.class_names, set()
    for place, label in zip(encoded.word_ids(0), labels, strict=True):
        first = place is not None and place not in seen
        assert label == (names.index(tags[place]) if first else IGNORED)
        seen.add(place)
    assert store.facts.what.startswith("1 sentence, 4 words in 3 classes")
    assert store.facts.notes == ["1 row left out: no text or no label"]


def test_byte_level_words_keep_the_space_before_them(bundle: Path, tmp_path: Path) -> None:
    """Else `went` would be `w` and `ent`: never seen in a text."""
    gpt2 = ModelInput("g", bundle / "data/models/tiny-gpt2", "", None, {}, {})
    tokenizer = load_tokenizer(gpt2)
    assert needs_space(tokenizer)
    words = ["He", "went", "home"]
    store = stored(
        tmp_path, gpt2, "token-classification", {"tokens": [words], "ner_tags": [[0, 1, 0]]}
    )
    assert (
        store.rows([0], LabelledRows.of_words).ids[0].tolist()
        == tokenizer("He went home")["input_ids"]
    )
    assert not needs_space(load_tokenizer(ModelInput("b", bundle / "data/models/tiny-bert",
                                                     "", None, {}, {})))  # fmt: skip


def test_stores_of_one_run_have_the_same_numbers(tmp_path: Path, model: ModelInput) -> None:
    stores = []
    for name, labels in (("one", ["b", "c"]), ("two", ["a", "b"])):
        (tmp_path / name).mkdir()
        table = {"text": ["he was", "she was"], "label": labels}
        stores.append(stored(tmp_path / name, model, "text-classification", table))
    for _ in range(2):
        check_together({"train": [part for store in stores for part in store.parts]})
    assert stores[0].facts.class_names == stores[1].facts.class_names == ["b", "c", "a"]
    assert [store.rows([0, 1], LabelledRows.of).labels.tolist() for store in stores] == [
        [0, 1],
        [2, 0],
    ]


def test_a_long_text_is_cut_with_its_end_token_and_counted(
    tmp_path: Path, model: ModelInput, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer's own setting, 16 tokens, is not used."""
    table = {"text": ["she was happy " * 20, "he was happy " * 6], "label": ["a", "b"]}
    store = stored(tmp_path, model, "text-classification", table, length=24)
    assert store.lengths([0, 1]) == [24, 20]
    assert store.rows([0], LabelledRows.of).ids[0, -1] == load_tokenizer(model).sep_token_id
    assert "2 texts in 2 classes" in (said := capsys.readouterr().out)
    assert "1 cut to 24 tokens" in said


@pytest.mark.parametrize(
    ("number", "classes", "is_doubted"), [(10, 6, True), (10, 5, False), (9, 9, False)]
)
def test_a_column_in_which_nearly_each_text_has_its_own_class_is_doubted(
    tmp_path: Path, model: ModelInput, number: int, classes: int, is_doubted: bool
) -> None:
    labels = [f"class {row % classes}" for row in range(number)]
    table = {"text": ["he was"] * number, "id": labels}
    recipe = recipe_of(tmp_path, model, "text-classification", table, label="id")
    said = list[str]()
    prepare(recipe, tmp_path / "stores", said.append)
    found = list(check_split(recipe, []))
    for text in ("".join(said), "".join(map(str, found))):
        assert ("nearly one for each: is `dataset.label: id`" in text) == is_doubted
