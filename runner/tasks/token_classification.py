"""Token classification: one class for each word, at its first token.

The other tokens of a word, and special tokens, have none. Where the classes are tags of spans
(`B-PER`, `I-PER`, `O`), precision, recall and F1 of whole spans are measured, as CoNLL's evaluation
and seqeval do: a span is right if its begin, its end and its type are. Spans are counted on the
device, as sums that can be added over batches and ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.config.run_config import RunConfig
from runner.config.task_keys import Column, in_lists, is_class, is_text
from runner.data.recipe import Recipe
from runner.data.store import IGNORED, LabelledRows, StoreFacts
from runner.data.table import MOST_ROWS, class_of, columns, first_batches, is_blank, row_of
from runner.data.tokenizing import Tokenizer
from runner.from_stage import UsageError
from runner.inputs import ModelInput, SplitInput
from runner.tasks.shared.kinds import ClassObjective, ClassTask, f1

if TYPE_CHECKING:
    import torch

_SPAN = re.compile(r"([BIES])-(.+)")
_OUTSIDE = 4  # the place of `O`, after those of B, I, E and S
# (place of the tag before, place of a tag) -> whether a span begins or ends between them, where
# both have one type (sigNLL's conlleval.pl, startOfChunk and endOfChunk).
_BEGINS = frozenset({(0, 0), (1, 0), (2, 0), (3, 0)} | {(n, 3) for n in range(4)}
                    | {(2, 1), (2, 2), (3, 1), (3, 2)})  # fmt: skip

MODEL_TYPES = """
    albert apertus arcee axk1 axk2 bert big_bird biogpt bloom bros camembert canine convbert
    data2vec-text deberta deberta-v2 deepseek_v3 diffllama distilbert electra ernie esm esmc
    eurobert exaone4 falcon flaubert fnet funnel gemma gemma2 glm glm4 gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_oss gte helium ibert jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3
    lilt llama longformer luke markuplm megatron-bert minimax ministral ministral3 mistral
    mistral4 mixtral mobilebert modernbert modernvbert mpnet mpt mra mt5 nemotron nomic_bert
    nystromformer openai_privacy_filter persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_asr
    qwen3_moe qwen3_next rembert roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3
    squeezebert stablelm starcoder2 t5 t5gemma t5gemma2 ultrabert ultravbert umt5 xlm xlm-roberta
    xlm-roberta-xl xlnet xmod yoso
"""


class TokenClassification(ClassTask):
    """A class for each word."""

    of_words = True

    def check_rows(self, recipe: Recipe) -> None:
        """Compares the numbers of words and of tags in the first rows.

        Raises:
            UsageError: they differ in a row.
        """
        import pyarrow.compute as pc

        names = [recipe.dataset.words, recipe.dataset.tags]
        most = min(MOST_ROWS, recipe.split.rows if recipe.limit is None else recipe.limit)
        for first, batch in first_batches(recipe.split, names):
            batch = batch.slice(0, max(0, most - first))
            lengths = [pc.list_value_length(batch.column(name)) for name in names]
            row = pc.index(pc.not_equal(*lengths), True).as_py()
            if row >= 0:
                values = (batch.column(name)[row].as_py() for name in names)
                check_lengths(replace(recipe.split, part=None), first + row, *values)

    def encoded(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        numbers: dict[Any, int],
        tally: Counter[str],
    ) -> Iterator[tuple[dict[str, Any], list[int]]]:
        data = recipe.dataset
        if not tokenizer.is_fast:
            raise UsageError(
                f"{recipe.task}: the tokenizer in {tokenizer.name_or_path} cannot say which word "
                "its tokens belong to.",
                "Stage a model whose repository has tokenizer.json.",
            )
        space = " " if needs_space(tokenizer) else ""
        first = 0
        for rows in columns(recipe.split, [data.words, data.tags], recipe.limit):
            kept = []
            pairs = zip(rows[data.words], rows[data.tags], strict=True)
            for row, (words, tags) in enumerate(pairs, first):
                if not words or tags is None or any(map(is_blank, tags)):
                    tally["dropped"] += 1
                    continue
                check_lengths(recipe.split, row, words, tags)
                spaced = [
                    f"{space if place else ''}{word or ''}" for place, word in enumerate(words)
                ]
                kept.append((spaced, [class_of(tag, numbers, recipe.split, row) for tag in tags]))
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

    def objective(self, config: RunConfig, model: ModelInput, facts: StoreFacts) -> WordObjective:
        return WordObjective(self.model_class(), config, model, facts)


TASK = TokenClassification(
    name="token-classification",
    place=5,
    auto="AutoModelForTokenClassification",
    table="TOKEN_CLASSIFICATION",
    model_types=frozenset(MODEL_TYPES.split()),
    pipeline="token-classification",
    example="bert-conll2003.yaml",
    reads={
        "words": Column("lists of texts", in_lists(is_text), usual=("tokens", "words")),
        "tags": Column(
            "lists of integers or texts",
            in_lists(is_class),
            usual=("ner_tags", "tags", "labels", "pos_tags"),
        ),
    },
    chosen=("words", "tags"),
    class_key="tags",
)


def check_lengths(split: SplitInput, row: int, words: Sequence[Any], tags: Sequence[Any]) -> None:
    """Refuses a row whose numbers of words and tags differ."""
    if len(words) != len(tags):
        raise UsageError(
            f"{row_of(split, row)}: {len(words)} words and {len(tags)} tags.",
            "Each word needs one tag: look at the two columns, or correct the row and stage it "
            "again.",
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


def needs_space(tokenizer: Tokenizer) -> bool:
    """Whether words after the first need a space to be tokenised as they are within a text.

    Byte-level tokenizers (GPT-2, RoBERTa, Llama 3) know a word by the space before it. They are
    asked what they do, because their files say it in many ways.
    """

    def ids(words: list[str] | str) -> Any:
        split = not isinstance(words, str)
        return tokenizer(words, is_split_into_words=split, add_special_tokens=False)["input_ids"]

    in_text = ids("is is")
    return bool(ids(["is", "is"]) != in_text and ids(["is", " is"]) == in_text)


class WordObjective(ClassObjective):
    """The classes of words; of tags of spans, the spans too."""

    rows = staticmethod(LabelledRows.of_words)

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput, facts: StoreFacts) -> None:
        from runner.training.components.classify import Classify

        super().__init__(auto, config, model, facts)
        self._has_spans = are_spans(self.names)
        if self._has_spans:
            spans = Tags(self.names).count
            self.module = Classify(self.model, len(self.names), config.label_smoothing, more=spans)
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


class Tags:
    """Counts the spans of rows of tags.

    Args:
        names: of the tags.
    """

    def __init__(self, names: Sequence[str]) -> None:
        import torch

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
        import torch

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
        import torch

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
