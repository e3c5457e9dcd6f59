"""The keys `dataset`, `datasets`, `packing` and `evaluation` of a run file. Pure.

`run_config` reads these components. `DatasetConfig.columns` names the columns that a task reads, so
that `runner.inputs` can check them before anything starts.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Literal

from runner.config.chats import check_naming
from runner.config.fields import Where, dotted, setting
from runner.config.held_out import check_share, share_of
from runner.errors import Lines, UsageError, suggest

Auto = Literal["auto"]

LANGUAGE = ("masked-lm", "causal-lm")
# Keys of a dataset that belong to certain tasks only. All others belong to every task.
KEYS = {
    "text": (*LANGUAGE, "text-classification"),
    "pair": ("text-classification",),
    **dict.fromkeys(("words", "tags"), ("token-classification",)),
    **dict.fromkeys(
        ("prompt", "response", "messages", "fields", "roles", "format", "loss_on", "too_long"),
        ("instruction",),
    ),
    **dict.fromkeys(("image", "image_size"), ("image-classification",)),
    "label": ("image-classification", "text-classification"),
}


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which rows of a dataset become samples, and how.

    Attributes:
        validation: a split; or a share of `train` to hold out: `5%`.
        validation_seed: decides which rows are held out.
        limit: the most rows to read of `train` and `validation`, from the beginning of the split.
        weight: passes over this dataset in one epoch of the run.
        pair: the second text of each row; None: rows have one text.
        words, tags: lists of equal lengths: the words of a sentence, and the class of each.
        prompt, response: two columns of text. Alternatives are `messages` and `format`.
        messages: a column of lists of `{role, content}` or `{from, value}` for the chat template.
        fields: `role` and `content` -> the keys that messages have instead.
        roles: role in the data -> role for the chat template.
        format: a text with columns in braces. The last column is the response.
        too_long: what happens to samples that are longer than `sequence_length`.
        image_size: pixels per side of the square that images are cut to.
    """

    asset: str = setting()
    config: str | Auto = setting("auto", "the only configuration of the dataset")
    train: str = setting("train", "the usual name")
    validation: str | None = setting(
        "auto", "the split named `validation`, if there is one", like="validation: 5%"
    )
    validation_seed: int = setting(42, "the same rows, whatever `seed` is", at_least=0, below=2**63)
    limit: dict[str, int] = setting(dict, "all rows")
    weight: float = setting(1.0, "", above=0)
    text: str = setting("text", "the usual name of the column")
    pair: str | None = setting(None, "one text in each row")
    words: str = setting("tokens", "the usual name of the column")
    tags: str = setting("ner_tags", "the usual name of the column")
    prompt: str | None = setting(None)
    response: str | None = setting(None)
    messages: str | None = setting(None)
    fields: dict[str, str] = setting(dict)
    roles: dict[str, str] = setting(dict)
    format: str | None = setting(None)
    loss_on: Literal["response", "all"] = setting("response", "the answer is what is learned")
    too_long: Literal["cut", "drop"] = setting(
        "drop", "a cut answer teaches to stop in mid-sentence"
    )
    image: str = setting("image", "the usual name of the column")
    label: str = setting("label", "the usual name of the column")
    image_size: int | Auto = setting("auto", "what the model takes", at_least=8)

    @property
    def holds_out(self) -> bool:
        """Whether a share of the training split is held out to validate."""
        return share_of(self.validation or "") > 0

    def columns(self, task: str) -> dict[str, str]:
        """Returns key of the run file -> its column; a `format` has one key per column."""
        if task in LANGUAGE:
            return {"text": self.text}
        if task == "image-classification":
            return {"image": self.image, "label": self.label}
        if task == "text-classification":
            texts = {"text": self.text} | ({"pair": self.pair} if self.pair else {})
            return texts | {"label": self.label}
        if task == "token-classification":
            return {"words": self.words, "tags": self.tags}
        if self.messages:
            return {"messages": self.messages}
        if self.format is not None:
            return {f"format: {{{name}}}": name for name in format_columns(self.format)}
        return {"prompt": self.prompt or "", "response": self.response or ""}


_DEFAULTS = {
    item.name: {} if item.default is MISSING else item.default for item in fields(DatasetConfig)
}


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How documents become sequences.

    `joined`: one stream, cut anywhere. `separate`: whole documents side by side, none sees another.
    `alone`: one document per sequence.
    """

    documents: Literal["joined", "separate", "alone"] | Auto = setting(
        "auto", "printed with the task below"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the validation split is read: per epoch or number of steps, and always at the end.

    Attributes:
        every: steps, or `epoch`.
        patience: the run ends after this many evaluations in a row without a lower validation loss.
    """

    every: int | Literal["epoch"] = setting("epoch", "and at the end", at_least=1)
    patience: int | None = setting(None, "the run makes all its steps", at_least=1)


def format_columns(text: str) -> list[str]:
    """Returns the columns that a `format` names, in order, each once.

    Raises:
        ValueError: braces do not pair, or hold something other than a column's name.
    """
    names = []
    for _, name, spec, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        if not name or spec or conversion:
            raise ValueError(
                f"`{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}`"
            )
        names.append(name)
    return list(dict.fromkeys(names))


def check_datasets(
    task: str, sources: tuple[DatasetConfig, ...], lines: Lines, given: frozenset[str]
) -> None:
    """Finds keys of datasets that do not go together, or not with the task.

    The mistakes, with file:line, are kept in `lines.mistakes`.

    Args:
        task: as in the run file.
        sources: the datasets.
        lines: the run file's line numbers.
        given: dotted keys that the user set; in a list of datasets `datasets.0.text` and so on.
    """
    for number, source in enumerate(sources):
        where: Where = ("datasets", number) if "datasets" in given else ("dataset",)
        _check_keys_of_task(task, source, where, lines, given)
        _check_limit(source, where, lines)
        with lines.mistakes:
            check_share(source.validation, lines.place(*where, "validation"))
        if task == "instruction":
            check_naming(source.fields, source.roles, lines, where)
            with lines.mistakes:
                _check_instruction(source, where, lines)


def _check_keys_of_task(
    task: str, source: DatasetConfig, where: Where, lines: Lines, given: frozenset[str]
) -> None:
    for key, tasks in KEYS.items():
        # A default may be set explicitly, as in the config.yaml of a run folder.
        is_default = getattr(source, key) == _DEFAULTS[key]
        if task not in tasks and dotted((*where, key)) in given and not is_default:
            others = f"Its keys here: {', '.join(k for k, of in KEYS.items() if task in of)}."
            with lines.mistakes:
                raise UsageError(
                    f"{lines.place(*where, key)}: `{key}` is not for task {task}, "
                    f"but for {tasks[0]}.",
                    others,
                )


def _check_limit(source: DatasetConfig, where: Where, lines: Lines) -> None:
    splits = ("train", "validation")
    for split, rows in source.limit.items():
        place = lines.place(*where, "limit", split)
        with lines.mistakes:
            if split not in splits:
                raise UsageError(
                    f"{place}: `{split}` cannot be limited.",
                    suggest(split, splits, f"Valid keys: {', '.join(splits)}."),
                )
            if rows < 1:
                raise UsageError(
                    f"{place}: `{split}` must be at least 1 row, found {rows}.",
                    "Remove the limit, or set a larger one.",
                )


def _check_instruction(source: DatasetConfig, where: Where, lines: Lines) -> None:
    ways = [
        way
        for way, there in (
            ("prompt and response", source.prompt is not None or source.response is not None),
            ("messages", source.messages is not None),
            ("format", source.format is not None),
        )
        if there
    ]
    if len(ways) != 1:
        raise UsageError(
            f"{lines.place(*where)}: task instruction: "
            + (
                f"`{'` and `'.join(ways)}` are both given."
                if ways
                else "the dataset does not say what is asked."
            ),
            "Give one of: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN}, "
            "{format: 'text with {COLUMN}s'}.",
        )
    if ways == ["prompt and response"] and (source.prompt is None or source.response is None):
        missing = "prompt" if source.prompt is None else "response"
        raise UsageError(
            f"{lines.place(*where)}: `{missing}` is missing.", f"Add `{missing}: COLUMN`."
        )
    if source.messages is None and (source.fields or source.roles):
        key = "fields" if source.fields else "roles"
        raise UsageError(
            f"{lines.place(*where, key)}: `{key}` renames what `messages` have, and there is no "
            "`messages`.",
            f"Remove `{key}`, or give the column of the chats: messages: COLUMN",
        )
    if source.format is not None:
        place = lines.place(*where, "format")
        try:
            names = format_columns(source.format)
        except ValueError as error:
            raise UsageError(
                f"{place}: braces hold a column's name and nothing else: {error}",
                "Write {{ and }} for braces.",
            ) from None
        if not names:
            raise UsageError(f"{place}: it names no column.", "Write columns in braces: {User}.")


def unused_keys(task: str, sources: tuple[DatasetConfig, ...]) -> Iterator[str]:
    """Yields the keys of a dataset that a run does not read; their defaults are not printed."""
    for item in fields(DatasetConfig):
        if item.name in KEYS and task not in KEYS[item.name]:
            yield f"dataset.{item.name}"
    if not any(source.holds_out for source in sources):
        yield "dataset.validation_seed"
