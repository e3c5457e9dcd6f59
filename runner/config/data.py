"""The tasks, and the keys `dataset`, `datasets`, `packing` and `evaluation` of a run file. Pure.

`TASKS`: the class of transformers that each task trains, and what its data are.

`run_config` reads these components. `DatasetConfig.columns` names the columns that a task reads, so
that `runner.inputs` can check them before anything starts.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from runner.config.chats import known_fields, known_roles
from runner.config.held_out import share_of, split_or_share
from runner.errors import Lines, UsageError, Where, WrongValueError, keys_of, setting, suggest

Auto = Literal["auto"]

LANGUAGE = ("masked-lm", "causal-lm")
_TEXT = ("task", (*LANGUAGE, "text-classification"))
_WORDS = ("task", ("token-classification",))
_CHAT = ("task", ("instruction",))
_IMAGE = ("task", ("image-classification",))


def _limit(limit: dict[str, int]) -> dict[str, int]:
    splits = ("train", "validation")
    for split, rows in limit.items():
        if split not in splits:
            remedy = suggest(split, splits, f"Valid keys: {', '.join(splits)}.")
            raise WrongValueError(f"cannot limit `{split}`", remedy)
        if rows < 1:
            raise WrongValueError(
                "must be at least 1 row", "Remove the limit, or set a larger one."
            )
    return limit


def _format(text: str) -> str:
    try:
        names = format_columns(text)
    except ValueError as error:
        raise WrongValueError(
            f"has other things in braces than a column's name ({error})",
            "Write {{ and }} for braces.",
        ) from None
    if not names:
        raise WrongValueError("names no column", "Write columns in braces: {User}.")
    return text


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
        "auto",
        "the split named `validation`, if there is one",
        like="validation: 5%",
        convert=split_or_share,
    )
    validation_seed: int = setting(42, "the same rows, whatever `seed` is", at_least=0, below=2**63)
    limit: dict[str, int] = setting(dict, "all rows", convert=_limit)
    weight: float = setting(1.0, "", above=0)
    text: str = setting("text", "the usual name of the column", only=_TEXT)
    pair: str | None = setting(
        None, "one text in each row", only=("task", ("text-classification",))
    )
    words: str = setting("tokens", "the usual name of the column", only=_WORDS)
    tags: str = setting("ner_tags", "the usual name of the column", only=_WORDS)
    prompt: str | None = setting(None, only=_CHAT)
    response: str | None = setting(None, only=_CHAT)
    messages: str | None = setting(None, only=_CHAT)
    fields: dict[str, str] = setting(dict, convert=known_fields, only=_CHAT)
    roles: dict[str, str] = setting(dict, convert=known_roles, only=_CHAT)
    format: str | None = setting(None, convert=_format, only=_CHAT)
    loss_on: Literal["response", "all"] = setting(
        "response", "the answer is what is learned", only=_CHAT
    )
    too_long: Literal["cut", "drop"] = setting(
        "drop", "a cut answer teaches to stop in mid-sentence", only=_CHAT
    )
    image: str = setting("image", "the usual name of the column", only=_IMAGE)
    label: str = setting(
        "label",
        "the usual name of the column",
        only=("task", ("image-classification", "text-classification")),
    )
    image_size: int | Auto = setting("auto", "what the model takes", at_least=8, only=_IMAGE)

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


def keys_of_task(task: str) -> tuple[str, ...]:
    """Returns the keys of a dataset that belong to this task, and not to every task."""
    keys = keys_of(DatasetConfig).values()
    return tuple(key.name for key in keys if key.only and task in key.only[1])


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


def check_instruction(source: DatasetConfig, where: Where, lines: Lines) -> None:
    """Refuses a dataset of chats that does not say, in one way, what is asked and answered.

    Raises:
        UsageError: with file:line.
    """
    pair = [source.prompt, source.response]
    given = {"prompt and response": any(pair), "messages": source.messages, "format": source.format}
    ways = [way for way, value in given.items() if value]
    if len(ways) != 1:
        both = f"`{'` and `'.join(ways)}` are both given"
        what = both if ways else "the dataset does not say what is asked"
        raise UsageError(
            f"{lines.place(*where)}: task instruction: {what}.",
            "Give one of: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN}, "
            "{format: 'text with {COLUMN}s'}.",
        )
    if any(pair) and not all(pair):
        missing = "response" if source.prompt else "prompt"
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


Data = Literal["texts", "chats", "labelled", "images"]


@dataclass(frozen=True)
class TaskKind:
    """What a task is, for everything but its loss.

    Attributes:
        auto: the class of transformers that loads its models.
        table: the part of the name of transformers' table of its model types.
        pipeline: the Hub's name for it.
        data: what its samples are. `labelled`: texts or words with classes.
    """

    auto: str
    table: str
    pipeline: str
    data: Data


TASKS = {
    "masked-lm": TaskKind("AutoModelForMaskedLM", "MASKED_LM", "fill-mask", "texts"),
    "causal-lm": TaskKind("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", "texts"),
    "instruction": TaskKind("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", "chats"),
    "text-classification": TaskKind(
        "AutoModelForSequenceClassification",
        "SEQUENCE_CLASSIFICATION",
        "text-classification",
        "labelled",
    ),
    "token-classification": TaskKind(
        "AutoModelForTokenClassification",
        "TOKEN_CLASSIFICATION",
        "token-classification",
        "labelled",
    ),
    "image-classification": TaskKind(
        "AutoModelForImageClassification", "IMAGE_CLASSIFICATION", "image-classification", "images"
    ),
}
"""The value of `task` in a run file -> what it is, in the order of the documentation."""


def data_of(task: str) -> Data:
    """Returns what the samples of a task are."""
    return TASKS[task].data
