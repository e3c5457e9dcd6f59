"""Licences: read from cards, rejected before any download, or stated by the user."""

from __future__ import annotations

import pytest

from stage.lock.licences import not_allowed, stated, states_nothing
from tests.support.staging import MODEL, Laptop


@pytest.mark.parametrize(
    ("card", "name", "statement"),
    [
        (["apache-2.0"], None, "apache-2.0"),
        (["mit", "cc-by-4.0"], None, "mit, cc-by-4.0"),
        (["other"], "deepseek", "other (deepseek)"),
        (["other"], "one, or  another", "other (one or another)"),
        (["other"], None, "other"),
        (["mit"], "deepseek", "mit"),
        ([""], None, None),
        ([], "deepseek", None),
    ],
)
def test_what_a_card_states(card: list[str], name: str | None, statement: str | None) -> None:
    assert stated(card, name) == statement


@pytest.mark.parametrize(
    ("statement", "is_nothing"),
    [
        (None, True),
        ("other", True),
        ("other (deepseek)", True),
        ("unknown, other", True),
        ("mit", False),
        ("mit, other", False),
    ],
)
def test_a_user_may_know_more_than_a_card_that_states_nothing(
    statement: str | None, is_nothing: bool
) -> None:
    assert states_nothing(statement) == is_nothing


@pytest.mark.parametrize(
    ("statement", "allowed", "refused"),
    [
        ("apache-2.0", ["Apache-2.0"], []),
        ("mit", ["apache-2.0"], ["mit"]),
        ("mit", ["mit-0"], ["mit"]),
        ("mit, gpl-3.0", ["mit"], ["gpl-3.0"]),
        ("other (DeepSeek)", ["deepseek"], []),
        ("other (DeepSeek)", ["other (deepseek)"], []),
        ("other (deepseek)", ["other"], []),
        ("other", ["deepseek"], ["other"]),
        ("other (deepseek", ["other"], ["other (deepseek"]),
        ("another (deepseek)", ["deepseek"], ["another (deepseek)"]),
        ("deepseek", ["other"], ["deepseek"]),
        (None, ["mit"], ["unknown"]),
        (None, ["mit", "unknown"], []),
        ("unknown", ["Unknown"], []),
    ],
)
def test_what_a_policy_allows(
    statement: str | None, allowed: list[str], refused: list[str]
) -> None:
    assert not_allowed(statement, allowed) == refused


MANIFEST = f"""\
format: 1
policy: {{licences: [mit, CC0-1.0]}}
assets:
  tiny-bert:
    model: {MODEL}
    include: ["config.json"]
  lines:
    dataset: acme/lines
  mine:
    path: mine.txt
"""


@pytest.fixture
def licensed(laptop: Laptop) -> Laptop:
    (laptop.folder / "mine.txt").write_text("mine")
    laptop.hub.commit(
        "models", MODEL, {"README.md": b"---\nlicense: llama3.1\n---\n", "config.json": b"{}"}
    )
    laptop.write(MANIFEST)
    return laptop


def test_every_refusal_is_told_at_once_before_anything_comes(licensed: Laptop) -> None:
    words = licensed.refused(3)
    assert "tiny.yaml:4: `tiny-bert`: llama3.1;" in words
    assert "tiny.yaml:9: `mine`: unknown (none is stated)." in words
    assert "`lines`" not in words.split("error:")[1]  # CC0-1.0, however it is spelled
    asked = {request.path.rpartition("/")[2] for request in licensed.hub.requests("/resolve/")}
    assert asked <= {"config.json"}  # read to know the model
    assert not (licensed.folder / "tiny.lock").exists() and not licensed.bundle.exists()


def test_a_statement_does_not_outdo_the_repositorys(licensed: Laptop) -> None:
    licensed.write(MANIFEST.replace('include: ["config.json"]', "licence: mit"))
    words = licensed.refused(2)
    assert "tiny.yaml:6" in words and f"{MODEL} states the licence llama3.1, not mit" in words
