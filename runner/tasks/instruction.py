"""Instruction: predict each token of an answer from the question, and from those before it.

The model and the loss are those of causal-lm. A row becomes one text with the positions of the
response in it. The text is tokenised as a whole, as it will be when the model is used. A token is
learned if it holds a part of the response. `Writer.of` decides how a row becomes a text: by the
columns of a `format`, by the chat template of the tokenizer, or as prompt, newline, response.

A row whose response is empty is omitted, even if a template or a format writes an end after it. A
model that learns only that end learns to say nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from runner.config.chats import ANSWERED, ASKED, KNOWN, OURS, Naming, UnknownRoleError, unknown_role
from runner.config.data import DatasetConfig, format_columns
from runner.config.run_config import RunConfig
from runner.config.task_keys import Column, is_integer, is_text
from runner.data import sequences
from runner.data.recipe import Recipe
from runner.data.sequences import Document
from runner.data.store import Sample, StoreFacts
from runner.data.table import columns, first_batches, row_of
from runner.data.tokenizing import Tokenizer, end_of_text, fast_tokenizer
from runner.from_stage import Lines, UsageError, Where, human_count
from runner.inputs import Inputs, SplitInput
from runner.tasks import causal_lm
from runner.tasks.shared.task import Chosen

TALKS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "talk")
NO_TALKS = ("rejected", "prompt", "completion", "history", "tools")  # not the whole, or not good
BESIDE = ("input", "query", "context", "article", "passage")
"""What a question is about, in a column of its own, often without a text."""
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{%s}%s\n\n### Response:\n{%s}"
)

Span = tuple[int, int]
Part = tuple[str, str | None]  # of a format: a text, and the name of the column after it

# Keys of an assistant's message that are an answer without a text in `content`.
ANSWERS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
FIRST_ROWS = 64  # enough to see that no row has an answer, and written in a tenth of a second
_BLANK_LINE = "\n\n"
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
INVISIBLE = r"[\s\u200b-\u200d\u2060\ufeff]"  # white space, and zero-width characters


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
                f"task instruction: {what}.",
                "Give one of: {prompt: COLUMN, response: COLUMN}, {messages: COLUMN}, "
                "{format: 'text with {COLUMN}s'}.",
                place=lines.place(*where),
            )
        if any(pair) and not all(pair):
            missing = "response" if dataset.prompt else "prompt"
            raise UsageError(
                f"`{missing}` is missing.", f"Add `{missing}: COLUMN`.", place=lines.place(*where)
            )
        if dataset.messages is None and (dataset.fields or dataset.roles):
            key = "fields" if dataset.fields else "roles"
            raise UsageError(
                f"`{key}` renames what `messages` have, and there is no `messages`.",
                f"Remove `{key}`, or give the column of the chats: messages: COLUMN",
                place=lines.place(*where, key),
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

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        return sequences.whole(recipe, documents, _left_out)

    def check_tokenizer(self, config: RunConfig, inputs: Inputs, tokenizer: Tokenizer) -> list[str]:
        """Says how rows become texts."""
        lines = super().check_tokenizer(config, inputs, tokenizer)
        writers = (Writer.of(d.settings, tokenizer, d.train.columns) for d in inputs.datasets)
        how = "; ".join(dict.fromkeys(writer.description for writer in writers))
        return [*lines, f"samples are written {how}"]

    def try_first_rows(self, recipe: Recipe, tokenizer: Tokenizer) -> str:
        """Writes the first rows of a split as for training.

        Returns:
            Why none of them has something to learn; empty: some have.

        Raises:
            UsageError: as for `documents`.
        """
        limit = min(FIRST_ROWS, recipe.limit or FIRST_ROWS)
        tally, rows = Counter[str](), min(limit, recipe.split.rows)
        if sum(map(len, documents(replace(recipe, limit=limit), tokenizer, tally))) or not rows:
            return ""
        name = recipe.dataset.messages
        if tally["too_long"] >= tally["empty"]:
            why = f"all are longer than sequence_length {recipe.sequence_length} (too_long: drop)"
        elif name is None:
            why = f"`{recipe.dataset.response or recipe.dataset.format}` has no text in them"
        else:
            values = next(columns(recipe.split, [name], limit))[name]
            naming = Naming.of(
                recipe.split.columns[name], recipe.dataset.fields, recipe.dataset.roles
            )
            talks = [naming.renamed(talk) if naming else talk for talk in values if talk]
            roles = sorted({str(message.get("role")) for talk in talks for message in talk})
            why = f"no message of the role `assistant` has a text; the roles are {', '.join(roles)}"
        return f"of the first {rows} rows of split `{recipe.split.name}` none can be learned: {why}"

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


class Written(NamedTuple):
    """A text, and the spans in it (characters: begin, end) that are the response."""

    text: str
    response: list[Span]


@dataclass(frozen=True)
class Writer:
    """Turns rows into texts.

    Attributes:
        write: values of the columns -> a sample; None: a value is missing or the response is empty.
        with_ends: whether begin-of-text and end-of-text tokens are added; `write` does not write
            them.
        description: how rows are written, for printing.
    """

    write: Callable[[dict[str, Any]], Written | None]
    with_ends: bool
    description: str

    @staticmethod
    def of(dataset: DatasetConfig, tokenizer: Tokenizer, columns: Mapping[str, str]) -> Writer:
        """Chooses how the rows of a dataset are written.

        Args:
            dataset: what the run file sets for it.
            tokenizer: of the model.
            columns: name -> Arrow type.

        Raises:
            UsageError: the dataset has messages, and the tokenizer has no chat template.
        """
        is_blank, name = _blank(tokenizer), dataset.messages
        prompt, response = str(dataset.prompt), str(dataset.response)
        if dataset.format is not None:
            paragraphs = [parts_of(text) for text in dataset.format.split(_BLANK_LINE)]
            how = "by the format; the response is its last column"
            return Writer(
                lambda row: by_parts(with_text(paragraphs, row), row, is_blank), True, how
            )
        if name is None and not tokenizer.chat_template:
            pair = [("", prompt), ("\n", response)]
            how = "prompt, newline, response: the tokenizer has no chat template"
            return Writer(lambda row: by_parts(pair, row, is_blank), True, how)
        if not tokenizer.chat_template:
            raise UsageError(
                f"dataset.messages: the tokenizer in {tokenizer.name_or_path} has no chat "
                "template.",
                "Train the model's chat version (its Instruct). A base model has no template: "
                "stage a copy of its folder, `path: FOLDER`, and write into the copy a "
                f"chat_template.jinja, such as: {_PLAIN_TEMPLATE}",
            )
        chat, how = _by_template(tokenizer, dataset, is_blank), "by the model's chat template"
        if name is None:
            return Writer(lambda row: chat(_as_messages(row[prompt], row[response])), False, how)
        naming = Naming.of(columns.get(name, ""), dataset.fields, dataset.roles)
        if naming is None or not (renames := naming.describe()):
            return Writer(lambda row: chat(row[name]), False, how)
        renamed = naming.renamed
        return Writer(
            lambda row: chat(renamed(row[name]) if row[name] else None), False, f"{how}; {renames}"
        )


def _blank(tokenizer: Tokenizer) -> Callable[[str], bool]:
    """Returns a test whether a text has only white space and special tokens (`</s>`)."""
    special = sorted(
        {token for token in tokenizer.all_special_tokens if token.strip()}, key=len, reverse=True
    )
    return blank("|".join([f"{INVISIBLE}+", *map(re.escape, special)]))


def blank(pattern: str = f"{INVISIBLE}+") -> Callable[[str], bool]:
    """Returns a test whether a text consists only of matches of a pattern. Pure; in linear time."""
    matches = re.compile(pattern).match

    def is_blank(text: str) -> bool:
        end = 0
        while found := matches(text, end):
            end = found.end()
        return end == len(text)

    return is_blank


_is_invisible = blank()


def parts_of(text: str) -> list[Part]:
    """The parts of a format, in order."""
    return [(literal, name) for literal, name, _, _ in string.Formatter().parse(text)]


def with_text(paragraphs: Sequence[list[Part]], row: Mapping[str, Any]) -> list[Part]:
    """The parts of a format without the paragraphs whose columns are all null or blank in a row.

    So a heading goes with its column, as in Alpaca's template without an input. The paragraph of
    the response stays, and all stay where no other column has a text.

    Args:
        paragraphs: the parts of each.
        row: column -> value.
    """
    names = [name for parts in paragraphs for _, name in parts if name is not None]
    values = {name: "" if row[name] is None else str(row[name]) for name in names}
    there = {name for name, value in values.items() if not _is_invisible(value)} | {names[-1]}
    kept = [
        parts
        for parts in paragraphs
        if not (own := {name for _, name in parts if name is not None}) or own & there
    ]
    between: list[Part] = [(_BLANK_LINE, None)]
    chosen = kept if len(there) > 1 else paragraphs
    return [part for number, parts in enumerate(chosen) for part in between * (number > 0) + parts]


def by_parts(
    parts: Sequence[Part],
    row: dict[str, Any],
    is_blank: Callable[[str], bool] = _is_invisible,
) -> Written | None:
    """Fills the columns into a format. The response is the last column, and the text after it.

    Args:
        parts: of the format, by `parts_of`.
        row: column -> value.
        is_blank: tests whether a response is empty.

    Returns:
        The sample; None: a column is null, or the response is blank.
    """
    whole, response, begin = "", "", 0
    for literal, name in parts:
        whole += literal
        if name is not None:
            if row[name] is None:
                return None
            begin, response = len(whole), str(row[name])
            whole += response
    return None if is_blank(response) else Written(whole, [(begin, len(whole))])


def _as_messages(prompt: str | None, response: str | None) -> list[dict[str, str]] | None:
    if prompt is None or response is None:
        return None
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _by_template(
    tokenizer: Tokenizer, dataset: DatasetConfig, is_blank: Callable[[str], bool]
) -> Callable[[list[dict[str, Any]] | None], Written | None]:
    def render(messages: list[dict[str, Any]], *, asks: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        )

    only_response = dataset.loss_on == "response"
    return lambda messages: (
        by_template(messages, render, only_response=only_response, is_blank=is_blank)
        if messages
        else None
    )


def by_template(
    messages: list[dict[str, Any]],
    render: Callable[..., str],
    *,
    only_response: bool,
    is_blank: Callable[[str], bool] = _is_invisible,
) -> Written | None:
    """Writes a conversation by its chat template.

    The response is the text that the template adds for the assistant's messages. An assistant's
    message without content is not learned.

    Args:
        messages: mappings with `role` and `content`.
        render: the template: (messages, asks=whether it ends with the assistant's prompt) -> text.
        only_response: whether only the response is learned.
        is_blank: tests whether a content is empty.

    Returns:
        The sample; None: no message of the assistant has content.

    Raises:
        ValueError: the template changes its text for earlier messages, so that the response cannot
            be found.
    """
    answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    learned = [number for number in answers if _has_content(messages[number], is_blank)]
    if not learned and (answers or only_response):
        return None
    text = render(messages, asks=False)
    if not only_response:
        return Written(text, [(0, len(text))])
    spans: list[Span] = []
    for number in learned:
        before = render(messages[:number], asks=True)
        after = render(messages[: number + 1], asks=False)
        if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
            raise ValueError(
                "the chat template rewrites earlier messages, so the response cannot be found"
            )
        spans.append((len(before), len(after)))
    return Written(text, spans)


def _has_content(message: dict[str, Any], is_blank: Callable[[str], bool]) -> bool:
    """Returns whether a message has text, another part (an image), or a call of a tool."""
    if any(message.get(key) for key in ANSWERS):
        return True
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return content is not None and not is_blank(str(content))
    return any(
        not is_blank(str(part.get("text") or ""))
        if isinstance(part, dict) and part.get("type", "text") == "text"
        else True
        for part in content
        if part
    )


def documents(
    recipe: Recipe, tokenizer: Tokenizer, tally: Counter[str]
) -> Iterator[list[Document]]:
    """Yields lists of the samples of a split that have something to learn.

    Args:
        recipe: what to read, and how.
        tokenizer: of the model.
        tally: counts rows: `too_long` for a sequence and omitted, `cut` to one, `empty` (null, or
            without a response, also after the cut) and omitted, `no_prompt` (kept).

    Raises:
        UsageError: the chat template rejects a row, or the tokenizer has no offsets of its tokens.
    """
    writer = Writer.of(recipe.dataset, tokenizer, recipe.split.columns)
    encode = _encoder(tokenizer)
    names = list(dict.fromkeys(TASK.columns(recipe.dataset).values()))
    ends = _ends(tokenizer) if writer.with_ends else ([], [])
    asked = recipe.dataset.prompt
    first = 0
    for values in columns(recipe.split, names, recipe.limit):
        number = len(values[names[0]])
        samples = []
        for row in range(number):
            sample = _write(
                writer, {name: values[name][row] for name in names}, first + row, recipe
            )
            if sample is not None and sample.text.strip():
                samples.append(sample)
                tally["no_prompt"] += asked is not None and not str(values[asked][row]).strip()
        first += number
        tally["empty"] += number - len(samples)
        encoded = encode([sample.text for sample in samples])
        written = (
            _document(*pair, ends, recipe, tally) for pair in zip(samples, encoded, strict=True)
        )
        yield [document for document in written if document is not None]


def _write(writer: Writer, row: dict[str, Any], number: int, recipe: Recipe) -> Written | None:
    from jinja2 import TemplateError

    try:
        return writer.write(row)
    except UnknownRoleError as error:
        raise unknown_role(row_of(recipe.split, number), str(error)) from None
    except (TemplateError, ValueError, TypeError) as error:
        raise UsageError(
            f"{row_of(recipe.split, number)}: the chat template cannot write it: {error}.",
            "Fix the row, or give `format` or `prompt` and `response`; "
            "with loss_on: all a template may rewrite.",
        ) from None


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[Any]]:
    fast = fast_tokenizer(tokenizer)
    if fast is None:
        raise UsageError(
            f"instruction: the tokenizer in {tokenizer.name_or_path} cannot say where its tokens "
            "come from.",
            "Stage a model whose repository has tokenizer.json.",
        )
    return lambda texts: fast.encode_batch(texts, add_special_tokens=False) if texts else []


def _ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids before and after each text.

    The begin token is there if the tokenizer itself adds it, the end token always.
    """
    bos, eos = tokenizer.bos_token_id, end_of_text(TASK.name, tokenizer)
    begins = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return ([bos] if begins else []), [eos]


def _document(
    sample: Written,
    encoding: Any,
    ends: tuple[list[int], list[int]],
    recipe: Recipe,
    tally: Counter[str],
) -> Document | None:
    import numpy as np

    before, after = ends
    ids, offsets, everything = list(encoding.ids), encoding.offsets, recipe.dataset.loss_on == "all"
    spans = [(0, len(sample.text))] if everything else sample.response
    learned = [
        any(begin < end_ and end > begin_ for begin_, end_ in spans) for begin, end in offsets
    ]
    if not any(learned):  # a response that the tokenizer drops
        tally["empty"] += 1
        return None
    is_cut = False
    # A template may have written these tokens already.
    if before and ids[:1] != before:
        ids, learned = before + ids, [everything, *learned]
    if after and ids[-1:] != after:
        ids, learned = ids + after, [*learned, True]
    if len(ids) > recipe.sequence_length:
        if recipe.dataset.too_long == "drop":
            tally["too_long"] += 1
            return None
        ids, learned = ids[: recipe.sequence_length], learned[: recipe.sequence_length]
        is_cut = True
    if not any(learned[1:]):
        tally["empty"] += 1
        return None
    tally["cut"] += is_cut
    return Document(np.array(ids, dtype=np.int64), np.array(learned, dtype=np.bool_))
