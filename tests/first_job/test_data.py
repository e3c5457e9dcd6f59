"""Datasets that cannot be read, or that a task cannot use: D of the list."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.first_job.harness import (
    Found,
    Said,
    assert_found,
    assert_silent,
    check,
    fetch,
)
from tests.support.servers.hubs import TestHub

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"


def parquet(table: pa.Table, features: dict[str, Any] | None = None) -> bytes:
    """A parquet file, with the metadata that `datasets` writes."""
    if features is not None:
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


# ---- files beside the manifest: entry -> files, what `fetch` must say

FILES: dict[str, tuple[dict[str, bytes], str, Found]] = {
    "D2": (
        {"a.csv": b"text,label\nx,1\n", "b.csv": b"text,grade\nx,1\n"},
        "csv",
        Found(("b.csv: it has the columns text, grade", "before it"), "in the file"),
    ),
    "D5": (
        {"a.csv": "text,label\nok,1\n中文文本,2\n".encode("gbk")},
        "csv",
        Found(("line 3", "UTF-8"), "iconv -f GB"),
    ),
    "D7": ({"a.csv": POINTER.encode()}, "csv", Found(("is a Git LFS pointer",), "lfs pull")),
}
OTHERS: dict[str, tuple[dict[str, bytes], str, Found]] = {
    "Excel": (
        {"a.csv": b"PK\x03\x04" + bytes(90)},
        "csv",
        Found(("it is a zip, such as Excel's .xlsx",), "Save As, CSV UTF-8"),
    ),
    "a login page": (
        {"a.jsonl": b"<!DOCTYPE html><html><body>Please log in</body></html>"},
        "jsonl",
        Found(("it is a page of the web",), "a proxy answered"),
    ),
    "lines of JSON": (
        {"train.jsonl": b'{"text": "x"}\n', "test.jsonl": b'{"text": "y"}\n'},
        "json",
        Found(("no file ends in .json",), "Write `convert: jsonl`"),
    ),
}
SOUND = {
    "D3": ({"a.jsonl": b'{"text": "x", "label": 1}\n{"text": "y"}\n'}, "json"),
    "D4": ({"a.csv.gz": gzip.compress(b"text,label\nx,1\n")}, "csv"),
}


def fetched(folder: Path, files: dict[str, bytes], convert: str) -> Said:
    (folder / "data").mkdir()
    for name, content in files.items():
        (folder / "data" / name).write_bytes(content)
    return fetch(folder, {"texts": {"path": "./data", "convert": convert}})


@pytest.mark.parametrize("entry", [*FILES, *OTHERS])
def test_a_file_that_cannot_be_read_does_not_leave_the_laptop(tmp_path: Path, entry: str) -> None:
    files, convert, found = (FILES | OTHERS)[entry]
    assert_found(fetched(tmp_path, files, convert), found)


@pytest.mark.parametrize("entry", SOUND)
def test_a_file_that_others_cannot_read_is_converted(tmp_path: Path, entry: str) -> None:
    said = fetched(tmp_path, *SOUND[entry])
    assert said.code == 0 and "warning" not in said.err, said
    (shard,) = (tmp_path / "bundle/data/datasets/texts").rglob("*.parquet")
    assert pq.read_table(shard).column_names == ["text", "label"]


# ---- a Hub

NUMBERED = {"image": {"_type": "Image"}, "label": {"names": [f"c{n}" for n in range(10)]}}
LISTS = {"text": {"_type": "Value", "dtype": "string"}, "tags": {"_type": "List", "feature": {}}}
PICTURE = {"bytes": b"not decoded by check", "path": "a.png"}


def pictures(labels: list[int]) -> bytes:
    image = pa.array(
        [PICTURE] * len(labels), pa.struct([("bytes", pa.binary()), ("path", "string")])
    )
    return parquet(pa.table({"image": image, "label": labels}), NUMBERED)


def lines() -> bytes:
    texts = [f"the sentence with the number {n} is a long one" for n in range(200)]
    return parquet(pa.table({"text": texts, "tags": [["a"]] * 200}), LISTS)


def graded(labels: list[int], *, named: bool = True) -> bytes:
    """Texts with classes, in columns of GLUE."""
    table = pa.table({"sentence": ["a sentence is here"] * len(labels), "label": labels})
    return parquet(table, {"label": {"names": ["bad", "good"]}} if named else None)


def tagged(number: int) -> bytes:
    """Sentences of two words; the last one has `number` tags."""
    tags = [["O", "B-X"]] * 39 + [["O"] * number]
    return parquet(pa.table({"tokens": [["he", "went"]] * 40, "ner_tags": tags}))


SHARD = "data/train-00000-of-00001.parquet"
REPOSITORIES = {
    "ones": {SHARD: pictures(list(range(1, 11)) * 4)},
    "unlabelled": {SHARD: pictures([*range(10), -1] * 4)},
    "labelled": {SHARD: pictures(list(range(10)) * 4)},
    "lists": {SHARD: lines()},
    "graded": {SHARD: graded([0, 1] * 20)},
    "ungraded": {SHARD: graded([-1] * 40)},
    "alike": {SHARD: graded([1] * 40, named=False)},
    "tagged": {SHARD: tagged(2)},
    "mistagged": {SHARD: tagged(3)},
}
ONE_CLASS: dict[str, Any] = {
    "task": "image-classification",
    "model": {"asset": "vit"},
    "sequence_length": None,
    "batch": {"global": 4, "micro": 2},
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    """A Hub on loopback with the datasets above."""
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        for name, files in REPOSITORIES.items():
            hub.commit("datasets", f"acme/{name}", files)
        yield hub


@pytest.fixture(scope="module")
def staged(
    hub: TestHub, tmp_path_factory: pytest.TempPathFactory, bundle: Path, twins_bundle: Path
) -> Path:
    """A bundle with these datasets, a model of images and a model of texts."""
    folder = tmp_path_factory.mktemp("staged")
    models = {
        "bert": bundle / "data/models/tiny-bert",
        "vit": twins_bundle / "data/models/tiny-vit",
    }
    for name, source in models.items():
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("README.md"))
    assets: dict[str, Any] = {name: {"dataset": f"acme/{name}"} for name in REPOSITORIES}
    assets |= {name: {"path": f"./{name}"} for name in models}
    said = fetch(folder, assets, "--no-offline-check", "--endpoint", hub.endpoint)
    assert said.code == 0, said.err
    return folder / "bundle"


LABELS = {
    "D10": ("ones", Found(("the labels in `label` are 1 to 10", "0 to 9"), "Subtract 1")),
    "D11": ("unlabelled", Found(("are -1 to 9", "0 to 9"), "with null for such a label")),
}


@pytest.mark.parametrize("entry", LABELS)
def test_labels_that_are_no_classes_are_found_before_the_images_are_read(
    staged: Path, tmp_path: Path, entry: str
) -> None:
    name, found = LABELS[entry]
    assert_found(check(tmp_path, staged, **ONE_CLASS, dataset={"asset": name}), found)


def test_labels_that_are_classes_are_silent(staged: Path, tmp_path: Path) -> None:
    assert_silent(check(tmp_path, staged, **ONE_CLASS, dataset={"asset": "labelled"}))
    few = {"asset": "unlabelled", "limit": {"train": 5}}  # the wrong label is not read
    assert_silent(check(tmp_path, staged, **ONE_CLASS, dataset=few))


TEXTS: dict[str, Any] = {"model": {"asset": "bert"}, "batch": {"global": 4, "micro": 2}}
GRADED = {"task": "text-classification", **TEXTS}
TAGGED = {"task": "token-classification", **TEXTS}
SENTENCE = {"text": "sentence"}
UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], Found]] = {
    "no text": (GRADED, {"asset": "graded"}, Found(("no such column",), "Set text: sentence")),
    "no label": (
        GRADED,
        {"asset": "graded", "label": "grade", **SENTENCE},
        Found(("has no such column",), "label (int64)"),
    ),
    "a test split": (
        GRADED,
        {"asset": "ungraded", **SENTENCE},
        Found(("are -1 to -1",), "choose another one"),
    ),
    "one class": (
        GRADED,
        {"asset": "alike", **SENTENCE},
        Found(("all labels in `label` are 1",), "choose another split"),
    ),
    "more tags than words": (
        TAGGED,
        {"asset": "mistagged"},
        Found(("row 39: 2 words and 3 tags",), "Each word needs one tag"),
    ),
    "no lists": (
        TAGGED,
        {"asset": "graded", "words": "sentence", "tags": "label"},
        Found(("not lists of texts",), "Columns of lists of texts: none"),
    ),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_texts_and_words_without_their_classes_are_found_before_a_rank(
    staged: Path, tmp_path: Path, fault: str
) -> None:
    run, dataset, found = UNFIT[fault]
    assert_found(check(tmp_path, staged, **run, dataset=dataset), found)


def test_texts_and_words_with_their_classes_are_silent(staged: Path, tmp_path: Path) -> None:
    assert_silent(check(tmp_path, staged, **GRADED, dataset={"asset": "graded", **SENTENCE}))
    assert_silent(check(tmp_path, staged, **TAGGED, dataset={"asset": "tagged"}))


FEW = {"D8": Found(("do not fill one sequence of 128 tokens",), "sequence_length")}


def test_texts_that_fill_no_sequence_are_found(staged: Path, tmp_path: Path) -> None:
    run = {"model": {"asset": "bert"}, "dataset": {"asset": "lists", "limit": {"train": 5}}}
    assert_found(check(tmp_path, staged, **run, sequence_length=128), FEW["D8"])


def test_features_of_a_newer_datasets_are_no_fault(staged: Path, tmp_path: Path) -> None:
    run = {"model": {"asset": "bert"}, "dataset": {"asset": "lists"}}
    assert_silent(check(tmp_path, staged, **run))


ON_A_HUB = {
    "D1": ({"d1.py": b"import datasets\n"}, Found(("its own code (d1.py)",), "for parquet", 3)),
    "D6": ({SHARD: lines()[:-100]}, Found((SHARD.rpartition("/")[2], "parquet"), "", 1)),
}


@pytest.mark.parametrize("entry", ON_A_HUB)
def test_a_faulty_repository_does_not_leave_the_laptop(
    hub: TestHub, tmp_path: Path, entry: str
) -> None:
    files, found = ON_A_HUB[entry]
    hub.commit("datasets", f"acme/{entry.lower()}", files)
    assets = {"m": {"dataset": f"acme/{entry.lower()}"}}
    assert_found(fetch(tmp_path, assets, "--endpoint", hub.endpoint), found)


def test_plain_files_that_a_run_reads_are_named_with_the_line_of_the_manifest(
    tmp_path: Path, bundle: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.parquet").write_bytes(parquet(pa.table({"text": ["a"]})))
    model = str(bundle / "data/models/tiny-gpt2")
    said = fetch(tmp_path, {"gpt2": {"path": model}, "texts": {"path": "./data"}})
    assert said.code == 0, said.err
    found = check(tmp_path, tmp_path / "bundle", task="causal-lm", model={"asset": "gpt2"})
    assert_found(found, Found(("is plain files, not a dataset",), "add `convert: parquet`"))
