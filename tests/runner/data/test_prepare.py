"""Texts are tokenised once: every token, in full sequences, in a store that is complete."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runner.config.data import DatasetConfig
from runner.data.prepare import is_prepared, open_prepared, prepare, store_path
from runner.data.recipe import Recipe
from runner.data.store import BATCH_ROWS, Rows, Stores
from runner.from_stage import DamageError, UsageError
from runner.inputs import ModelInput, SplitInput
from tests.remedies.obeyed import obeys

TEXT = DatasetConfig(asset="words")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CLS, SEP = 2, 3


def word(number: int) -> int:
    """The id of `w<number>`."""
    return number + len(SPECIAL)


def make_tokenizer(folder: Path, num_words: int, special: dict[str, str]) -> ModelInput:
    """A tokenizer for the words `w0`, `w1`, ..., with truncation and padding as published."""
    vocabulary = {
        token: n for n, token in enumerate([*SPECIAL, *(f"w{n}" for n in range(num_words))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    fast: Any = PreTrainedTokenizerFast
    return saved(fast(tokenizer_object=tokenizer, **special), folder)


def saved(tokenizer: Any, folder: Path) -> ModelInput:
    """A model of nothing but this tokenizer."""
    tokenizer.save_pretrained(folder)
    digests = {path.name: digest(path) for path in folder.iterdir()}
    return ModelInput(
        asset="words", path=folder, source="acme/words", commit=None, digests=digests, settings={}
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


BERT_LIKE = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelInput:
    return make_tokenizer(tmp_path_factory.mktemp("words"), 500, BERT_LIKE)


def write_split(folder: Path, *shards: Sequence[str | None], name: str = "train") -> SplitInput:
    import pyarrow.parquet as pq

    files = []
    for number, texts in enumerate(shards):
        path = folder / f"{name}-{number:05d}.parquet"
        pq.write_table(
            pa.table({"text": pa.array(texts, pa.string()), "n": list(range(len(texts)))}), path
        )
        files.append(path)
    rows = sum(len(texts) for texts in shards)
    columns = {"text": "string", "n": "int64"}
    return SplitInput(name, tuple(files), tuple(digest(path) for path in files), rows, columns)


def text(first: int, length: int) -> str:
    return " ".join(f"w{n}" for n in range(first, first + length))


@pytest.fixture
def recipe(tmp_path: Path, words: ModelInput) -> Recipe:
    """Ten texts of ten words each, all 100 words different."""
    split = write_split(tmp_path, [text(10 * n, 10) for n in range(10)])
    return Recipe("masked-lm", 16, split, TEXT, None, words)


def prepared(recipe: Recipe, folder: Path) -> Stores:
    return Stores([prepare(recipe, folder / "stores", lambda line: None)])


def file_of(stores: Stores) -> Path:
    return stores.parts[0].path


def body(store: Stores) -> list[int]:
    """The stream of ids that was cut: without what frames each sequence."""
    rows = store.rows(list(range(len(store))), Rows.of).ids
    return [int(n) for n in (rows[:, 1:-1] if rows[0, 0] == CLS else rows).flatten()]


def test_every_token_is_there_once_in_order_and_none_is_padding(
    recipe: Recipe, tmp_path: Path
) -> None:
    store = prepared(recipe, tmp_path)
    rows = store.rows(list(range(len(store))), Rows.of).ids
    # 10 texts of 10 words and a separator each: 110 ids; sequences hold 14 between their ends.
    assert rows.shape == (7, 16)
    assert (rows[:, 0] == CLS).all() and (rows[:, -1] == SEP).all()
    stream = [i for n in range(10) for i in (*(word(10 * n + k) for k in range(10)), SEP)]
    assert body(store) == stream[: 7 * 14]
    assert store.facts.what == "7 sequences of 16 tokens from 10 texts"
    assert store.facts.notes == ["the last 12 tokens would fill no sequence"]
    assert len(stream) - 7 * 14 == 12


def test_causal_sequences_have_only_the_end_of_text_between_texts(
    recipe: Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt"
    folder.mkdir()
    model = make_tokenizer(folder, 500, {"eos_token": "[SEP]", "unk_token": "[UNK]"})
    store = prepared(replace(recipe, task="causal-lm", model=model), tmp_path)
    stream = [i for n in range(10) for i in (*(word(10 * n + k) for k in range(10)), SEP)]
    assert body(store) == stream[: 6 * 16]
    (tmp_path / "bare").mkdir()
    model = make_tokenizer(tmp_path / "bare", 500, {"unk_token": "[UNK]"})
    with pytest.raises(UsageError, match="neither an end-of-text nor a separator token"):
        prepared(replace(recipe, task="causal-lm", model=model), tmp_path)


def test_empty_and_missing_texts_are_skipped(
    recipe: Recipe, tmp_path: Path, words: ModelInput
) -> None:
    texts: list[str | None] = [text(10 * n, 10) for n in range(10)]
    holes = [*texts[:5], "", None, " \n\t", *texts[5:], None]
    split = write_split(tmp_path, holes, name="holes")
    store = prepared(replace(recipe, split=split), tmp_path)
    assert body(store) == body(prepared(recipe, tmp_path))
    assert store.facts.what.endswith("from 10 texts")


@pytest.mark.parametrize(
    ("num_words", "dtype"), [(500, "uint16"), (2**16 - 5, "uint16"), (2**16 - 4, "uint32")]
)
def test_ids_take_two_bytes_where_the_vocabulary_allows(
    tmp_path: Path, num_words: int, dtype: str
) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    model = make_tokenizer(folder, num_words, BERT_LIKE)
    last = num_words - 10
    split = write_split(tmp_path, [text(last, 10), text(last, 10)])
    store = prepared(Recipe("masked-lm", 16, split, TEXT, None, model), tmp_path)
    assert store.row(0)["ids"].dtype == dtype
    assert body(store)[:10] == [word(n) for n in range(last, num_words)]


def test_rows_beyond_one_record_batch_are_found(tmp_path: Path, words: ModelInput) -> None:
    """The last and the first of two batches, in any order, alone and beside another store."""
    number = BATCH_ROWS + 30
    split = write_split(tmp_path, [text(n % 480, 2 + n % 3) for n in range(number)])
    store = prepared(Recipe("causal-lm", 16, split, TEXT, None, words, "alone"), tmp_path)
    assert store.facts.begins == [0, BATCH_ROWS, number]
    for index in (number - 1, 0, BATCH_ROWS, BATCH_ROWS - 1):
        ids = [word(n) for n in range(index % 480, index % 480 + 2 + index % 3)]
        for several, first in ((store, 0), (Stores([*store.parts, *store.parts]), number)):
            assert several.rows([first + index], Rows.of).ids.tolist() == [[*ids, SEP]]
            assert several.lengths([first + index]) == [len(ids) + 1]


CHANGES: dict[str, Callable[[Recipe], Recipe]] = {
    "task": lambda r: replace(r, task="causal-lm"),
    "sequence length": lambda r: replace(r, sequence_length=32),
    "column": lambda r: replace(r, dataset=replace(r.dataset, text="other")),
    "documents": lambda r: replace(r, documents="separate"),
    "limit": lambda r: replace(r, limit=5),
    "data": lambda r: replace(r, split=replace(r.split, digests=("0" * 64,))),
    "order of the data": lambda r: replace(
        r, split=replace(r.split, digests=r.split.digests[::-1])
    ),
    "tokenizer": lambda r: replace(
        r, model=replace(r.model, digests={**r.model.digests, "tokenizer.json": "0" * 64})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_the_content_decides_the_key(
    tmp_path: Path, words: ModelInput, change: str
) -> None:
    split = write_split(tmp_path, [text(0, 10)], [text(10, 10)])
    recipe = Recipe("masked-lm", 16, split, TEXT, None, words)
    assert CHANGES[change](recipe).key != recipe.key


# A process that prepares the pickled recipe of its first argument. It is killed at the named event.
KILLED = """
import os, pickle, signal, sys
from pathlib import Path
recipe, stores, event, ending = pickle.loads(Path(sys.argv[1]).read_bytes())
from runner.data.prepare import prepare
def hook(name, arguments):
    if name == event and str(arguments[0]).endswith(ending):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
prepare(recipe, stores, print)
"""


@pytest.mark.parametrize(("event", "ending"), [("os.chmod", ".tmp"), ("os.rename", ".tmp")])
def test_killed_in_the_middle_nothing_that_counts_is_left(
    recipe: Recipe, tmp_path: Path, event: str, ending: str
) -> None:
    stores = tmp_path / "stores"
    (tmp_path / "arguments").write_bytes(pickle.dumps((recipe, stores, event, ending)))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "arguments")], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(stores.iterdir()), "it was killed before it wrote anything"
    assert not is_prepared(recipe, stores)
    with pytest.raises(UsageError, match="is not prepared"):
        open_prepared(store_path(recipe, stores), "train", "runner prepare")
    assert len(prepared(recipe, tmp_path)) == 7


@obeys("runner/data/store.py", "rm -f {} # then prepare again")
@pytest.mark.parametrize("damage", ["shorter", "longer", "empty", "of another program"])
def test_a_damaged_store_is_reported_with_the_way_out(
    recipe: Recipe, tmp_path: Path, damage: str
) -> None:
    path = file_of(prepared(recipe, tmp_path))
    data = path.read_bytes()
    path.unlink()
    changed = {"shorter": data[:-2], "longer": data + b"\0\0", "empty": b""}
    path.write_bytes(changed.get(damage, b""))
    if damage == "of another program":
        batch = pa.record_batch({"a": pa.array([1])})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
    with pytest.raises(DamageError) as caught:
        prepared(recipe, tmp_path)
    assert caught.value.message.startswith(f"{path}: this store cannot be read: ")
    assert caught.value.remedy == f"rm -f {path}  # then prepare again"
    subprocess.run(caught.value.remedy, shell=True, check=True)
    assert file_of(prepared(recipe, tmp_path)).read_bytes() == data


def test_what_a_killed_preparation_left_goes_and_what_another_is_writing_stays(
    recipe: Recipe, tmp_path: Path
) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = platform.node()
    names = {
        "dead": f"a.{here}-{ended.pid}",
        "alive": f"b.{here}-{os.getpid()}",
        "far": "c.elsewhere-1",
        "old": "d.elsewhere-2",
    }
    for name in names.values():
        (stores / f"{name}.tmp").write_bytes(b"part")
    yesterday = time.time() - 2 * 24 * 3600
    os.utime(stores / f"{names['old']}.tmp", (yesterday, yesterday))
    prepared(recipe, tmp_path)
    assert {path.name for path in stores.glob("*.tmp")} == {
        f"{names[kept]}.tmp" for kept in ("alive", "far")
    }


@pytest.mark.parametrize("what", ["data", "tokenizer"])
def test_other_bytes_at_a_files_path_never_get_its_name_in_the_stores(
    tmp_path: Path, words: ModelInput, what: str
) -> None:
    """Folders that changed places: a store of the wrong one would be there when all is right again,
    and a verified bundle would be trained with it."""
    folders = [tmp_path / "one", tmp_path / "other"]
    recipes = []
    for first, folder in enumerate(folders):
        folder.mkdir()
        special = {**BERT_LIKE, "pad_token": f"[{('PAD', 'UNK')[first]}]"}
        model = make_tokenizer(folder, 500, special) if what == "tokenizer" else words
        begin = 200 * first if what == "data" else 0  # else the data would be noticed
        split = write_split(folder, [text(n + begin, 10) for n in range(10, 30)])
        recipes.append(Recipe("masked-lm", 16, split, TEXT, None, model))
    right = prepared(recipes[0], tmp_path / "right")
    _swap(*folders)
    with pytest.raises(DamageError, match="not those that were fetched"):
        prepared(recipes[0], tmp_path)
    _swap(*folders)
    assert body(prepared(recipes[0], tmp_path)) == body(right)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
