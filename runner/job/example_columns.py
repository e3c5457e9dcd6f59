"""Which columns of a dataset a task reads: by their names, else by what their first rows hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from runner.config.chats import ANSWERED, ASKED
from runner.config.columns import fitting, texts_in
from runner.data.table import columns as read_columns
from runner.inputs import SplitInput

KEYS = {
    "masked-lm": ("text",),
    "causal-lm": ("text",),
    "instruction": ("prompt", "response"),
    "text-classification": ("text", "label"),
    "token-classification": ("words", "tags"),
    "image-classification": ("image", "label"),
}
"""Task -> the keys of the run file that name its columns."""

ROWS = 1000  # of the training split are looked at
_USUAL_NAMES = {
    "text": ("text", "content"),
    "words": ("tokens", "words"),
    "tags": ("ner_tags", "tags", "labels", "pos_tags"),
    "prompt": ASKED,
    "response": ANSWERED,
    "image": ("image", "img"),
    "label": ("label", "labels", "fine_label", "class", "category", "target", "sentiment"),
}
_TALKS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "talk")
_NO_TALKS = ("rejected", "prompt", "completion", "history", "tools")  # not the whole, or not good
_BESIDE = ("input", "query", "context", "article", "passage")
"""What a question is about, in a column of its own, often without a text."""
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{%s}%s\n\n### Response:\n{%s}"
)


def choose(
    task: str, split: SplitInput
) -> tuple[dict[str, str], dict[str, list[str]], tuple[str, ...]]:
    """Chooses a column for each key that the task reads.

    Args:
        task: as in the run file.
        split: the training split; its rows are read only where names do not decide.

    Returns:
        Key -> its column, or `format` -> a text with columns; key -> other columns that it could
        be; and the keys whose column does not have a usual name. Empty: nothing fits the task.

    Raises:
        DamageError: a file cannot be read.
    """
    columns = split.columns
    if task == "instruction" and (talk := _talk(columns)):
        return talk
    chosen: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    unusual: list[str] = []
    if task == "text-classification" and "text" not in columns and (pair := texts_in(columns)):
        chosen = dict(zip(("text", "pair"), pair, strict=False))
    for key in (key for key in KEYS[task] if key not in chosen):
        able = [name for name in fitting(task, key, columns) if name not in chosen.values()]
        if not able:
            return {}, {}, ()
        chosen[key] = _best(key, able, split)
        others[key] = [name for name in able if name != chosen[key]]
        unusual += [key] * (chosen[key].casefold() not in _USUAL_NAMES[key])
    return chosen, others, tuple(unusual)


def _talk(
    columns: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, list[str]], tuple[str, ...]] | None:
    """Chooses as `choose` does: a list of messages, or texts of usual names; None: neither."""
    lists = [
        name
        for name in fitting("instruction", "messages", columns)
        if name.casefold() not in _NO_TALKS
    ]
    talks = sorted(lists, key=lambda name: (_rank(_TALKS, name), name == "chosen"))
    is_usual = bool(talks) and talks[0].casefold() in _TALKS
    texts = fitting("instruction", "prompt", columns)
    asked, answered = (
        sorted((name for name in texts if name.casefold() in known), key=partial(_rank, known))
        for known in (ASKED, ANSWERED)
    )
    if not is_usual and asked and answered:
        beside = [name for name in texts if name.casefold() in _BESIDE and name != asked[0]]
        others = {"prompt": asked[1:], "response": answered[1:]}
        if not beside:
            return {"prompt": asked[0], "response": answered[0]}, others, ()
        more = "".join(f"\n\n### {name.capitalize()}:\n{{{name}}}" for name in beside)
        return {"format": _ALPACA % (asked[0], more, answered[0])}, {}, ()
    return ({"messages": talks[0]}, {"messages": talks[1:]}, ()) if talks else None


def _rank(known: Sequence[str], name: str) -> int:
    return [*known, name.casefold()].index(name.casefold())


def _best(key: str, able: Sequence[str], split: SplitInput) -> str:
    usual = [name for name in able if name.casefold() in _USUAL_NAMES[key]]
    if usual or len(able) == 1 or key not in ("text", "label"):
        return (usual or able)[0]
    values: dict[str, list[Any]] = {name: [] for name in able}
    for batch in read_columns(split, list(able), ROWS):
        for name, some in batch.items():
            values[name] += [value for value in some if value is not None]
    if key == "text":
        return max(able, key=lambda name: sum(map(len, values[name])))
    return min(able, key=lambda name: _as_classes(values[name]))


def _as_classes(values: Sequence[Any]) -> tuple[bool, int]:
    """A measure of how little the values of a column look like classes.

    All different: they are numbers of rows, or texts. All alike: there is nothing to learn.
    """
    kinds = len(set(values))
    return kinds < 2 or kinds == len(values) > 2, kinds
