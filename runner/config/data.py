"""The keys `dataset`, `datasets`, `packing` and `evaluation` of a run file. Pure.

`run_config` reads these components. The tasks say which keys of a dataset they read.

`validation: 5%` holds out a part of the training split (`Part`). Its rows follow from a seed and
their numbers alone. So they are the same on each machine, for each number of ranks, for each
`limit`, and when a run continues.

`dataset.fields` and `dataset.roles` rename what the messages of a column have (`Naming`). Where
they are absent, the column's type decides: ShareGPT's names `{from, value}` are known, and those of
a question with its answer (`{human, assistant}`). The names are those of the data of LLaMA-Factory
and axolotl.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from runner.config.fields import those_with
from runner.errors import UsageError, WrongValueError, nearest_name, setting, suggest

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


OURS = ("role", "content")
SHAREGPT = ("from", "value")
FORMS = (OURS, SHAREGPT, ("from", "content"), ("role", "value"))
"""The names of the two keys of a message that are known."""
ASKED = (
    *("instruction", "prompt", "question", "query", "problem", "human", "user", "input"),
    *("article", "message_1"),
)
"""The names of a question, as a column or beside its answer; the most telling first."""
ANSWERED = (
    *("output", "response", "completion", "solution", "answer", "assistant", "gpt", "bot"),
    *("generation", "summary", "message_2", "chosen"),
)
"""The names of an answer, likewise."""
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""ShareGPT's names of the speakers, and LLaMA-Factory's of a tool's call and its answer."""
KNOWN = ("system", "user", "assistant", "tool")
"""Roles that keep their names; most chat templates have no others."""


class UnknownRoleError(ValueError):
    """A message has a role that nothing renames. The text is the role."""


@dataclass(frozen=True)
class Naming:
    """How the messages of a column are renamed.

    Attributes:
        role, content: the keys of a message that hold them.
        roles: role in the data -> role for the chat template.
        is_strict: whether other roles than `roles` and `KNOWN` are refused.
        given: the roles that the run file renames.
        are_pairs: each item is a question and its answer, under the keys `role` and `content`.
        unread: other keys of such a pair, which are not learned.
    """

    role: str
    content: str
    roles: Mapping[str, str]
    is_strict: bool
    given: Mapping[str, str]
    are_pairs: bool = False
    unread: tuple[str, ...] = ()

    @staticmethod
    def of(kind: str, fields: Mapping[str, str], roles: Mapping[str, str]) -> Naming | None:
        """Finds how the messages of a column are renamed.

        Args:
            kind: Arrow type of the column.
            fields: `role` and `content` -> the keys of a message, as in the run file.
            roles: as in the run file.

        Returns:
            None: the column has no such messages.
        """
        found = re.fullmatch(r"(?:large_)?list<\w+: struct<(.*)>(?: not null)?>", kind)
        if found is None:
            return None
        members = found[1]
        for _ in range(members.count("<")):  # those of members are removed, the innermost first
            members = re.sub(r"<[^<>]*>", "", members)
        for names in (OURS,) if fields else FORMS:
            role, content = (fields.get(o, name) for o, name in zip(OURS, names, strict=True))
            if _has(members, role) and _has(members, content):
                is_foreign = (role, content) != OURS
                known = ROLES if is_foreign else {}
                return Naming(role, content, {**known, **roles}, is_foreign, roles)
        asked = [name for name in ASKED if _has(members, name, "string") and not fields]
        answered = [name for name in ANSWERED if _has(members, name, "string")]
        if asked and answered:
            pair = (asked[0], answered[0])
            others = re.findall(r"(?:^|, )([^:,]+): ", members)
            unread = tuple(name for name in others if name not in pair)
            return Naming(*pair, {}, False, {}, are_pairs=True, unread=unread)
        return None

    def renamed(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with `role` and `content`; what else they have stays.

        Raises:
            UnknownRoleError: a role is not known.
        """
        if self.are_pairs:
            sides = ((self.role, "user"), (self.content, "assistant"))
            return [
                {"role": role, "content": pair[key]}
                for pair in messages
                for key, role in sides
                if pair[key] is not None
            ]
        return [self._renamed(message) for message in messages]

    def _renamed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message.get(self.role)
        if self.is_strict and role not in self.roles and role not in KNOWN:
            raise UnknownRoleError(str(role))
        others = {k: v for k, v in message.items() if k not in (self.role, self.content)}
        return {
            **others,
            "role": self.roles.get(str(role), role),
            "content": message.get(self.content),
        }

    def describe(self) -> str:
        """Says what is renamed, with the reason; empty: nothing."""
        if self.are_pairs:
            beside = f"; not read, and not learned: {', '.join(self.unread)}" if self.unread else ""
            pair = f"`{self.role}` is read as the user's message, `{self.content}` as the answer"
            return pair + beside
        if not self.is_strict and not self.given:
            return ""
        parts = []
        if (self.role, self.content) != OURS:
            parts.append(f"{{{self.role}, {self.content}}} is read as {{role, content}}")
        parts += [f"{theirs} -> {ours}" for theirs, ours in self.roles.items()]
        by_file = "as the run file says" if self.given else ""
        by_name = "ShareGPT's names" if set(self.roles) - set(self.given) else ""
        return f"{', '.join(parts)} ({'; '.join(filter(None, (by_file, by_name)))})"


def _has(members: str, name: str, kind: str = "") -> bool:
    return re.search(rf"(?:^|, ){re.escape(name)}: {kind}", members) is not None


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


def unknown_role(where: str, role: str) -> UsageError:
    """Returns the error for a role that nothing renames.

    Args:
        where: split and row.
        role: as the data have it.
    """
    known = ", ".join((*ROLES, *KNOWN))
    return UsageError(
        f"{where}: a message is from `{role}`; known are {known}.",
        f"Say whose words these are: dataset.roles: {{{role}: assistant}}, or another role of the "
        "chat template.",
    )


def known_fields(fields: dict[str, str]) -> dict[str, str]:
    """Refuses keys of `dataset.fields` that no message has here.

    Raises:
        WrongValueError: there is one.
    """
    for key in fields.keys() - set(OURS):
        remedy = suggest(key, OURS, "For instance: fields: {role: from, content: value}")
        raise WrongValueError(f"has `{key}`: a message has no `{key}` here", remedy)
    return fields


def known_roles(roles: dict[str, str]) -> dict[str, str]:
    """Refuses roles that were probably mistyped.

    Raises:
        WrongValueError: there is one.
    """
    for ours in roles.values():
        if ours not in KNOWN and nearest_name(ours, KNOWN):
            raise WrongValueError(f"has `{ours}`, which is no role of a chat", suggest(ours, KNOWN))
    return roles


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
