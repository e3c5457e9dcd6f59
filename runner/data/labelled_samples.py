"""Rows -> token ids with classes: one class for each text, or one for each word.

A pair of texts is encoded as the tokenizer does it, with its own special tokens and token types. A
word's class is at its first token; the other tokens of the word, and special tokens, have none. A
sample that is longer than a sequence is cut, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.classes import NOT_GIVEN, Classes, is_blank
from runner.data.recipe import Recipe
from runner.data.table import columns, row_of
from runner.errors import UsageError
from runner.inputs import SplitInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100


class Labelled(NamedTuple):
    """One sample.

    Attributes:
        ids: token ids.
        segments: for each token, 1 for the first text and 2 for the second.
        labels: one class; or for each token its class, or `IGNORED`.
    """

    ids: list[int]
    segments: list[int]
    labels: list[int]


@dataclass
class Tally:
    """Counts rows: `dropped` have no text or no class, `cut` are longer than a sequence.

    `cut_words` are the words of cut samples that are in no sequence.
    """

    dropped: int = 0
    cut: int = 0
    cut_words: int = 0


def samples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, classes: Classes, tally: Tally
) -> Iterator[Labelled]:
    """Yields the samples of a split in its order.

    Raises:
        UsageError: a row has more tags than words, or fewer; or the tokenizer does not say which
            word a token belongs to.
    """
    number: dict[Any, int] = {name: index for index, name in enumerate(classes.names)}
    if classes.kind != "texts":
        number = {index: index for index in range(len(classes.names))}
    if recipe.task == "text-classification":
        yield from _texts(recipe, tokenizer, number, tally)
    else:
        yield from _sentences(recipe, tokenizer, number, tally)


def _class(value: Any, number: Mapping[Any, int], recipe: Recipe, row: int) -> int:
    if value not in number:
        raise UsageError(
            f"{row_of(recipe.split, row)}: label {value}; "
            f"classes count from 0 to {len(number) - 1}.",
            NOT_GIVEN,
        )
    return number[value]


def _texts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: Mapping[Any, int], tally: Tally
) -> Iterator[Labelled]:
    data = recipe.dataset
    names = list(recipe.dataset.columns(recipe.task).values())
    first = 0
    for rows in columns(recipe.split, list(dict.fromkeys(names)), recipe.limit):
        texts = list(zip(*(rows[name] for name in names[:-1]), strict=True))
        kept = [
            (text, _class(label, number, recipe, first + row))
            for row, (text, label) in enumerate(zip(texts, rows[data.label], strict=True))
            if not is_blank(label) and None not in text and any(part.strip() for part in text)
        ]
        first += len(texts)
        tally.dropped += len(texts) - len(kept)
        if not kept:
            continue
        sides = [list(side) for side in zip(*(text for text, _ in kept), strict=True)]
        encoded = tokenizer(*sides, verbose=False)
        for index, (text, label) in enumerate(kept):
            one = {name: encoded[name][index] for name in encoded}
            if len(one["input_ids"]) > recipe.sequence_length:
                tally.cut += 1
                one = dict(tokenizer(*text, truncation=True, max_length=recipe.sequence_length))
            ids = list(one["input_ids"])
            yield Labelled(ids, _segments(one, len(ids)), [label])


def _segments(encoded: dict[str, Any], length: int) -> list[int]:
    types = encoded.get("token_type_ids")
    return [1] * length if types is None else [int(kind) + 1 for kind in types]


def check_lengths(split: SplitInput, row: int, words: Sequence[Any], tags: Sequence[Any]) -> None:
    """Refuses a row whose numbers of words and tags differ."""
    if len(words) != len(tags):
        raise UsageError(
            f"{row_of(split, row)}: {len(words)} words and {len(tags)} tags.",
            "Each word needs one tag: look at the two columns, or correct the row and stage it "
            "again.",
        )


def _sentences(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: Mapping[Any, int], tally: Tally
) -> Iterator[Labelled]:
    data = recipe.dataset
    if not tokenizer.is_fast:
        raise UsageError(
            f"{recipe.task}: the tokenizer in {tokenizer.name_or_path} cannot say which word its "
            "tokens belong to.",
            "Stage a model whose repository has tokenizer.json.",
        )
    space = " " if needs_space(tokenizer) else ""
    first = 0
    for rows in columns(recipe.split, [data.words, data.tags], recipe.limit):
        kept = []
        for row, (words, tags) in enumerate(zip(rows[data.words], rows[data.tags], strict=True)):
            if not words or tags is None or any(map(is_blank, tags)):
                tally.dropped += 1
                continue
            check_lengths(recipe.split, first + row, words, tags)
            spaced = [f"{space if place else ''}{word or ''}" for place, word in enumerate(words)]
            classes = [_class(tag, number, recipe, first + row) for tag in tags]
            kept.append((spaced, classes))
        first += len(rows[data.tags])
        if not kept:
            continue
        encoded = tokenizer(
            [words for words, _ in kept],
            is_split_into_words=True,
            truncation=True,
            max_length=recipe.sequence_length,
            verbose=False,
        )
        for index, (words, tags) in enumerate(kept):
            places = encoded.word_ids(index)
            last = max((place for place in places if place is not None), default=-1)
            # The last words of a row can have no token of their own: white space.
            lost = sum(1 for word in words[last + 1 :] if word.strip())
            tally.cut += bool(lost)
            tally.cut_words += lost
            one = {name: encoded[name][index] for name in encoded}
            ids = list(one["input_ids"])
            yield Labelled(ids, _segments(one, len(ids)), at_first_tokens(places, tags))


def at_first_tokens(places: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """Returns the class of each token: its word's, if it is the word's first. Pure.

    Args:
        places: for each token the number of its word; None: a special token.
        tags: the class of each word.
    """
    labels, before = [], None
    for place in places:
        is_first = place is not None and place != before
        labels.append(tags[place] if is_first and place is not None else IGNORED)
        before = place
    return labels


def needs_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether words after the first need a space to be tokenised as they are within a text.

    Byte-level tokenizers (GPT-2, RoBERTa, Llama 3) know a word by the space before it. They are
    asked what they do, because their files say it in many ways.
    """

    def ids(words: list[str] | str) -> Any:
        split = not isinstance(words, str)
        return tokenizer(words, is_split_into_words=split, add_special_tokens=False)["input_ids"]

    in_text = ids("is is")
    return bool(ids(["is", "is"]) != in_text and ids(["is", " is"]) == in_text)
