"""Instruction: predict each token of an answer from the question, and from those before it.

A row is a prompt with its response, a chat, or fills the columns of a format. The model and the
loss are those of causal-lm; `runner.data.instruction` writes the rows and marks the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from runner.config.chats import (
    ANSWERED,
    ASKED,
    KNOWN,
    OURS,
    Naming,
    format_columns,
    unknown_role,
)
from runner.config.columns import Column, is_integer, is_text
from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.data import instruction, tokens
from runner.data.recipe import Recipe
from runner.data.store import Facts, Sample
from runner.data.table import first_batches, row_of
from runner.errors import Lines, UsageError, Where, human_count
from runner.inputs import Inputs, SplitInput
from runner.tasks import causal_lm
from runner.tasks.shared.guess import Chosen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TALKS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "talk")
NO_TALKS = ("rejected", "prompt", "completion", "history", "tools")  # not the whole, or not good
BESIDE = ("input", "query", "context", "article", "passage")
"""What a question is about, in a column of its own, often without a text."""
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{%s}%s\n\n### Response:\n{%s}"
)


def _is_printable(kind: str) -> bool:
    return is_text(kind) or is_integer(kind) or kind in ("float", "double", "bool")


def _has_messages(kind: str) -> bool:
    return Naming.of(kind, {}, {}) is not None


class Instruction(causal_lm.CausalLM):
    """The answers to questions."""

    def columns(self, dataset: DatasetConfig) -> dict[str, str]:
        """A `format` has one key per column."""
        if dataset.messages:
            return {"messages": dataset.messages}
        if dataset.format is not None:
            return {f"format: {{{name}}}": name for name in format_columns(dataset.format)}
        return {"prompt": dataset.prompt or "", "response": dataset.response or ""}

    def expected(self, key: str, dataset: DatasetConfig) -> Column:
        """Messages have the keys that the run file names, if it names some."""
        if key != "messages" or not dataset.fields:
            return self.reads[key]
        names = [dataset.fields.get(name, name) for name in OURS]
        return Column(
            f"lists of {{{', '.join(names)}}}",
            lambda kind: Naming.of(kind, dataset.fields, {}) is not None,
        )

    def check_dataset(self, dataset: DatasetConfig, where: Where, lines: Lines) -> None:
        """Refuses a dataset of chats that does not say, in one way, what is asked and answered.

        Raises:
            UsageError: with file:line.
        """
        pair = [dataset.prompt, dataset.response]
        given = {
            "prompt and response": any(pair),
            "messages": dataset.messages,
            "format": dataset.format,
        }
        ways = [way for way, value in given.items() if value]
        if len(ways) != 1:
            both = f"`{'` and `'.join(ways)}` are both given"
            what = both if ways else "the dataset does not say what is asked"
            raise UsageError(
                f"{lines.place(*where)}: task instruction: {what}.",
                "Give one of: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN}, "
                "{format: 'text with {COLUMN}s'}.",
            )
        if any(pair) and not all(pair):
            missing = "response" if dataset.prompt else "prompt"
            raise UsageError(
                f"{lines.place(*where)}: `{missing}` is missing.", f"Add `{missing}: COLUMN`."
            )
        if dataset.messages is None and (dataset.fields or dataset.roles):
            key = "fields" if dataset.fields else "roles"
            raise UsageError(
                f"{lines.place(*where, key)}: `{key}` renames what `messages` have, and "
                "there is no `messages`.",
                f"Remove `{key}`, or give the column of the chats: messages: COLUMN",
            )

    def choose(self, split: SplitInput) -> Chosen:
        """Chooses a list of messages, or two texts of usual names, before texts of other names."""
        lists = [
            name
            for name in self.reads["messages"].fitting(split.columns)
            if name.casefold() not in NO_TALKS
        ]
        talks = sorted(lists, key=lambda name: (_rank(TALKS, name), name == "chosen"))
        is_usual = bool(talks) and talks[0].casefold() in TALKS
        texts = self.reads["prompt"].fitting(split.columns)
        asked, answered = (
            sorted((name for name in texts if name.casefold() in known), key=partial(_rank, known))
            for known in (ASKED, ANSWERED)
        )
        if not is_usual and asked and answered:
            beside = [name for name in texts if name.casefold() in BESIDE and name != asked[0]]
            if beside:
                more = "".join(f"\n\n### {name.capitalize()}:\n{{{name}}}" for name in beside)
                return Chosen({"format": ALPACA % (asked[0], more, answered[0])}, {}, ())
            others = {"prompt": asked[1:], "response": answered[1:]}
            return Chosen({"prompt": asked[0], "response": answered[0]}, others, ())
        if talks:
            return Chosen({"messages": talks[0]}, {"messages": talks[1:]}, ())
        return super().choose(split)

    def samples(self, recipe: Recipe) -> Generator[Sample, None, Facts]:
        return tokens.whole(recipe, instruction.documents, _left_out)

    def check_tokenizer(
        self, config: RunConfig, inputs: Inputs, tokenizer: PreTrainedTokenizerBase
    ) -> list[str]:
        """Says how rows become texts."""
        lines = super().check_tokenizer(config, inputs, tokenizer)
        writers = (
            instruction.Writer.of(d.settings, tokenizer, d.train.columns) for d in inputs.datasets
        )
        how = "; ".join(dict.fromkeys(writer.description for writer in writers))
        return [*lines, f"samples are written {how}"]

    def try_first_rows(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
        return instruction.try_first_rows(recipe, tokenizer)

    def check_rows(self, recipe: Recipe) -> None:
        """Compares the roles in the first chats with those that are known.

        Raises:
            UsageError: a role is not known.
        """
        import pyarrow.compute as pc
        from pyarrow import array

        name = recipe.dataset.messages
        kind = recipe.split.columns.get(name or "", "")
        naming = Naming.of(kind, recipe.dataset.fields, recipe.dataset.roles)
        if name is None or naming is None or not naming.is_strict:
            return
        for first, batch in first_batches(recipe.split, [name]):
            chats = batch.column(name)
            roles = pc.struct_field(pc.list_flatten(chats), naming.role)
            known = array([*naming.roles, *KNOWN], type=roles.type)
            place = pc.index(pc.is_in(roles, value_set=known), False).as_py()
            if place >= 0:
                row = first + pc.list_parent_indices(chats)[place].as_py()
                where = row_of(replace(recipe.split, part=None), row)
                raise unknown_role(where, str(roles[place].as_py()))


TASK = Instruction(
    name="instruction",
    place=3,
    example="neural-chat-qlora.yaml",
    reads={
        "prompt": Column("text", is_text, usual=ASKED),
        "response": Column("text", is_text, usual=ANSWERED),
        "messages": Column(
            "lists of {role, content}, {from, value} or {human, assistant}", _has_messages
        ),
        "format": Column("text or numbers", _is_printable),
    },
    settings=("fields", "roles", "loss_on", "too_long"),
    chosen=("prompt", "response"),
    ambiguous=("prompt", "response"),
    format=2,
    packing=("separate", "alone"),
    writes_chats=True,
    auto=causal_lm.TASK.auto,
    table=causal_lm.TASK.table,
    model_types=causal_lm.TASK.model_types,
    pipeline=causal_lm.TASK.pipeline,
    peft_type=causal_lm.TASK.peft_type,
)


def _rank(known: Sequence[str], name: str) -> int:
    return [*known, name.casefold()].index(name.casefold())


def _left_out(tally: Counter[str]) -> list[str]:
    """Notes on the rows that became no document, or a shorter one."""
    return [
        f"{human_count(tally['empty'], 'row')} left out: empty or without an answer",
        f"{tally['too_long']} too long",
        f"{tally['cut']} cut",
    ]
