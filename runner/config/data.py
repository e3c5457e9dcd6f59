"""The keys `dataset`, `datasets`, `packing` and `evaluation` of a run file. Pure.

`run_config` reads these components. The tasks say which keys of a dataset they read.

`validation: 5%` holds out a part of the training split (`Part`). Its rows follow from a seed and
their numbers alone. So they are the same on each machine, for each number of ranks, for each
`limit`, and when a run continues.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from runner.config.chats import format_columns, known_fields, known_roles
from runner.config.tasks import those_with
from runner.errors import WrongValueError, setting, suggest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
_BITS = 2**64
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Part:
    """The rows of a split that are held out, or all others.

    Attributes:
        of: rows of the whole split.
        share: of the rows that are held out: `5%`.
        seed: decides which rows these are.
        is_held_out: whether it is the held-out rows.
    """

    of: int
    share: str
    seed: int
    is_held_out: bool

    @property
    def rows(self) -> int:
        """The number of its rows. At least one is held out, and one is not."""
        held_out = min(max(1, round(share_of(self.share) * self.of)), self.of - 1)
        return held_out if self.is_held_out else self.of - held_out

    def mask(self, first: int, number: int) -> NDArray[np.bool_]:
        """Returns which of the rows `first`, `first + 1`, ... belong to this part."""
        held_out = Part(self.of, self.share, self.seed, True)
        is_held_out = _ranks(first, number, self.seed) <= _highest(
            self.of, held_out.rows, self.seed
        )
        return is_held_out if self.is_held_out else ~is_held_out

    def place(self, number: int) -> int:
        """Returns which row of the whole split is the row `number` of this part."""
        return int(_places(self)[number])


def share_of(text: str) -> float:
    """Returns the share that a text such as `5%` states; 0: it states none."""
    found = _SHARE.fullmatch(text)
    return float(found[1]) / 100 if found else 0.0


def split_or_share(validation: str) -> str:
    """Refuses a percentage that is no part of a split; the name of a split is fine.

    Raises:
        WrongValueError: it is 0 %, or 100 % or more.
    """
    if "%" in validation and not 0 < share_of(validation) < 1:
        raise WrongValueError(
            "must be between 0 % and 100 %",
            "For instance: validation: 5%. Without validation: validation: null",
        )
    return validation


def _ranks(first: int, number: int, seed: int) -> NDArray[np.uint64]:
    """A random number for each row, all different (Steele et al., SplitMix64, OOPSLA 2014)."""
    import numpy as np

    begin = _mixed(np.array([seed % _BITS], dtype=np.uint64))
    numbers: NDArray[np.uint64] = np.arange(first, first + number, dtype=np.uint64)
    return _mixed(begin + numbers * np.uint64(_STEP))


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The mixing function of SplitMix64, a bijection; products overflow as they must."""
    import numpy as np

    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


@lru_cache(maxsize=4)
def _highest(of: int, held_out: int, seed: int) -> np.uint64:
    """The rank of the last row that is held out: those with the lowest ranks are."""
    import numpy as np

    found: np.uint64 = np.partition(_ranks(0, of, seed), held_out - 1)[held_out - 1]
    return found


@lru_cache(maxsize=4)
def _places(part: Part) -> NDArray[np.int64]:
    import numpy as np

    return np.flatnonzero(part.mask(0, part.of))


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
