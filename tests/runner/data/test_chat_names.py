"""Chats in ShareGPT's form are what the same chats with `{role, content}` are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from runner.config.chats import Naming
from runner.config.data import DatasetConfig
from runner.data.prepare import prepare
from runner.data.recipe import Recipe
from runner.data.store import Stores
from runner.from_stage import Mistakes, Place, UsageError
from runner.inputs import ModelInput, SplitInput
from runner.tasks import TASKS
from tests.remedies.obeyed import in_it, obeys
from tests.runner.data.test_prepare import digest

TALK = [("user", "who is she ?"), ("assistant", "Elizabeth"), ("user", "why ?")]
TALK += [("assistant", "she is the second daughter")]
SHAREGPT = {"user": "human", "assistant": "gpt"}


@pytest.fixture(scope="module")
def chat(twins_bundle: Path) -> ModelInput:
    return ModelInput("chat", twins_bundle / "data/models/tiny-chat", "", None, {}, {})


def recipe_of(
    folder: Path, model: ModelInput, talks: list[Any], role: str, content: str, **settings: Any
) -> Recipe:
    """A split of conversations whose messages have these two keys."""
    folder.mkdir(exist_ok=True)
    rows = [None if t is None else [{role: who, content: said} for who, said in t] for t in talks]
    table = pa.table({"talk": rows})
    path = folder / "a.parquet"
    pq.write_table(table, path)
    columns = {"talk": str(table.schema.field("talk").type)}
    split = SplitInput("train", (path,), (digest(path),), len(rows), columns)
    dataset = DatasetConfig(asset="a", messages="talk", **settings)
    mistakes = Mistakes()
    TASKS["instruction"].check_columns(dataset, columns, "train", Place, mistakes)
    mistakes.check("run file")
    return Recipe("instruction", 128, split, dataset, None, model, "alone")


def bytes_of(recipe: Recipe, folder: Path) -> tuple[bytes, ...]:
    store = prepare(recipe, folder / "stores", print)
    rows = [Stores([store]).row(number) for number in range(len(store))]
    return tuple(b"".join(row[name].tobytes() for row in rows) for name in ("ids", "learned"))


@pytest.mark.parametrize(
    ("names", "role", "content", "settings"),
    [
        (SHAREGPT, "from", "value", {}),
        ({}, "from", "value", {}),
        (
            {"user": "customer", "assistant": "agent"},
            "speaker",
            "text",
            {
                "fields": {"role": "speaker", "content": "text"},
                "roles": {"customer": "user", "agent": "assistant"},
            },
        ),
        ({"assistant": "model"}, "role", "content", {"roles": {"model": "assistant"}}),
        ({"user": "human"}, "role", "value", {"fields": {"content": "value"}}),
    ],
)
def test_renamed_chats_become_the_same_tokens_and_the_same_are_learned(
    tmp_path: Path,
    chat: ModelInput,
    names: dict[str, str],
    role: str,
    content: str,
    settings: dict[str, Any],
) -> None:
    plain = recipe_of(tmp_path / "plain", chat, [TALK, None], "role", "content")
    theirs = [[(names.get(who, who), said) for who, said in TALK], None]
    renamed = recipe_of(tmp_path / "renamed", chat, theirs, role, content, **settings)
    assert bytes_of(renamed, tmp_path) == bytes_of(plain, tmp_path)


@obeys("runner/config/chats.py", "Say whose words these are: dataset.roles")
@pytest.mark.parametrize("by", ["prepare", "check"])
def test_an_unknown_role_is_an_error_with_its_row_and_the_map_that_helps(
    tmp_path: Path, chat: ModelInput, by: str
) -> None:
    talks = [[("human", "a"), ("gpt", "b")], [], [("human", "a"), ("bing", "b")]]
    recipe = recipe_of(tmp_path, chat, talks, "from", "value")
    with pytest.raises(UsageError, match="split `train`, row 2: a message is from `bing`") as error:
        TASKS[recipe.task].check_rows(recipe) if by == "check" else bytes_of(recipe, tmp_path)
    roles = yaml.safe_load(in_it(error.value.remedy, r"(?<=dataset.roles: )\{.*?\}"))
    settled = recipe_of(tmp_path, chat, talks, "from", "value", roles=roles)
    TASKS[recipe.task].check_rows(settled)
    bytes_of(settled, tmp_path)


def test_the_keys_of_a_message_are_its_own_and_an_answer_is_a_text() -> None:
    """A key of an argument of a call was taken for one of the message: KeyError in the ranks."""
    inner = "list<element: struct<call: struct<input: string>, output: string>>"
    several = "list<element: struct<question: string, answer: list<element: string>>>"
    nested = "list<element: struct<call: struct<role: string, content: string>>>"
    assert [Naming.of(kind, {}, {}) for kind in (inner, several, nested)] == [None] * 3
    calls = (
        "list<item: struct<role: string, calls: list<item: struct<name: string>>, content: string>>"
    )
    assert Naming.of(calls, {}, {}) is not None


def test_a_third_key_of_a_pair_is_named_as_not_learned() -> None:
    """`system` beside `human` and `assistant` was in no sample, without a word."""
    kind = "list<element: struct<system: string, human: string, assistant: string, n: int64>>"
    naming = Naming.of(kind, {}, {})
    assert naming is not None and naming.are_pairs
    assert naming.describe().endswith("as the answer; not read, and not learned: system, n")


def test_what_a_tool_says_is_not_read_as_an_answer() -> None:
    naming = Naming.of("list<element: struct<from: string, value: string>>", {}, {})
    assert naming is not None
    talk = [{"from": "function_call", "value": "f()"}, {"from": "observation", "value": "7"}]
    assert [message["role"] for message in naming.renamed(talk)] == ["assistant", "tool"]
