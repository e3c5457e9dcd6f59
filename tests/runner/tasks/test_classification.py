"""Accuracy and F1 are scikit-learn's, F1 of spans is seqeval's, whatever the batches are."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from runner.tasks.shared.kinds import scores
from runner.tasks.token_classification import Tags, are_spans
from runner.training.components.classify import Classify, padding_id

SPANS = ["O", *(f"{place}-{kind}" for place in "BIES" for kind in ("PER", "LOC"))]


def test_accuracy_and_f1_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, f1_score

    random = torch.Generator().manual_seed(0)
    for classes in (2, 5):
        truth, guess = torch.randint(0, classes, (2, 64), generator=random)
        truth[:7] = -100
        module = Classify(torch.nn.Identity(), classes)
        parts = [module.measures(g, t) for g, t in zip(guess.split(9), truth.split(9), strict=True)]
        sums = [0.0, *torch.stack(parts).sum(0).tolist()]
        found = scores(sums, 57, classes)
        true, said = truth[7:].numpy(), guess[7:].numpy()
        assert found["validation_accuracy"] == pytest.approx(accuracy_score(true, said))
        macro = f1_score(true, said, average="macro")
        assert found["validation_f1_macro"] == pytest.approx(macro)
        if classes == 2:
            assert found["validation_f1"] == pytest.approx(f1_score(true, said))


def random_tags() -> tuple[list[list[str]], list[list[str]]]:
    random = Random(0)
    rows = [[random.choice(SPANS) for _ in range(random.randrange(1, 12))] for _ in range(200)]
    guess = [[t if random.random() < 0.6 else random.choice(SPANS) for t in row] for row in rows]
    return rows, guess


def test_spans_are_those_of_seqeval() -> None:
    """On 200 rows of any tags: seqeval 1.2.2 finds these numbers of right, predicted and true."""
    rows, guess = random_tags()
    longest = 2 * max(map(len, rows)) + 1  # second tokens of words, and padding, between them
    truth, said = torch.full((200, longest), -100), torch.zeros(200, longest, dtype=torch.int64)
    for number, (row, other) in enumerate(zip(rows, guess, strict=True)):
        for place, (tag, guessed) in enumerate(zip(row, other, strict=True)):
            truth[number, 2 * place + 1] = SPANS.index(tag)
            said[number, 2 * place + 1] = SPANS.index(guessed)
    assert Tags(SPANS).count(said, truth).tolist() == SEQEVAL


SEQEVAL = [675, 958, 965]


@pytest.mark.parametrize(
    ("names", "spans"),
    [(SPANS, True), (["O", "B-x"], True), (["NN", "VB", "O"], False), (["O"], False)],
)
def test_tags_of_spans_are_known_by_their_names(names: list[str], spans: bool) -> None:
    assert are_spans(names) == spans


def test_a_decoder_without_a_padding_token_is_padded_with_its_end_of_text() -> None:
    tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=7)
    assert padding_id(tokenizer, SimpleNamespace(settings={})) == 7  # type: ignore[arg-type]
    padded = SimpleNamespace(settings={"pad_token_id": 3})
    assert padding_id(tokenizer, padded) == 3  # type: ignore[arg-type]
