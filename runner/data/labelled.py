"""Rows -> samples with classes: one class for each text, or one for each word.

A pair of texts is encoded as the tokenizer does it, with its own special tokens and token types. A
word's class is at its first token; the other tokens of the word, and special tokens, have none. A
sample that is longer than a sequence is cut, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner.data.classes import class_of, doubt, is_blank, listed, read_classes
from runner.data.recipe import Recipe
from runner.data.store import IGNORED, Facts, Sample
from runner.data.table import columns, row_of
from runner.data.tokenizing import id_type, load_tokenizer
from runner.errors import UsageError, human_count
from runner.inputs import SplitInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def samples(recipe: Recipe) -> Generator[Sample, None, Facts]:
    """Yields the samples of a split in its order: `ids`, `documents` and `labels`.

    Raises:
        UsageError: a label is no class; a row has more tags than words, or fewer; the tokenizer
            does not say which word a token belongs to; or no row is left.
    """
    import numpy as np

    tokenizer = load_tokenizer(recipe.model)
    classes, tally = read_classes(recipe), Counter[str]()
    of_words = recipe.task == "token-classification"
    encoded = (_sentences if of_words else _texts)(recipe, tokenizer, classes.numbers, tally)
    dtype = id_type(tokenizer)
    for one, labels in encoded:
        ids = np.array(one["input_ids"], dtype)
        kinds = np.array(one.get("token_type_ids", [0] * len(ids)), np.uint16)
        tally["samples"] += 1
        tally["words"] += sum(label != IGNORED for label in labels)
        yield {"ids": ids, "documents": kinds + 1, "labels": np.array(labels, np.int32)}
    if not tally["words"]:
        raise UsageError(
            f"split `{recipe.split.name}`: nothing to train on: "
            f"{human_count(tally['dropped'], 'row')} without a text or a label.",
            "Look at the columns, or choose another split.",
        )
    what = human_count(tally["samples"], "sentence" if of_words else "text")
    words = f", {human_count(tally['words'], 'word')}" if of_words else ""
    lost = f", {human_count(tally['cut_words'], 'word')} lost" if of_words else ""
    notes = {
        f"{human_count(tally['dropped'], 'row')} left out: no text or no label": tally["dropped"],
        f"{tally['cut']} cut to {recipe.sequence_length} tokens{lost}": tally["cut"],
    }
    return Facts(
        recipe.to_json(),
        f"{what}{words} in {len(classes.names)} classes: {listed(classes.names)}",
        [note for note, number in notes.items() if number],
        warning=doubt(recipe, classes, tally["dropped"]),
        class_names=classes.names,
        class_kind=classes.kind,
    )


def _texts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, numbers: dict[Any, int], tally: Counter[str]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    data = recipe.dataset
    names = list(recipe.dataset.columns(recipe.task).values())
    first = 0
    for rows in columns(recipe.split, list(dict.fromkeys(names)), recipe.limit):
        texts = list(zip(*(rows[name] for name in names[:-1]), strict=True))
        kept = [
            (text, class_of(label, numbers, recipe.split, first + row))
            for row, (text, label) in enumerate(zip(texts, rows[data.label], strict=True))
            if not is_blank(label) and None not in text and any(part.strip() for part in text)
        ]
        first += len(texts)
        tally["dropped"] += len(texts) - len(kept)
        if not kept:
            continue
        sides = [list(side) for side in zip(*(text for text, _ in kept), strict=True)]
        encoded = tokenizer(*sides, verbose=False)
        for index, (text, label) in enumerate(kept):
            one = {name: encoded[name][index] for name in encoded}
            if len(one["input_ids"]) > recipe.sequence_length:
                tally["cut"] += 1
                one = dict(tokenizer(*text, truncation=True, max_length=recipe.sequence_length))
            yield one, [label]


def check_lengths(split: SplitInput, row: int, words: Sequence[Any], tags: Sequence[Any]) -> None:
    """Refuses a row whose numbers of words and tags differ."""
    if len(words) != len(tags):
        raise UsageError(
            f"{row_of(split, row)}: {len(words)} words and {len(tags)} tags.",
            "Each word needs one tag: look at the two columns, or correct the row and stage it "
            "again.",
        )


def _sentences(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, numbers: dict[Any, int], tally: Counter[str]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
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
                tally["dropped"] += 1
                continue
            check_lengths(recipe.split, first + row, words, tags)
            spaced = [f"{space if place else ''}{word or ''}" for place, word in enumerate(words)]
            kept.append(
                (spaced, [class_of(tag, numbers, recipe.split, first + row) for tag in tags])
            )
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
            tally["cut"] += bool(lost)
            tally["cut_words"] += lost
            yield (
                {name: encoded[name][index] for name in encoded},
                at_first_tokens(places, tags),
            )


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
