"""Datasets that are not parquet: split and format of each file, compared with `datasets` itself."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from stage.hub.layout import _CHANGES_ROWS, published
from tests.stage.hub.library import library, offline_library

__all__ = ["offline_library"]


def test_every_option_that_the_library_reads_is_refused_or_known() -> None:
    """A new option of a reader may change rows: then this list must be checked again."""
    import datasets

    of_all = {field.name for field in dataclasses.fields(datasets.BuilderConfig)}
    readers = {n: n.lower() for n in ("Arrow", "Csv", "ImageFolder", "Json", "Text")}
    configs = [
        getattr(import_module(f"datasets.packaged_modules.{module}.{module}"), f"{name}Config")
        for name, module in readers.items()
    ]
    read = {field.name for config in configs for field in dataclasses.fields(config)} - of_all
    harmless = {
        "chunksize",
        "block_size",
        "use_threads",
        "newlines_in_values",
        "engine",
        "memory_map",
        "verbose",
        "float_precision",
        "mangle_dupe_cols",
        "error_bad_lines",
        "warn_bad_lines",
        "decode_num_threads",
    }
    assert read - harmless - {"sep", "delimiter"} == set(_CHANGES_ROWS.split())


REPOSITORIES: list[list[str]] = [
    ["train.csv", "test.csv", "LICENSE", "notes.ipynb"],
    [
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-00000-of-00001.jsonl",
    ],
    ["train.json.gz", "dev.json.gz"],
    ["corpus.txt", "more/corpus.txt.zst"],
    [
        "train/data-00000-of-00001.arrow",
        "train/state.json",
        "train/dataset_info.json",
        "dataset_dict.json",
    ],
    ["train/cat/1.jpg", "train/dog/2.JPEG", "test/cat/3.png"],
    ["train/metadata.csv", "train/1.jpg", "metadata.jsonl", "test/2.jpg", "test/metadata.csv"],
    ["a.csv", "b.csv", "c.jsonl"],
    ["a.csv", "c.jsonl"],
    ["en/train.csv", "fr/train.csv"],
    ["x.tsv", ".hidden.csv", "__pycache__/y.csv"],
    ["wikitext_detokenized.ndjson"],
    ["en/a.txt", "b.md"],
]


@pytest.mark.parametrize("paths", REPOSITORIES, ids=[paths[0] for paths in REPOSITORIES])
def test_names_mean_what_they_mean_to_the_library(tmp_path: Path, paths: list[str]) -> None:
    modules, layout = library(tmp_path, paths)
    (found,) = published(None, [*paths, "README.md", ".gitattributes"]).values()
    assert found.problem is None and found.convert.removesuffix("l") == modules["default"]
    assert {split: set(inside) for split, inside in found.splits.items()} == {
        split: set(inside) for split, inside in layout["default"].items()
    }


CARDS: list[tuple[Any, list[str]]] = [
    ([{"config_name": "default", "data_files": "*.csv"}], ["a.csv", "b.csv", "x.jsonl"]),
    (
        [{"config_name": "c", "data_files": [{"split": "odd_one", "path": "a/*"}]}],
        ["a/1.jsonl", "a/2.jsonl", "b.csv"],
    ),
    ([{"config_name": "c", "data_dir": "sub"}], ["sub/train.txt", "sub/dev.txt", "other/a.txt"]),
    ([{"config_name": "c", "data_files": "*.csv", "encoding": "UTF-8"}], ["a.csv", "b.csv"]),
    ([{"config_name": "c", "data_files": ".x/*.csv"}], [".x/a.csv", "b.csv"]),
    ([{"config_name": "c", "data_files": "**"}], ["a.csv", "x/b.csv", ".h/c.csv", "LICENSE"]),
    (
        [{"config_name": "a", "data_files": "a.csv"}, {"config_name": "b", "data_files": "b*.csv"}],
        ["a.csv", "b1.csv"],
    ),
]


@pytest.mark.parametrize(("configs", "paths"), CARDS, ids=[str(n) for n in range(len(CARDS))])
def test_a_card_means_what_it_means_to_the_library(
    tmp_path: Path, configs: Any, paths: list[str]
) -> None:
    _, layout = library(tmp_path, paths, configs)
    found = published(configs, paths)
    assert {
        name: {s: set(p) for s, p in config.splits.items()}
        for name, config in found.items()
        if config.problem is None
    } == {name: {s: set(p) for s, p in splits.items()} for name, splits in layout.items()}


endings = st.sampled_from(
    [".csv", ".tsv", ".json", ".jsonl", ".txt", ".txt.gz", ".png", ".arrow", ".md", "", ".wav"]
)
words = ("train", "test-1", "a", "dev", "metadata", "README", "data", "x.y", "training", "val-2")
names = st.sampled_from([*words, "eval", "contest", "Test_sft", "train-00000-of-00001"])
folders = st.sampled_from(
    ["", "data/", "train/", "test/cat/", "train/dog/", "my_test/", "data/.hidden/"]
)
repositories = st.lists(
    st.tuples(folders, names, endings).map("".join), min_size=1, max_size=6, unique=True
)


@settings(max_examples=60, derandomize=True)
@given(repositories)
@example(["train.csv", "test.jsonl"])
@example(["train.csv", "train.wav", "a.wav"])
def test_any_repository_is_read_as_by_the_library_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    found = published(None, paths).get("default")
    if found is None or found.problem:
        reject()
    try:
        modules, layout = library(tmp_path_factory.mktemp("repository"), paths)
    except (
        ValueError,
        FileNotFoundError,
        FileExistsError,  # a file and a folder of one name
    ):  # stricter than ours: a file that it cannot read is part of the splits
        reject()
    if not modules:  # nothing that it reads
        reject()
    assert found.convert.removesuffix("l") == modules["default"]
    assert {split: set(inside) for split, inside in found.splits.items()} == {
        split: set(inside) for split, inside in layout["default"].items() if inside
    }


@pytest.mark.parametrize(
    ("configs", "paths", "said"),
    [
        (None, ["a.tar", "b.tar"], "its files are WebDataset"),
        (None, ["a.wav", "metadata.csv"], "its files are audio"),
        (None, ["train.csv", "test.jsonl"], "different formats (csv, json)"),
        (None, ["a.csv.xz"], "a.csv.xz is compressed"),
        (None, ["a.arrow.gz"], "a.arrow.gz is compressed"),
        (None, ["a.csv.zip", "b.csv"], "compressed"),
        ([{"data_files": "a.csv", "names": ["x"]}], ["a.csv"], "asks for `names:"),
        (
            [{"data_files": "a.csv", "encoding": "latin-1"}],
            ["a.csv"],
            "asks for `encoding: latin-1`",
        ),
        ([{"data_files": "a.csv", "sep": "||"}], ["a.csv"], "not one character"),
        ([{"data_files": "a.json", "field": "data"}], ["a.json"], "asks for `field: data`"),
        ([{"data_files": "**", "drop_labels": True}], ["a/x.png", "b/y.png"], "drop_labels"),
    ],
)
def test_what_would_be_read_otherwise_is_said(configs: Any, paths: list[str], said: str) -> None:
    (found,) = published(configs, paths).values()
    assert found.problem is not None and said in found.problem
