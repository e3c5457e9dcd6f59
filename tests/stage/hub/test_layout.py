"""The split of each parquet file, compared with the `datasets` library itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stage.hub.layout import (
    converted,
    declared_rows,
    default_config,
    published,
)
from tests.stage.hub.library import library, offline_library

__all__ = ["offline_library"]


def from_card(configs: Any, paths: list[str]) -> dict[str, dict[str, list[str]]]:
    """The layout of the configs that are published as parquet."""
    found = published(configs, paths)
    return {name: c.splits for name, c in found.items() if c.is_published_parquet}


def unordered(layout: Mapping[str, Mapping[str, list[str]]]) -> dict[str, dict[str, set[str]]]:
    """The library orders shards by text, we by number; for zero-padded names it is the same."""
    return {
        config: {split: set(paths) for split, paths in splits.items()}
        for config, splits in layout.items()
    }


CARDS: list[tuple[Any, list[str]]] = [
    (
        [{"config_name": "default", "data_files": "data/*.parquet"}],
        ["data/a.parquet", "data/b.parquet", "x.parquet"],
    ),
    (
        [{"config_name": "c", "data_files": ["a.parquet", "b/*.parquet"]}],
        ["a.parquet", "b/c.parquet", "c.parquet"],
    ),
    (
        [
            {
                "config_name": "c",
                "data_files": [{"split": "x_y", "path": ["1.parquet", "2.parquet"]}],
            }
        ],
        ["1.parquet", "2.parquet"],
    ),
    (
        [{"config_name": "c", "data_dir": "sub"}],
        ["sub/train-00000-of-00001.parquet", "sub/dev.1.parquet", "other/a.parquet"],
    ),
    (
        [{"config_name": "c", "data_dir": "sub", "data_files": "a*.parquet"}],
        ["sub/a1.parquet", "sub/b.parquet", "a0.parquet"],
    ),
    (
        [{"config_name": "c", "data_files": "**/*.parquet"}],
        ["a.parquet", "x/b.parquet", "x/y/c.parquet"],
    ),
    ([{"config_name": "c", "data_files": "x/**"}], ["x/b.parquet", "x/y/c.parquet", "a.parquet"]),
    (
        [{"config_name": "c", "data_files": "[ab]-?.parquet"}],
        ["a-1.parquet", "b-2.parquet", "c-3.parquet", "a-12.parquet"],
    ),
    (
        [
            {"config_name": "c", "data_files": "a.parquet"},
            {"config_name": "d", "data_files": "d/*.parquet"},
        ],
        ["a.parquet", "d/1.parquet"],
    ),
    ([{"config_name": "c"}], ["train.parquet", "test.parquet"]),
]


@pytest.mark.parametrize(("configs", "paths"), CARDS, ids=[str(n) for n in range(len(CARDS))])
def test_a_card_means_what_it_means_to_the_library(
    tmp_path: Path, configs: Any, paths: list[str]
) -> None:
    assert unordered(from_card(configs, paths)) == unordered(library(tmp_path, paths, configs)[1])


def test_shards_are_in_the_order_of_their_numbers() -> None:
    paths = [f"{number}-train-part.parquet" for number in (10, "a", 2, 1, 0, 11)]
    assert from_card(None, paths)["default"]["train"] == [
        f"{n}-train-part.parquet" for n in (0, 1, 2, 10, 11, "a")
    ]
    card = [{"config_name": "c", "data_files": [{"split": "train", "path": "*.parquet"}]}]
    assert from_card(card, paths)["c"]["train"] == [
        f"{n}-train-part.parquet" for n in (0, 1, 2, 10, 11, "a")
    ]


@pytest.mark.parametrize(
    ("configs", "names", "expected"),
    [
        (None, ["only"], "only"),
        ([{"config_name": "b", "default": True}], ["a", "b"], "b"),
        ([{"config_name": "gone", "default": True}], ["a", "b"], None),
        ([{"config_name": "b", "default": "yes"}], ["a", "b"], None),
        (None, ["a", "default"], "default"),
        (None, ["a", "b"], None),
        (None, [], None),
    ],
)
def test_the_config_of_a_manifest_that_names_none(
    configs: Any, names: list[str], expected: str | None
) -> None:
    assert default_config(configs, {name: {"train": ["x.parquet"]} for name in names}) == expected


def test_the_hubs_own_conversion_is_read() -> None:
    found = converted(
        [
            ".gitattributes",
            "plain/train/0000.json",
            "plain/0000.parquet",
            "plain/more/train/0000.parquet",
            "plain/train/0000.parquet",
            "plain/train/0001.parquet",
            "plain/test/0000.parquet",
            "other/train/0010.parquet",
            "other/train/0009.parquet",
        ]
    )
    assert {name: config.splits for name, config in found.items()} == {
        "plain": {
            "test": ["plain/test/0000.parquet"],
            "train": ["plain/train/0000.parquet", "plain/train/0001.parquet"],
        },
        "other": {"train": ["other/train/0009.parquet", "other/train/0010.parquet"]},
    }


def test_a_conversion_in_part_is_not_taken_for_the_whole() -> None:
    paths = [
        "big/partial-train/0000.parquet",
        "big/test/0000.parquet",
        "small/train/0000.parquet",
        "tail/a/0000.parquet",
        "tail/partial-b/0000.parquet",
    ]
    part = "the Hub converted only a part of it (5 GB)"
    found = {name: config.problem for name, config in converted(paths).items()}
    assert found == {"big": part, "small": None, "tail": part}


THREE, FIVE = ({"splits": [{"name": "train", "num_examples": n}]} for n in (3, 5))


@pytest.mark.parametrize(
    ("info", "config", "rows"),
    [
        ([{"config_name": "a", **THREE}, {"config_name": "b", **FIVE}], "b", {"train": 5}),
        ([{"config_name": "a", **THREE}, {"config_name": "b", **FIVE}], "c", {}),
        ([{"config_name": "default", **THREE}, {"config_name": "b", **FIVE}], "c", {}),
        ([THREE, {"config_name": "b", **FIVE}], "c", {}),
        ([THREE], "c", {"train": 3}),
        (THREE, "c", {"train": 3}),
        ({"config_name": "default", **THREE}, "c", {"train": 3}),
        ({"config_name": "b", **THREE}, "c", {}),
        ({"splits": [{"name": "a", "num_examples": "3"}, {"num_examples": 3}, 7]}, "c", {}),
        ({"splits": [{"name": 1, "num_examples": 0}]}, "c", {"1": 0}),
        (["text", THREE], "c", {}),
        (None, "c", {}),
    ],
)
def test_the_rows_that_a_card_declares_of_a_config(
    info: Any, config: str, rows: dict[str, int]
) -> None:
    assert declared_rows(info, config) == rows
