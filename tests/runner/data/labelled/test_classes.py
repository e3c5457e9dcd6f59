"""Classes are found in each form in which datasets have them, and go together by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.data.table import Classes, classes_of, united
from runner.from_stage import UsageError
from runner.inputs import SplitInput
from tests.remedies.obeyed import obeys
from tests.support.training.twins import labelled_parquet

CLASSES = "runner/data/table.py"
NAMED = {"names": ["no", "yes"], "_type": "ClassLabel"}


def split(folder: Path, values: list[Any], feature: dict[str, Any] | None = None) -> SplitInput:
    path = folder / "train.parquet"
    path.write_bytes(labelled_parquet({"y": values}, {"y": feature} if feature else {}))
    return SplitInput("train", (path,), ("",), len(values), {"y": ""})


@pytest.mark.parametrize(
    ("values", "feature", "expected"),
    [
        ([0, 1, None], NAMED, Classes(["no", "yes"], "names")),
        ([0, 2, 0], None, Classes(["0", "1", "2"], "numbers")),
        (["spam", "ham", None, "spam"], None, Classes(["ham", "spam"], "texts")),
        (["ham ", "", "ham", " \t"], None, Classes(["ham", "ham "], "texts")),
        ([[0], [1]], {"feature": NAMED, "_type": "Sequence"}, Classes(["no", "yes"], "names")),
        ([[0], [1]], [NAMED], Classes(["no", "yes"], "names")),
        ([["O"], ["B-X", "O"], None], None, Classes(["B-X", "O"], "texts")),
    ],
)
def test_classes_of_a_column(
    tmp_path: Path, values: list[Any], feature: Any, expected: Classes
) -> None:
    assert classes_of(split(tmp_path, values, feature), "y") == expected


@pytest.mark.parametrize(
    ("values", "feature", "message"),
    [
        ([-1, -1], NAMED, "This split has no labels"),
        ([1, 2], NAMED, "Subtract 1 from each label"),
        ([0, 1, -1], NAMED, "the labels in `y` are -1 to 1; classes count from 0 to 1"),
        ([0, 0], None, "all labels in `y` are 0: there is nothing to learn"),
        (["a", "a"], None, "all labels in `y` are a"),
        ([None, None], None, "`y` has no labels"),
        (["", "  "], None, "`y` has no labels"),
    ],
)
def test_labels_that_are_no_classes_are_refused(
    tmp_path: Path, values: list[Any], feature: Any, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        classes_of(split(tmp_path, values, feature), "y")
    assert message in f"{caught.value.message} {caught.value.remedy}"


def test_datasets_are_united_by_the_names_of_their_classes() -> None:
    first, second = Classes(["no", "yes"], "names"), Classes(["maybe", "no"], "texts")
    assert united([first, second], [second]) == ["no", "yes", "maybe"]
    numbers = [Classes([str(n) for n in range(size)], "numbers") for size in (2, 11)]
    assert united(numbers, []) == [str(n) for n in range(11)]


@obeys(CLASSES, "Stage them with the same kind of labels", "Choose another validation split, or")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Classes(["0", "1"], "numbers"), "some datasets name their classes"),
        (Classes(["no", "never"], "texts"), "the training split does not have: never"),
    ],
)
def test_a_validation_split_of_other_classes_is_refused(other: Classes, message: str) -> None:
    train = Classes(["no", "yes"], "names")
    with pytest.raises(UsageError, match=message) as caught:
        united([train], [other])
    assert "validation: null" in caught.value.remedy
    for validation in ([], [Classes(["yes", "no"], "texts")]):
        assert united([train], validation) == train.names
    if other.kind == "numbers":  # without validation the two would still not go together
        with pytest.raises(UsageError, match=message) as caught:
            united([train, other], [])
        assert caught.value.remedy == "Stage them with the same kind of labels."
