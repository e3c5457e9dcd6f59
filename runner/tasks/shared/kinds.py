"""The two kinds of tasks on texts: those whose samples are sequences of documents, and those that
learn classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner.config.run_config import RunConfig
from runner.config.task_keys import Column, is_integer, is_text
from runner.data import sequences
from runner.data.recipe import Recipe
from runner.data.store import IGNORED, LabelledRows, Rows, Sample, SamplePlace, StoreFacts
from runner.data.table import listed, read_classes
from runner.data.tokenizing import Tokenizer, id_type, load_tokenizer
from runner.from_stage import UsageError, human_count
from runner.inputs import ModelInput
from runner.tasks.shared.task import Batch, Objective, Task

TEXT = Column(
    "text",
    is_text,
    usual=("text", "content"),
    unlikely=lambda values: -sum(map(len, values)),  # the longest texts are the text
)


class DocumentTask(Task):
    """A task on a column of texts; a document is one of them."""

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        if recipe.documents == "joined":
            return sequences.joined(recipe, self.frame)
        return sequences.whole(recipe, sequences.pieces(self.frame), sequences.empty_rows)


class LanguageObjective(Objective[Rows]):
    """The loss over a vocabulary, except what is predicted: a subclass has `collate`.

    Args:
        auto: the class of transformers that loads the model.
        config: the run file, with its precision decided.
        model: the bundle's model.
    """

    rows = staticmethod(Rows.of)

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput) -> None:
        from runner.training.components.language import first_position
        from runner.training.loading import load_model

        self.model, self.note = load_model(auto, config, model)
        self._first = first_position(self.model.config)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss and perplexity of the validation split."""
        mean = sums[0] / count if count else math.nan  # nothing to predict in texts of one token
        return {"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 700.0))}


if TYPE_CHECKING:
    from torch import nn


# First parts of the names of heads (transformers' modeling files): drawn anew for other classes.
HEADS = ("classifier", "score", "classification_head", "logits_proj", "sequence_summary")


def unlike_classes(values: Sequence[Any]) -> tuple[bool, int]:
    """A measure of how little the values of a column look like classes.

    All different: they are numbers of rows, or texts. All alike: there is nothing to learn.
    """
    kinds = len(set(values))
    return kinds < 2 or kinds == len(values) > 2, kinds


def count_from_zero(kind: str) -> str:
    """The hint for a column whose Arrow type is no class."""
    return " Number the classes from 0 when you make the dataset."


LABEL = Column(
    "integers",
    is_integer,
    usual=("label", "labels", "fine_label", "class", "category", "target", "sentiment"),
    unlikely=unlike_classes,
    hint=count_from_zero,
)


class ClassTask(Task):
    """A task that learns a class for each text, or for each word: a subclass has `encoded`."""

    of_words = False
    """Whether each word has a class, not each text."""

    def encoded(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        numbers: dict[Any, int],
        tally: Counter[str],
    ) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Yields what the tokenizer returns for each row, and the labels of its tokens, or its own.

        A sample that is longer than a sequence is cut.

        Args:
            recipe: what to read.
            tokenizer: of the model.
            numbers: value of the column of classes -> the number of its class.
            tally: counts rows: `dropped` (no text or no label), `cut`; and `cut_words`.

        Raises:
            UsageError: a row cannot be read.
        """
        raise NotImplementedError

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        """Yields the samples of a split in its order: `ids`, `documents` and `labels`."""
        import numpy as np

        tokenizer = load_tokenizer(recipe.model)
        classes, tally = read_classes(recipe), Counter[str]()
        dtype = id_type(tokenizer)
        for one, labels in self.encoded(recipe, tokenizer, classes.numbers, tally):
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
        what, lost = human_count(tally["samples"], "text"), ""
        if self.of_words:
            words = human_count(tally["words"], "word")
            what = f"{human_count(tally['samples'], 'sentence')}, {words}"
            lost = f", {human_count(tally['cut_words'], 'word')} lost"
        notes = []
        if tally["dropped"]:
            dropped = human_count(tally["dropped"], "row")
            notes.append(f"{dropped} left out: no text or no label")
        if tally["cut"]:
            notes.append(f"{tally['cut']} cut to {recipe.sequence_length} tokens{lost}")
        return StoreFacts(
            recipe.to_json(),
            f"{what} in {len(classes.names)} classes: {listed(classes.names)}",
            notes,
            warning=self.doubt(recipe, classes, tally["dropped"]),
            class_names=classes.names,
            class_kind=classes.kind,
        )

    def check_tokenizer(self, config: Any, inputs: Any, tokenizer: Any) -> list[str]:
        """Any tokenizer will do: it puts its own special tokens around a text."""
        return []


class ClassObjective(Objective[LabelledRows]):
    """The loss over the classes of texts or of words. A head for another number of them is new.

    Args:
        auto: the class of transformers that loads the model.
        config: the run file, with its precision decided.
        model: the bundle's model.
        facts: of the training store; its classes are those of all stores.
        settings: values that replace those of config.json.
    """

    rows = staticmethod(LabelledRows.of)

    def __init__(
        self, auto: Any, config: RunConfig, model: ModelInput, facts: StoreFacts, **settings: Any
    ) -> None:
        from runner.training.components.classify import Classify, padding_id
        from runner.training.loading import load_model

        tokenizer = load_tokenizer(model)
        self.names = facts.class_names
        self._padding = padding_id(tokenizer, model)
        self._has_segments = "token_type_ids" in tokenizer.model_input_names
        self.model, origin = load_model(
            auto,
            config,
            model,
            fresh=HEADS,
            **numbered(self.names),
            pad_token_id=self._padding,
            **settings,
        )
        self.module: nn.Module = Classify(self.model, len(self.names), config.label_smoothing)
        self.note = f"{origin}; {len(self.names)} classes"

    def collate(self, rows: LabelledRows, samples: list[SamplePlace]) -> Batch:
        """`labels`: int64 (number,), or (number, longest) with -100 where no word begins.

        Nothing is random.
        """
        import torch

        from runner.training.components.language import position_inputs

        documents = torch.from_numpy(rows.documents)
        ids = torch.from_numpy(rows.ids).masked_fill(documents == 0, self._padding)
        batch = {"input_ids": ids, "labels": torch.from_numpy(rows.labels)}
        if self._has_segments:
            batch["token_type_ids"] = (documents - 1).clamp(min=0)
        return batch | position_inputs(rows, 0)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, accuracy and F1 of the validation split."""
        return scores(sums, count, len(self.names))


def numbered(names: Sequence[str]) -> dict[str, Any]:
    """The values of config.json that name the classes 0, 1, ..."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def f1(correct: float, predicted: float, true: float) -> float:
    """The harmonic mean of precision and recall; 0 where there is nothing (as scikit-learn)."""
    return 2 * correct / (predicted + true) if predicted + true else 0.0


def scores(sums: list[float], count: float, num_classes: int) -> dict[str, float]:
    """Loss, accuracy and F1 from the sums of `Classify`.

    `validation_f1_macro` is the mean over the classes that occur or are predicted. With two
    classes, `validation_f1` is that of class 1, as GLUE has it.
    """
    loss, right, *rest = sums
    per_class = [rest[n * num_classes : (n + 1) * num_classes] for n in range(3)]
    each = [f1(*numbers) for numbers in zip(*per_class, strict=True)]
    seen = [value for value, p, t in zip(each, *per_class[1:], strict=True) if p or t]
    found = {
        "validation_loss": loss / count if count else math.nan,
        "validation_accuracy": right / count if count else math.nan,
        "validation_f1_macro": sum(seen) / len(seen) if seen else 0.0,
    }
    return found | ({"validation_f1": each[1]} if num_classes == 2 else {})
