"""The keys `dataset`, `datasets`, `packing` and `evaluation` of a run file. Pure.

`run_config` reads these components. The tasks say which keys of a dataset they read. `held_out.py`
has the meaning of `validation: 5%`, `chats.py` that of `fields` and `roles`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from runner.config.chats import known_fields, known_roles
from runner.config.fields import those_with
from runner.config.held_out import share_of, split_or_share
from runner.from_stage import WrongValueError, setting, suggest


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


Auto = Literal["auto"]


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
    """Which rows of a dataset become samples, and how. A task reads some of the keys.

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
    text: str = setting("text", "the usual name of the column", only=those_with("text"))
    pair: str | None = setting(None, "one text in each row", only=those_with("pair"))
    words: str = setting("tokens", "the usual name of the column", only=those_with("words"))
    tags: str = setting("ner_tags", "the usual name of the column", only=those_with("tags"))
    prompt: str | None = setting(None, only=those_with("prompt"))
    response: str | None = setting(None, only=those_with("response"))
    messages: str | None = setting(None, only=those_with("messages"))
    fields: dict[str, str] = setting(dict, convert=known_fields, only=those_with("fields"))
    roles: dict[str, str] = setting(dict, convert=known_roles, only=those_with("roles"))
    format: str | None = setting(None, convert=_format, only=those_with("format"))
    loss_on: Literal["response", "all"] = setting(
        "response", "the answer is what is learned", only=those_with("loss_on")
    )
    too_long: Literal["cut", "drop"] = setting(
        "drop", "a cut answer teaches to stop in mid-sentence", only=those_with("too_long")
    )
    image: str = setting("image", "the usual name of the column", only=those_with("image"))
    label: str = setting("label", "the usual name of the column", only=those_with("label"))
    image_size: int | Auto = setting(
        "auto", "what the model takes", at_least=8, only=those_with("image_size")
    )

    @property
    def holds_out(self) -> bool:
        """Whether a share of the training split is held out to validate."""
        return share_of(self.validation or "") > 0


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
