"""A lock has the same text on every machine, reads back as it was, and each field is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stage.errors import UsageError
from stage.files import sha256_of_bytes
from stage.lock.model import Lockfile, read_lock
from tests.stage.locks import (
    COMMIT,
    canonical,
    document,
    every_kind,
    fetched_and_made,
)

GOLDEN_ID = "d6263835fd734f93846e238eec9cc894044cfa4cd043f1df7256b1713d7c308b"


def read(parsed: object) -> Lockfile:
    return read_lock(json.dumps(parsed).encode(), "x.lock")


@pytest.mark.parametrize("lock", [every_kind(), fetched_and_made()])
def test_what_is_written_reads_back_and_is_plain_indented_json(lock: Lockfile) -> None:
    """Any reader can check whether a lock is in its canonical text."""
    text = lock.to_json()
    again = read_lock(text, "x.lock")
    assert again == canonical(lock) and again.to_json() == text and again.id == lock.id
    plain = json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert plain.encode() == text


def test_the_text_does_not_depend_on_any_order() -> None:
    assets = [
        replace(asset, files=asset.files[::-1], left_out=asset.left_out[::-1])
        for asset in reversed([*every_kind().assets.values()])
    ]
    shuffled = Lockfile("every-kind", {asset.name: asset for asset in assets})
    assert shuffled.to_json() == every_kind().to_json()


def test_the_text_never_changes_between_versions() -> None:
    """Bundle ids depend on it: a change here needs a new format number."""
    assert every_kind().id == sha256_of_bytes(every_kind().to_json()) == GOLDEN_ID


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


def test_what_is_brought_and_made_is_read_back() -> None:
    assert (
        read(document(fetched_and_made())) == fetched_and_made() and fetched_and_made().is_complete
    )
