"""Masked language modelling (BERT, arXiv:1810.04805, 3.1): `masked_share` of the tokens are
predicted; with `whole_words`, all tokens of a word or none.

Of these, 80 % become [MASK], 10 % another token, and 10 % stay. The choice differs each epoch and
comes from the sample's own random numbers. Where the model's head can be called alone, logits are
computed only at the predicted positions: over a vocabulary of 30,000 that saves most of the memory
and much of the time.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from runner.config.run_config import RunConfig
from runner.data.sequences import Frame
from runner.data.store import IGNORED, Rows, SamplePlace, sample_rng
from runner.data.tokenizing import Tokenizer, load_tokenizer, word_begins
from runner.from_stage import UsageError
from runner.inputs import Inputs, ModelInput
from runner.tasks.shared.kinds import TEXT, DocumentTask, LanguageObjective
from runner.tasks.shared.task import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Model type -> the attribute that holds the head (transformers' modeling files).
HEADS = {
    "bert": "cls",
    "roberta": "lm_head",
    "xlm-roberta": "lm_head",
    "camembert": "lm_head",
    "mpnet": "lm_head",
}

MODEL_TYPES = """
    albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert
    electra ernie esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm
    longformer luke mbart megatron-bert mobilebert modernbert modernvbert mpnet mra mvp neomme
    nomic_bert nystromformer perceiver reformer rembert roberta roberta-prelayernorm roc_bert
    roformer squeezebert tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl xmod yoso
"""


class MaskedLM(DocumentTask):
    """The hidden tokens of a document, from all others."""

    def frame(self, tokenizer: Tokenizer) -> Frame:
        """`[CLS] text [SEP] text ... [SEP]`, where the tokenizer has these."""
        if tokenizer.mask_token_id is None:
            raise UsageError(
                f"masked-lm: the tokenizer in {tokenizer.name_or_path} has no mask token.",
                "Use `task: causal-lm`, or a model such as BERT.",
            )
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return Frame([tokenizer.cls_token_id], tokenizer.sep_token_id, [tokenizer.sep_token_id])
        return super().frame(tokenizer)

    def check_tokenizer(self, config: RunConfig, inputs: Inputs, tokenizer: Tokenizer) -> list[str]:
        """With `whole_words`, it must mark where a word begins."""
        lines = super().check_tokenizer(config, inputs, tokenizer)
        if config.whole_words:
            word_begins(tokenizer)
        return lines

    def objective(self, config: RunConfig, model: ModelInput, facts: Any) -> MaskedObjective:
        return MaskedObjective(self.model_class(), config, model)


TASK = MaskedLM(
    name="masked-lm",
    place=1,
    auto="AutoModelForMaskedLM",
    table="MASKED_LM",
    model_types=frozenset(MODEL_TYPES.split()),
    pipeline="fill-mask",
    example="bert-large-deepspeed.yaml",
    reads={"text": TEXT},
    chosen=("text",),
    packing=("joined", "separate", "alone"),
    own_keys=("masked_share", "whole_words"),
    draws_tokens=True,  # in place of some that are hidden
)


class MaskedObjective(LanguageObjective):
    """The hidden tokens, for any model that `AutoModelForMaskedLM` loads."""

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput) -> None:
        import numpy as np

        from runner.training.components.language import Language

        tokenizer = load_tokenizer(model)
        self._seed, self._static = config.seed, config.compile
        self._share = config.masked_share
        self._begins = word_begins(tokenizer) if config.whole_words else None
        self._mask_id = int(tokenizer.mask_token_id or 0)
        self._vocabulary = len(tokenizer)
        self._special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        super().__init__(auto, config, model)
        kind = self.model.config.model_type
        self._head = HEADS.get(kind)
        head = attrgetter(self._head) if self._head else None
        self.module = Language(
            self.model, causal=False, head=head, smoothing=config.label_smoothing
        )
        self.logits_at_predictions = head is not None
        if head is None:  # it takes more memory and time
            self.note = f"{self.note}; logits at every position ({kind}: no known head)"

    def collate(self, rows: Rows, samples: list[SamplePlace]) -> Batch:
        """Draws the masks. `labels` is -100 where nothing is predicted; `guessed` says where
        something is.
        """
        import numpy as np
        import torch

        from runner.training.components.language import position_inputs

        ids = rows.ids.copy()
        labels = np.full_like(ids, IGNORED)
        for row, sample in enumerate(samples):
            # Without the padding: a sample gets the same mask, however far it is padded in its
            # batch.
            end = int((rows.documents[row] > 0).sum())
            self._mask(ids[row, :end], labels[row, :end], sample_rng(self._seed, sample))
        batch = {"input_ids": ids, "labels": labels}
        if self._head:
            batch["guessed"] = guessed_positions(labels, static=self._static, share=self._share)
        positions = position_inputs(rows, self._first)
        return {name: torch.from_numpy(array) for name, array in batch.items()} | positions

    def _mask(self, ids: Any, labels: Any, random: np.random.Generator) -> None:
        """Masks one sequence in place: int64 arrays of shape (sequence_length,)."""
        import numpy as np

        maskable = ~np.isin(ids, self._special)
        # The draw of its first token decides for a whole word.
        first = first_of_word(ids, maskable, self._begins)
        guessed = maskable & (random.random(len(ids))[first] < self._share)
        if not guessed.any() and maskable.any():
            guessed[first == first[random.choice(np.flatnonzero(maskable))]] = True
        labels[guessed] = ids[guessed]
        fate = random.random(len(ids))
        others = random.integers(0, self._vocabulary, len(ids))
        ids[guessed & (fate < 0.8)] = self._mask_id
        swapped = guessed & (fate >= 0.8) & (fate < 0.9)
        ids[swapped] = others[swapped]


def first_of_word(
    ids: NDArray[np.int64], maskable: NDArray[np.bool_], begins: NDArray[np.bool_] | None
) -> NDArray[np.int64]:
    """The place of the first token of each token's word: int64 (length,). Pure.

    Args:
        ids: int64 (length,).
        maskable: False at special tokens, which end a word and belong to none.
        begins: for each token id whether a word begins with it; None: each token is a word.
    """
    import numpy as np

    places = np.arange(len(ids))
    if begins is None:
        return places
    after_special = np.concatenate([[True], ~maskable[:-1]])
    is_first = begins[ids] | after_special | ~maskable
    return np.maximum.accumulate(np.where(is_first, places, 0))


def guessed_positions(
    labels: NDArray[np.int64], *, static: bool, share: float = 0.15
) -> NDArray[np.int64]:
    """The positions that have a label, in the flattened batch: int64 (number,), ascending.

    Args:
        labels: int64 (rows, longest).
        static: whether positions without a label follow, up to a number that in 97 of 100 batches
            depends only on the shape: `torch.compile` compiles again for each number. 32 more are
            added as often as needed.
        share: of the tokens that are guessed.
    """
    import numpy as np

    flat = labels.reshape(-1)
    positions = np.flatnonzero(flat != IGNORED)
    if not static:
        return positions
    usual = share * flat.size + 2 * math.sqrt(share * (1 - share) * flat.size)
    number = 32 * math.ceil(max(usual, len(positions)) / 32)
    others = np.flatnonzero(flat == IGNORED)[: number - len(positions)]
    return np.concatenate([positions, others])
