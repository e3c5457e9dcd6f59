"""Instruction data -> token ids, and which of them are learned.

A row becomes one text, with the places of the response in it; the text is tokenised whole, as it will be when the model
is used, and a token is learned if it holds any of the response. `Writer.of` says how a row becomes a text: by the
columns of a `format`, by the chat template of the tokenizer, or prompt, newline, response.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.documents import Document
from runner.data.recipe import Recipe
from runner.data.table import columns
from runner.data.tokenizing import frame, whole
from runner.data_config import DatasetConfig
from runner.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


class Sample(NamedTuple):
    """A text, and the places in it (characters, begin and end) that are the response."""

    text: str
    response: list[Span]


@dataclass(frozen=True)
class Writer:
    """How rows become texts.

    Attributes:
        write: values of the columns -> a sample; None: one of them is missing.
        with_ends: whether begin and end of text are added, as they are not written out.
        words: what is done, for printing.
    """

    write: Callable[[dict[str, Any]], Sample | None]
    with_ends: bool
    words: str

    @staticmethod
    def of(dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> Writer:
        """Chooses.

        Raises:
            UsageError: messages, and a tokenizer without chat template.
        """
        if dataset.format is not None:
            text = dataset.format
            return Writer(lambda row: by_format(text, row), True, "by the format; the response is its last column")
        if dataset.messages is not None:
            if not tokenizer.chat_template:
                raise UsageError(
                    f"dataset.messages: the tokenizer in {tokenizer.name_or_path} has no chat template.",
                    "Stage the model's chat_template.jinja too, or give `format` or `prompt` and `response`.",
                )
            name = dataset.messages
            chat = _by_template(tokenizer, dataset)
            return Writer(lambda row: chat(row[name]), False, "by the model's chat template")
        prompt, response = str(dataset.prompt), str(dataset.response)
        if tokenizer.chat_template:
            chat = _by_template(tokenizer, dataset)
            return Writer(
                lambda row: chat(_as_messages(row[prompt], row[response])), False, "by the model's chat template"
            )
        both = f"{{{_escaped(prompt)}}}\n{{{_escaped(response)}}}"
        words = "prompt, newline, response: the tokenizer has no chat template"
        return Writer(lambda row: by_format(both, row), True, words)


def _escaped(name: str) -> str:
    if {"{", "}", "!", ":"} & set(name):
        raise UsageError(f"dataset: the column `{name}` cannot be put into a text.", "Rename the column.")
    return name


def by_format(text: str, row: dict[str, Any]) -> Sample | None:
    """A format with its columns filled in; the response is what the last one brings, and what follows it."""
    parts, begin = [""], 0
    for literal, name, _, _ in string.Formatter().parse(text):
        parts.append(literal)
        if name is not None:
            if row[name] is None:
                return None
            begin = sum(map(len, parts))
            parts.append(str(row[name]))
    whole_text = "".join(parts)
    return Sample(whole_text, [(begin, len(whole_text))])


def _as_messages(prompt: str | None, response: str | None) -> list[dict[str, str]] | None:
    if prompt is None or response is None:
        return None
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _by_template(
    tokenizer: PreTrainedTokenizerBase, dataset: DatasetConfig
) -> Callable[[list[dict[str, Any]] | None], Sample | None]:
    def render(messages: list[dict[str, Any]], *, asks: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))

    def sample(messages: list[dict[str, Any]] | None) -> Sample | None:
        if not messages:
            return None
        return by_template(messages, render, only_response=dataset.loss_on == "response")

    return sample


def by_template(messages: list[dict[str, Any]], render: Callable[..., str], *, only_response: bool) -> Sample:
    """A conversation as its template writes it; the response is what the template adds for the assistant's messages.

    Raises:
        ValueError: the template does not keep what it wrote before, so nobody can tell.
    """
    text = render(messages, asks=False)
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or not only_response:
            continue
        before = render(messages[:number], asks=True)
        after = render(messages[: number + 1], asks=False)
        if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
            raise ValueError("the chat template rewrites earlier messages, so the response cannot be told")
        spans.append((len(before), len(after)))
    return Sample(text, spans if only_response else [(0, len(text))])


@dataclass
class Tally:
    """What became of the rows."""

    too_long: int = 0
    cut: int = 0
    nothing_to_learn: int = 0


def documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tally: Tally) -> Iterator[list[Document]]:
    """The samples of a split that can be learned from, many at a time.

    Raises:
        UsageError: a row the chat template refuses; a tokenizer that cannot say where its tokens come from.
    """
    writer, encode = Writer.of(recipe.dataset, tokenizer), _encoder(tokenizer)
    names = list(dict.fromkeys(recipe.dataset.columns("instruction").values()))
    ends = _ends(tokenizer) if writer.with_ends else ([], [])
    first = 0
    for values in columns(recipe.split, names, recipe.limit):
        number = len(values[names[0]])
        samples = []
        for row in range(number):
            sample = _written(writer, {name: values[name][row] for name in names}, first + row, recipe)
            if sample is not None and sample.text.strip():
                samples.append(sample)
        first += number
        tally.nothing_to_learn += number - len(samples)
        encoded = encode([sample.text for sample in samples])
        made = (_document(*pair, ends, recipe, tally) for pair in zip(samples, encoded, strict=True))
        yield [document for document in made if document is not None]


def _written(writer: Writer, row: dict[str, Any], number: int, recipe: Recipe) -> Sample | None:
    from jinja2 import TemplateError

    try:
        return writer.write(row)
    except (TemplateError, ValueError, TypeError) as error:
        raise UsageError(
            f"split `{recipe.split.name}`, row {number}: the chat template cannot write it: {error}.",
            "Mend the row, or give `format` or `prompt` and `response`; with loss_on: all a template may rewrite.",
        ) from None


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], list[Any]]:
    fast = whole(tokenizer)
    if fast is None:
        raise UsageError(
            f"instruction: the tokenizer in {tokenizer.name_or_path} cannot say where its tokens come from.",
            "Stage a model whose repository has tokenizer.json.",
        )
    return lambda texts: fast.encode_batch(texts, add_special_tokens=False) if texts else []


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and after each text: the begin token where the tokenizer itself sets it, the end token always."""
    bos, (_, eos, _) = tokenizer.bos_token_id, frame("instruction", tokenizer)
    begins = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return ([bos] if begins else []), [eos]


def _document(
    sample: Sample, encoding: Any, ends: tuple[list[int], list[int]], recipe: Recipe, tally: Tally
) -> Document | None:
    import numpy as np

    before, after = ends
    ids, offsets, everything = list(encoding.ids), encoding.offsets, recipe.dataset.loss_on == "all"
    spans = [(0, len(sample.text))] if everything else sample.response
    learned = [any(begin < end_ and end > begin_ for begin_, end_ in spans) for begin, end in offsets]
    if not any(learned):  # an empty response: it would teach to say nothing
        tally.nothing_to_learn += 1
        return None
    # What is written out already is not added again.
    if before and ids[:1] != before:
        ids, learned = before + ids, [everything, *learned]
    if after and ids[-1:] != after:
        ids, learned = ids + after, [*learned, True]
    if len(ids) > recipe.sequence_length:
        if recipe.dataset.too_long == "drop":
            tally.too_long += 1
            return None
        tally.cut += 1
        ids, learned = ids[: recipe.sequence_length], learned[: recipe.sequence_length]
    if not any(learned[1:]):
        tally.nothing_to_learn += 1
        return None
    return Document(np.array(ids, dtype=np.int64), np.array(learned, dtype=np.bool_))
