"""Data that a task cannot read is refused before the start: columns, templates, labels, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import Cluster
from tests.runner.job.test_preflight import Terminal


@pytest.fixture
def terminal(
    tmp_path: Path, twins_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    monkeypatch.chdir(tmp_path)
    yield Terminal(Cluster(tmp_path, twins_bundle))


CHAT = {"task": "instruction", "model": {"asset": "tiny-chat"}}
VIT = {"task": "image-classification", "model": {"asset": "tiny-vit"}, "sequence_length": None}
PAIR = {"asset": "prompts", "prompt": "User", "response": "Prompt"}
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no way to ask": (
        CHAT | {"dataset": {"asset": "prompts"}},
        ("does not say what is asked", "prompt: COLUMN"),
    ),
    "two ways to ask": (
        CHAT | {"dataset": PAIR | {"format": "{User}"}},
        ("`prompt and response` and `format` are both given",),
    ),
    "a prompt and no response": (
        CHAT | {"dataset": {"asset": "prompts", "prompt": "User"}},
        ("`response` is missing", "Add `response: COLUMN`"),
    ),
    "a column that is not there": (
        CHAT | {"dataset": PAIR | {"response": "Answer"}},
        ("`dataset.response: Answer`", "no such column", "User (string), Prompt (string)"),
    ),
    "a format with a column that is not there": (
        CHAT | {"dataset": {"asset": "prompts", "format": "{User} {Answer}"}},
        ("`dataset.format: {Answer}`", "no such column", "User (string), Prompt (string)"),
    ),
    "a format that is no format": (
        CHAT | {"dataset": {"asset": "prompts", "format": "{User!r}"}},
        ("has other things in braces than a column's name", "{{ and }}"),
    ),
    "a format without columns": (
        CHAT | {"dataset": {"asset": "prompts", "format": "hello"}},
        ("`dataset.format` names no column",),
    ),
    "messages that are a text": (
        CHAT | {"dataset": {"asset": "chats", "messages": "grade"}},
        (
            "holds string, not lists of {role, content}, {from, value} or {human, assistant}",
            "Columns of lists of {role, content}, {from, value} or {human, assistant}: messages",
        ),
    ),
    "messages without a chat template": (
        {
            "task": "instruction",
            "model": {"asset": "gpt2-bare"},
            "dataset": {"asset": "chats", "messages": "messages"},
        },
        ("has no chat template", "chat_template.jinja"),
    ),
    "a key of another task": (
        {"model": {"asset": "still-bert"}, "dataset": {"asset": "reference", "prompt": "chapter"}},
        ("`dataset.prompt` is only for task: instruction; it is masked-lm here", "there are text."),
    ),
    "one of several datasets": (
        CHAT | {"dataset": None, "datasets": [PAIR, {"asset": "chats", "messages": "talk"}]},
        ("`datasets[1].messages: talk`", "messages (list<"),
    ),
    "a dataset and datasets": (
        CHAT | {"dataset": PAIR, "datasets": [PAIR]},
        ("`dataset` and `datasets` are both",),
    ),
    "an unknown key in a list": (
        CHAT | {"dataset": None, "datasets": [PAIR, PAIR | {"wieght": 2}]},
        ("unknown key `wieght` in `datasets.1`", "Did you mean `weight`?"),
    ),
    "a role that no chat has": (
        CHAT
        | {"dataset": {"asset": "chats", "messages": "messages", "roles": {"gpt": "asistant"}}},
        ("`asistant`", "Did you mean `assistant`?"),
    ),
    "a field that no message has": (
        CHAT | {"dataset": {"asset": "chats", "messages": "messages", "fields": {"rolle": "from"}}},
        ("has `rolle`", "Did you mean `role`?"),
    ),
    "roles of no chat": (
        CHAT | {"dataset": PAIR | {"roles": {"gpt": "assistant"}}},
        ("there is no `messages`",),
    ),
    "pictures packed": (
        VIT
        | {
            "dataset": {"asset": "cifar-10", "validation": "test"},
            "packing": {"documents": "separate"},
        },
        ("samples of image-classification are not packed", "Omit it."),
    ),
    "samples joined": (
        CHAT | {"dataset": PAIR, "packing": {"documents": "joined"}},
        ("joined would cut samples in two", "separate"),
    ),
    "an encoder that is to answer": (
        CHAT | {"model": {"asset": "still-bert"}, "dataset": PAIR},
        ("is an encoder",),
    ),
    "labels that are not integers": (
        VIT | {"dataset": {"asset": "cifar-10", "validation": "test", "label": "image"}},
        (
            "`dataset.label: image`",
            "not integers",
            "Columns of integers: label",
            "Number the classes",
        ),
    ),
    "labels that are texts": (
        VIT | {"dataset": {"asset": "chats", "image": "messages", "label": "grade"}},
        ("`dataset.image: messages`", "not images"),
    ),
    "a language model that is to see": (
        VIT
        | {"model": {"asset": "tiny-chat"}, "dataset": {"asset": "cifar-10", "validation": "test"}},
        ("no image-classification model of type `llama`",),
    ),
    "an evaluation that never comes": (
        CHAT | {"dataset": PAIR, "evaluation": {"every": 0}},
        ("`evaluation.every` must be at least 1",),
    ),
    "patience with nothing to evaluate": (
        CHAT | {"dataset": PAIR | {"validation": None}, "evaluation": {"patience": 2}},
        ("evaluation.patience needs a validation split", "Set dataset.validation"),
    ),
    "a weight of nothing": (
        CHAT | {"dataset": PAIR | {"weight": 0}},
        ("`dataset.weight` must be above 0",),
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_data_that_cannot_work_is_refused_before_anything_starts(
    terminal: Terminal, bad: str
) -> None:
    changes, words = BAD[bad]
    terminal.cluster.write(**changes)
    said = terminal.refused("train", "tiny.yaml", "--processes", "2")
    assert [word for word in words if word not in said] == [], said
