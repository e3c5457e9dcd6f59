"""What an entry of a manifest can be, and which source answers it."""

from __future__ import annotations

from stage.lock.requests import KINDS, LOCATION_KEYS, TokenizerEntry
from stage.staging.resolve import SOURCES


def test_a_class_of_requests_is_a_kind_and_has_a_source() -> None:
    """The keys are those of every lock that was written: they can never change."""
    kinds = ["model", "tokenizer", "dataset", "metric", "path", "url", "environment"]
    assert [*KINDS] == kinds
    assert LOCATION_KEYS == {
        "hub": "repository",
        "path": "path",
        "url": "url",
        "environment": "environment",
    }
    assert {*SOURCES, TokenizerEntry} == {*KINDS.values()}
    assert all(table.without_a_file for table in KINDS.values())
