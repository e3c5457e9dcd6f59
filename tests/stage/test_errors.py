"""Errors carry their place as data, and print it."""

from __future__ import annotations

import pickle

import pytest

from stage import errors
from stage.bundle import verifier
from stage.errors import (
    Mistakes,
    Place,
    StageError,
    UsageError,
    about,
    join_errors,
    without_secrets,
)


def test_a_place_is_printed_as_file_line_and_name() -> None:
    assert [str(p) for p in (Place("m.yaml"), Place("m.yaml", 3), Place("m.yaml", 3, "bert"))] == [
        "m.yaml",
        "m.yaml:3",
        "m.yaml:3: `bert`",
    ]
    assert sorted([Place("m.yaml", 10), Place("m.yaml", 9), Place("m.yaml")])[0] == Place("m.yaml")


def test_an_error_prints_its_place_and_keeps_it_as_data() -> None:
    error = UsageError("`x` is missing.", "Add it.", place=Place("m.yaml", 3))
    assert str(error) == "m.yaml:3: `x` is missing.\n  -> Add it."
    assert (error.place, error.problem) == (Place("m.yaml", 3), "`x` is missing.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_about_gives_its_place_to_errors_that_have_none() -> None:
    with pytest.raises(StageError) as caught, about("model bert"):
        raise UsageError("no file is left.")
    assert caught.value.message == "model bert: no file is left."
    with pytest.raises(StageError) as caught, about("outer"), about("inner"):
        raise UsageError("it broke.")
    assert caught.value.message == "outer: inner: it broke."
    with pytest.raises(StageError) as caught, about("outer"):
        raise UsageError("it broke.", place=Place("m.yaml", 3))
    assert caught.value.place == Place("m.yaml", 3)


def test_several_errors_are_listed_after_the_place_of_all() -> None:
    errors = [UsageError("one."), UsageError("two.", place=Place("m.yaml", 2))]
    with pytest.raises(UsageError) as caught, about("m.yaml"):
        raise join_errors(errors, "mistakes")
    assert caught.value.message == "m.yaml: 2 mistakes:\n  1. one.\n  2. m.yaml:2: two."


def test_mistakes_are_in_the_order_of_their_lines() -> None:
    mistakes = Mistakes()
    for place in (Place("m.yaml", 10), Place("m.yaml", 9), Place("other.yaml", 1), "--set x"):
        with mistakes, about(place):
            raise UsageError("wrong.")
    with pytest.raises(UsageError) as caught:
        mistakes.check("m.yaml")
    assert [str(part.place) for part in caught.value.parts] == [
        "other.yaml:1",
        "--set x",
        "m.yaml:9",
        "m.yaml:10",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@h.example:8/a/b.whl?sig=1#x", "https://h.example:8/a/b.whl"),
        ("https://h.example/t/ab-123/chan/linux-64", "https://h.example/chan/linux-64"),
        ("x @ git+ssh://git@h.example/x", "x @ git+ssh://h.example/x"),
        ("see `https://a@b@h.example/x?k=s`, then", "see `https://h.example/x`, then"),
        ("file:///srv/t/x/y?z", "file:///srv/t/x/y?z"),
        ("me@host:dir conda-forge ./t/x/y", "me@host:dir conda-forge ./t/x/y"),
    ],
)
def test_an_address_is_shown_without_login_token_and_query(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_bundles_verifier_escapes_the_same_characters() -> None:
    """It stands alone, so the table is there twice."""
    assert set(verifier.TURNS) == errors._BIDI_CONTROLS


def test_each_of_several_mistakes_gets_the_place_of_the_block() -> None:
    """`Mistakes` takes a joined error apart: a part without a place would name no file."""
    two = [UsageError("no a"), UsageError("no b", place="part-1.zip")]
    mistakes = Mistakes()
    with mistakes, about(Place("m.yaml", 3, "bert")):
        raise join_errors(two, "mistakes")
    assert [found.message for found in mistakes.found] == [
        "m.yaml:3: `bert`: no a",
        "m.yaml:3: `bert`: part-1.zip: no b",
    ]
