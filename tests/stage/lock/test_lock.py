"""A lock has the same text on every machine, reads back as it was, and each field is checked."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.digests import sha256_of_bytes
from stage.errors import PolicyError, UsageError
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from tests.stage.locks import (
    COMMIT,
    canonical,
    document,
    every_kind,
    fetched_and_made,
    locks,
)

GOLDEN_ID = "d6263835fd734f93846e238eec9cc894044cfa4cd043f1df7256b1713d7c308b"


def read(parsed: object) -> Lockfile:
    return read_lock(json.dumps(parsed).encode(), "x.lock")


@given(locks())
def test_what_is_written_reads_back(lock: Lockfile) -> None:
    again = read_lock(lock.to_json(), "x.lock")
    assert again == canonical(lock)
    assert again.to_json() == lock.to_json() and again.id == lock.id


@given(locks())
def test_the_text_is_plain_indented_json(lock: Lockfile) -> None:
    """Any reader can check whether a lock is in its canonical text."""
    text = lock.to_json()
    assert (
        json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    ).encode() == text


@given(locks(), st.randoms())
def test_the_text_does_not_depend_on_any_order(lock: Lockfile, chance: random.Random) -> None:
    assets = [
        replace(
            asset, files=_shuffled(asset.files, chance), left_out=_shuffled(asset.left_out, chance)
        )
        for asset in _shuffled(tuple(lock.assets.values()), chance)
    ]
    shuffled = Lockfile(lock.name, {asset.name: asset for asset in assets})
    assert shuffled.to_json() == lock.to_json()


def _shuffled(items: tuple[Any, ...], chance: random.Random) -> tuple[Any, ...]:
    return tuple(chance.sample(items, len(items)))


def test_the_text_never_changes_between_versions() -> None:
    """Bundle ids depend on it: a change here needs a new format number."""
    text = every_kind().to_json()
    assert text.startswith(b'{\n "assets": {\n  "bert": {\n   "aliases": [\n    "acme/bert"\n')
    assert text.endswith(b' "format": 1,\n "name": "every-kind"\n}\n')
    assert every_kind().id == sha256_of_bytes(text) == GOLDEN_ID


def test_a_lock_is_complete_when_every_digest_row_count_and_schema_is_known() -> None:
    lock = every_kind()
    assert lock.is_complete
    dataset, model = lock.assets["lines"], lock.assets["bert"]
    split = dataset.configs["plain"]["train"]
    for missing in (
        replace(model, files=(replace(model.files[0], sha256=None), *model.files[1:])),
        replace(dataset, configs={"plain": {"train": replace(split, rows=None)}}),
        replace(dataset, configs={"plain": {"train": replace(split, schema=None)}}),
    ):
        assert not lock.with_asset(missing).is_complete
    assert lock.with_asset(
        replace(dataset, configs={"plain": {"train": replace(split, rows=0)}})
    ).is_complete


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON document."""
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*place, key))


def edited(place: tuple[str | int, ...], edit: Callable[[Any, Any], None]) -> Any:
    """The document with `edit(container, key)` done at a place."""
    wrapped = [copy.deepcopy(document())]
    container: Any = wrapped
    key: str | int = 0
    for step in place:
        container, key = container[key], step
    edit(container, key)
    return wrapped[0] if wrapped else None


PLACES = list(places(document()))
TYPED = [
    place for place in PLACES if "request" not in place[:-1]
]  # a request is compared, never obeyed


@pytest.mark.parametrize("place", TYPED, ids=lambda place: ".".join(map(str, place)) or "document")
def test_a_field_of_the_wrong_type_is_refused_in_words(place: tuple[str | int, ...]) -> None:
    right = edited(place, lambda container, key: None)
    for step in place:
        right = right[step]
    always_wrong: list[Any] = [-1, True, 1.5, {"\ud800": 1}, "\ud800"]
    wrongs = [7, "text", [], [3], {}, {"a": 1}]
    for wrong in always_wrong + [wrong for wrong in wrongs if type(wrong) is not type(right)]:
        if right is None and isinstance(wrong, str) and wrong == "text":
            continue  # a licence that is not stated might have been

        def put(container: Any, key: Any, wrong: Any = wrong) -> None:
            container[key] = wrong

        with pytest.raises((UsageError, PolicyError)) as refusal:
            read(edited(place, put))
        assert refusal.value.message.startswith("x.lock: ") and refusal.value.message.isprintable()


REQUIRED = [
    place
    for place in PLACES
    if place
    and isinstance(place[-1], str)
    and place[-1]
    not in {
        "aliases",
        "licence",
        "requested_revision",
        "parquet_commit",
        "upstream",
        "declared_rows",
    }
    and place[-1] not in {"sha256", "rows", "schema", "lfs-sha256", "git-sha1"}
    and "request" not in place[:-1]
    and place[:-1]
    not in {("assets",), ("assets", "lines", "configs"), ("assets", "lines", "configs", "plain")}
    and place[:-1] != ("assets", "lines", "configs", "other")
    and place != ("assets", "notes", "source", "commit")
]


@pytest.mark.parametrize("place", REQUIRED, ids=lambda place: ".".join(map(str, place)))
def test_a_missing_field_is_named(place: tuple[str | int, ...]) -> None:
    def remove(container: Any, key: Any) -> None:
        del container[key]

    with pytest.raises(UsageError) as refusal:
        read(edited(place, remove))
    assert str(place[-1]) in refusal.value.message


def test_what_is_brought_and_made_is_read_back() -> None:
    assert (
        read(document(fetched_and_made())) == fetched_and_made() and fetched_and_made().is_complete
    )


@pytest.mark.parametrize(
    ("asset", "key", "value", "said"),
    [
        ("lora", "base", "acme/base", "a mapping"),
        ("lora", "base", {"repository": "acme/base"}, "base.revision` is missing"),
        ("lora", "code", [{"repository": "r", "commit": "main", "files": []}], "a commit"),
        ("lora", "code", [{"repository": "r", "commit": COMMIT}], "files` is missing"),
        ("lora", "code", ["x"], "a mapping"),
        (
            "raw",
            "made_from",
            [{"origin": "a", "split": "../../x", "convert": "csv"}],
            "cannot name a split",
        ),
        ("raw", "made_from", [{"origin": "a", "split": "train"}], "convert` is missing"),
        ("raw", "made_from", [{"origin": "a", "separator": ";"}], "split` is missing"),
    ],
)
def test_what_a_lock_says_of_what_is_brought_and_made_is_checked(
    asset: str, key: str, value: Any, said: str
) -> None:
    parsed = document(fetched_and_made())
    parsed["assets"][asset][key] = value
    with pytest.raises(UsageError, match=said) as refusal:
        read(parsed)
    assert f"assets.{asset}" in refusal.value.message
