"""Token classification: one class for each word, at its first token.

Where the classes are tags of spans (`B-PER`, `I-PER`, `O`), precision, recall and F1 of whole spans
are measured, as CoNLL's evaluation and seqeval do: a span is right if its begin, its end and its
type are. Spans are counted on the device, as sums that can be added over batches and ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from runner.config.run_config import RunConfig
from runner.data.store import Facts
from runner.inputs import ModelInput
from runner.training.tasks.base import IGNORED
from runner.training.tasks.classification import Classification, Classify, f1

_SPAN = re.compile(r"([BIES])-(.+)")
_OUTSIDE = 4  # the place of `O`, after those of B, I, E and S
# (place of the tag before, place of a tag) -> whether a span begins or ends between them, where
# both have one type (sigNLL's conlleval.pl, startOfChunk and endOfChunk).
_BEGINS = frozenset({(0, 0), (1, 0), (2, 0), (3, 0)} | {(n, 3) for n in range(4)}
                    | {(2, 1), (2, 2), (3, 1), (3, 2)})  # fmt: skip


class TokenClassification(Classification):
    """The task token-classification, for models of `AutoModelForTokenClassification`."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Facts) -> None:
        from transformers import AutoModelForTokenClassification

        super().__init__(AutoModelForTokenClassification, config, model, facts)
        self._has_spans = are_spans(self.names)
        if self._has_spans:
            self.module = ClassifySpans(self.model, self.names, config.label_smoothing)
        what = "spans" if self._has_spans else "words alone: the classes are no tags of spans"
        self.note = f"{self.note}; measured by {what}"

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss and accuracy of the words; precision, recall and F1 of spans, or F1 of classes."""
        number = len(self.names)
        found = super().metrics(sums[: 2 + 3 * number], count)
        if not self._has_spans:
            return found
        right, predicted, true = sums[-3:]
        return {
            "validation_loss": found["validation_loss"],
            "validation_accuracy": found["validation_accuracy"],
            "validation_precision": right / predicted if predicted else 0.0,
            "validation_recall": right / true if true else 0.0,
            "validation_f1": f1(right, predicted, true),
        }


def are_spans(names: Sequence[str]) -> bool:
    """Whether classes are tags of spans: `O`, and others that begin with B-, I-, E- or S-."""
    others = [name for name in names if name != "O"]
    return bool(others) and all(_SPAN.fullmatch(name) for name in others)


class ClassifySpans(Classify):
    """As `Classify`; its sums have three more: spans that are right, predicted, and true.

    Args:
        model: the transformers model.
        names: of the classes, for which `are_spans` is true.
        smoothing: of the labels, in training.
    """

    def __init__(self, model: object, names: Sequence[str], smoothing: float = 0.0) -> None:
        super().__init__(model, len(names), smoothing)
        self._tags = Tags(names)

    def measures(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As in `Classify`, and the spans."""
        words = super().measures(predicted, labels)
        return torch.cat([words, self._tags.count(predicted, labels).float()])


class Tags:
    """Counts the spans of rows of tags.

    Args:
        names: of the tags.
    """

    def __init__(self, names: Sequence[str]) -> None:
        parts = [_SPAN.fullmatch(name) for name in names]
        kinds = sorted({part[2] for part in parts if part})
        places = ["BIES".index(part[1]) if part else _OUTSIDE for part in parts]
        # The last tag fills rows up: it is outside of every span.
        self._place = torch.tensor([*places, _OUTSIDE])
        self._kind = torch.tensor([kinds.index(p[2]) + 1 if p else 0 for p in parts] + [0])
        self._begins = torch.zeros(5, 5, dtype=torch.bool)
        for before, after in _BEGINS:
            self._begins[before, after] = True

    def count(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Spans that are right, predicted, and true: int64 (3,).

        Args:
            predicted: int64 (rows, longest): classes.
            labels: of the same shape; words are where it is not `IGNORED`.
        """
        if self._place.device != labels.device:  # once: each copy to a GPU waits for it
            self._place, self._kind, self._begins = (
                table.to(labels.device) for table in (self._place, self._kind, self._begins)
            )
        # The words of each row side by side, then the filling.
        order = (labels == IGNORED).to(torch.int8).argsort(dim=1, stable=True)
        is_word = labels.gather(1, order) != IGNORED
        filling = len(self._place) - 1
        guess, truth = (
            torch.where(is_word, tags.gather(1, order), filling) for tags in (predicted, labels)
        )
        begins, kinds, ends = self._spans(guess)
        begins_, kinds_, ends_ = self._spans(truth)
        right = begins & begins_ & (kinds == kinds_) & (ends == ends_)
        return torch.stack([right.sum(), begins.sum(), begins_.sum()])

    def _spans(self, tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whether a span begins at a place, its type, and where the next tag outside it is."""
        place, kind = self._place[tags], self._kind[tags]
        before = torch.nn.functional.pad(place, (1, 0), value=_OUTSIDE)[:, :-1]
        changes = kind != torch.nn.functional.pad(kind, (1, 0))[:, :-1]
        cuts = self._begins[before, place] | changes
        begins = cuts & (kind > 0)
        # A span ends before the next cut; a row that is full ends there.
        length = tags.shape[1]
        where = torch.arange(length, device=tags.device).expand_as(tags)
        following = torch.where(cuts, where, length).flip(1).cummin(1).values.flip(1)
        ends = torch.nn.functional.pad(following, (0, 1), value=length)[:, 1:]
        return begins, kind, ends
