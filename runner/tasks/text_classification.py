"""Text classification: one class for each text, or for each pair of texts.

A pair is encoded as the tokenizer does it, with its own special tokens and token types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from runner.config.run_config import RunConfig
from runner.config.task_keys import Column, is_class, is_text
from runner.data.recipe import Recipe
from runner.data.store import StoreFacts
from runner.data.table import Classes, class_of, is_blank, rows_of
from runner.data.table import columns as read_columns
from runner.data.tokenizing import Tokenizer
from runner.inputs import ModelInput, SplitInput
from runner.tasks.shared.kinds import LABEL, TEXT, ClassObjective, ClassTask, count_from_zero
from runner.tasks.shared.task import Chosen, choose_columns

GLUE = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
"""The columns of GLUE's configurations (arXiv:1804.07461), pairs before single texts."""

FEW = 10  # of fewer texts, each can have a class of its own

MODEL_TYPES = """
    albert arcee axk1 axk2 bart bert big_bird bigbird_pegasus biogpt bloom camembert canine
    cohere_compass_text convbert ctrl data2vec-text deberta deberta-v2 deepseek_v2 deepseek_v3
    diffllama distilbert doge electra ernie esm esmc eurobert exaone4 falcon flaubert fnet funnel
    gemma gemma2 gemma3 gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss
    gptj gte helium hunyuan_v1_dense hunyuan_v1_moe ibert jamba jetmoe jina_embeddings_v3 layoutlm
    layoutlmv2 layoutlmv3 lilt llama longformer luke markuplm mbart megatron-bert minicpm3 minimax
    ministral ministral3 mistral mistral4 mixtral mobilebert modernbert modernbert-decoder
    modernvbert mpnet mpt mra mt5 mvp nemotron nomic_bert nystromformer olmo olmo2 olmo3
    openai-gpt opt perceiver persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5
    qwen3_5_text qwen3_moe qwen3_next reformer rembert roberta roberta-prelayernorm roc_bert
    roformer seed_oss smollm3 squeezebert stablelm starcoder2 t5 t5gemma t5gemma2 tapas ultrabert
    ultravbert umt5 xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso zamba zamba2
"""


def _hint(kind: str) -> str:
    if kind in ("float", "double"):
        return " Numbers with fractions are scores: to learn them is no task here."
    return count_from_zero(kind)


class TextClassification(ClassTask):
    """A class for each text."""

    def hint_for_missing(self, key: str, columns: Mapping[str, str]) -> str:
        """The columns of GLUE, if the split has them."""
        found = texts_in(columns) if key == "text" else ()
        keys = ", ".join(f"{k}: {c}" for k, c in zip(("text", "pair"), found, strict=False))
        return f" Set {keys}." if keys else ""

    def choose(self, split: SplitInput) -> Chosen:
        """A column `text` comes before those of GLUE."""
        known = {} if "text" in split.columns else texts_in(split.columns)
        pair = dict(zip(("text", "pair"), known, strict=False))
        return choose_columns({key: self.reads[key] for key in self.chosen}, split, pair)

    def encoded(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        numbers: dict[Any, int],
        tally: Counter[str],
    ) -> Iterator[tuple[dict[str, Any], list[int]]]:
        names = list(self.columns(recipe.dataset).values())
        first = 0
        for rows in read_columns(recipe.split, list(dict.fromkeys(names)), recipe.limit):
            texts = list(zip(*(rows[name] for name in names[:-1]), strict=True))
            kept = [
                (text, class_of(label, numbers, recipe.split, first + row))
                for row, (text, label) in enumerate(zip(texts, rows[names[-1]], strict=True))
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

    def doubt(self, recipe: Recipe, classes: Classes, dropped: int = 0) -> str:
        """Whether nearly each text has a class of its own.

        The classes are those of all rows of the files, so they are compared with all of these rows.
        """
        texts = rows_of(recipe.split) - dropped
        if classes.kind == "names" or texts < FEW or len(classes.names) * 2 <= texts:
            return ""
        return (
            f"split `{recipe.split.name}`: {len(classes.names)} classes in {texts} texts, nearly "
            f"one for each: is `dataset.label: {recipe.dataset.label}` the right column?"
        )

    def objective(self, config: RunConfig, model: ModelInput, facts: StoreFacts) -> ClassObjective:
        kind = "single_label_classification"
        return ClassObjective(self.model_class(), config, model, facts, problem_type=kind)


TASK = TextClassification(
    name="text-classification",
    place=4,
    auto="AutoModelForSequenceClassification",
    table="SEQUENCE_CLASSIFICATION",
    model_types=frozenset(MODEL_TYPES.split()),
    pipeline="text-classification",
    example="bert-mrpc.yaml",
    reads={
        "text": TEXT,
        "pair": Column("text", is_text),
        "label": replace(LABEL, what="integers or texts", fits=is_class, hint=_hint),
    },
    chosen=("text", "label"),
    class_key="label",
)


def texts_in(columns: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the columns of the text, or of the pair of texts, if they have names of GLUE."""
    known = (pair for pair in GLUE if all(is_text(columns.get(name, "")) for name in pair))
    return next(known, ())
