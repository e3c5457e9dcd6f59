"""Encoded rows -> samples with classes. One that is longer than a sequence is cut, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from runner.config.tasks import task_named
from runner.data.classes import listed, read_classes
from runner.data.recipe import Recipe
from runner.data.store import IGNORED, Facts, Sample
from runner.data.tokenizing import id_type, load_tokenizer
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode: TypeAlias = (
    "Callable[[Recipe, PreTrainedTokenizerBase, dict[Any, int], Counter[str]], "
    "Iterator[tuple[dict[str, Any], list[int]]]]"
)
"""Yields what the tokenizer returns for a row, with the labels of its tokens, or its own label.

Its arguments are what to read, the tokenizer of the model, value of the column -> number of the
class, and the tally. It counts rows there: `dropped`, `cut`; and `cut_words`.
"""


def samples(
    recipe: Recipe, encode: Encode, *, of_words: bool = False
) -> Generator[Sample, None, Facts]:
    """Yields the samples of a split in its order: `ids`, `documents` and `labels`.

    Args:
        recipe: what to read.
        encode: reads it.
        of_words: whether each word has a class, not each sample.

    Raises:
        UsageError: a label is no class; a row has more tags than words, or fewer; the tokenizer
            does not say which word a token belongs to; or no row is left.
    """
    import numpy as np

    tokenizer = load_tokenizer(recipe.model)
    classes, tally = read_classes(recipe), Counter[str]()
    dtype = id_type(tokenizer)
    for one, labels in encode(recipe, tokenizer, classes.numbers, tally):
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
        warning=task_named(recipe.task).doubt(recipe, classes, tally["dropped"]),
        class_names=classes.names,
        class_kind=classes.kind,
    )
