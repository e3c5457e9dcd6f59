"""Compares a tokenizer's own files with the embedding of its model, without transformers.

An id beyond the embedding reads past its end: on a GPU an assertion in CUDA, on a CPU an index
error or nan. The opposite is normal: embeddings are padded to a multiple of 64 or more. A token
that was added beyond the embedding and never appears in a text does no harm (Gemma 3 1B has one).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import StageError, UsageError
from runner.inputs import ModelInput
from runner.job.findings import Finding
from runner.job.transformers_tables import tokens_of_class

NAMED = 3  # at most so many tokens are named in a message
USED = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""Tokens that training itself may write. Not the padding: a batch here is filled with others."""
FEW = 0.5  # a tokenizer with less than this share of the embedding's rows is worth a line
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "masked-lm": ("mask_token", "cls_token", "sep_token"),
    "causal-lm": ("eos_token",),
    "text-classification": (),
    "token-classification": (),
}
"""Task -> the tokens that frame its sequences; see `runner.data.tokenizing.frame`."""
_OTHER_FORMATS = ("tekken.json",)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        file: where they were read.
        size: number of tokens of the model of the tokenizer, without added ones.
        highest: the highest id of these; -1: there are none.
        added: id -> text of each added token.
        special: the texts of the tokens with a role in `USED`.
        template: the chat template; empty: there is none.
    """

    file: str
    size: int
    highest: int
    added: Mapping[int, str] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    template: str = ""

    @property
    def count(self) -> int:
        """The number of tokens, with added ones."""
        return self.size + sum(number > self.highest for number in self.added)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Reads tokenizer.json, vocab.txt or vocab.json, in the order of transformers.

    Args:
        folder: of the model.

    Returns:
        The tokens; None: the tokenizer has another format (SentencePiece, tiktoken, bytes).

    Raises:
        UsageError: a file is not what its name says.
    """
    readers: Mapping[str, Callable[[Path], tuple[int, int, dict[int, str]] | None]] = {
        "tokenizer.json": _tokenizer_json,
        "vocab.txt": _vocab_txt,
        "vocab.json": _vocab_json,
    }
    name = next((name for name in readers if (folder / name).is_file()), None)
    if name is None:
        return None
    try:
        found = readers[name](folder / name)
        if found is None:
            return None
        size, highest, added = found
        settings = _json(folder / "tokenizer_config.json")
        # transformers reads added_tokens.json for slow tokenizers only; the decoder for both.
        if name != "tokenizer.json":
            added |= {n: text for text, n in _json(folder / "added_tokens.json").items()}
            decoder = settings.get("added_tokens_decoder") or {}
            added |= {int(n): _content(token) or "" for n, token in decoder.items()}
        special = [*settings.items(), *_json(folder / "special_tokens_map.json").items()]
        return Vocabulary(
            name,
            size,
            highest,
            added,
            frozenset(text for key, token in special if key in USED and (text := _content(token))),
            _template(folder, settings),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{folder / name}: not a tokenizer that can be read ({type(error).__name__}: {error}).",
            "Stage the tokenizer's files again, from one revision.",
        ) from None


def check_vocabulary(
    asset: str, task: str, vocabulary: Vocabulary, rows: int, tied: str
) -> tuple[list[StageError], list[Finding]]:
    """Compares the ids of a tokenizer with the rows of an embedding. Pure.

    Args:
        asset: the name of the model, for messages.
        task: of the run.
        rows: number of ids that the model has.
        tied: where `rows` comes from, for messages.

    Returns:
        Errors, and warnings.
    """
    together = "Tokenizer and model do not belong together: stage both from one repository."
    if vocabulary.size == 0:
        return [
            UsageError(
                f"`{asset}`: {vocabulary.file} holds no tokens: every text would be empty.",
                "Stage the tokenizer again; at its source, look whether the file is complete.",
            )
        ], []
    beyond = {n: text for n, text in vocabulary.added.items() if n >= rows}
    if vocabulary.highest >= rows:
        number = max(vocabulary.count, vocabulary.highest + 1)  # ids can have gaps
        return [
            UsageError(
                f"`{asset}`: its tokenizer knows {number} tokens, its model {rows} "
                f"({vocabulary.file}: ids up to {vocabulary.highest}; {tied}).",
                together,
            )
        ], []
    if used := _used(beyond, vocabulary, task):
        return [
            UsageError(
                f"`{asset}`: its tokenizer adds {_named(used)} beyond the model's {rows} ids "
                f"({tied}).",
                "Resize the model's embedding and save it (model.resize_token_embeddings), then "
                "stage it again; or remove the tokens from the tokenizer.",
            )
        ], []
    warnings = []
    if beyond:
        warnings.append(
            Finding(
                "warning",
                f"`{asset}`: its tokenizer adds {_named(beyond)} beyond the model's {rows} ids: "
                "a text in which they are written would end the run.",
                "Check that the texts hold none of them.",
            )
        )
    if vocabulary.count < FEW * rows:
        warnings.append(
            Finding(
                "warning",
                f"`{asset}`: its tokenizer knows {vocabulary.count} tokens, its model {rows}.",
                f"If that is not intended: {together[0].lower()}{together[1:]}",
            )
        )
    return [], warnings


def _used(beyond: Mapping[int, str], vocabulary: Vocabulary, task: str) -> dict[int, str]:
    """Returns the tokens that training itself will use.

    masked-lm draws tokens at random, from all of them.
    """
    return {
        number: text
        for number, text in beyond.items()
        if task == "masked-lm"
        or text in vocabulary.special
        or (task == "instruction" and text and text in vocabulary.template)
    }


def _named(tokens: Mapping[int, str]) -> str:
    named = [f"{text} ({number})" for number, text in sorted(tokens.items())[:NAMED]]
    more = len(tokens) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _tokenizer_json(path: Path) -> tuple[int, int, dict[int, str]] | None:
    document = json.loads(path.read_bytes())
    words = document["model"].get("vocab")
    if words is None:
        return None
    # Unigram: a list of [token, score], by id. The others: token -> id.
    ids = range(len(words)) if isinstance(words, list) else words.values()
    added = {
        int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or []
    }
    return len(ids), max(ids, default=-1), added


def _vocab_txt(path: Path) -> tuple[int, int, dict[int, str]]:
    text = path.read_bytes().decode("utf-8")
    # Not splitlines(): a token can be another separator of Unicode.
    lines = text.removesuffix("\n").split("\n") if text.strip() else []
    return len(lines), len(lines) - 1, {}


def _vocab_json(path: Path) -> tuple[int, int, dict[int, str]]:
    ids = [int(number) for number in json.loads(path.read_bytes()).values()]
    return len(ids), max(ids, default=-1), {}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) else {}


def _content(token: object) -> str | None:
    """Returns the text of a token, which is a text or `{"content": text, ...}`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return str(settings.get("chat_template") or "")


def serves(task: str, model: ModelInput) -> bool:
    """Returns whether the tokenizer of a model certainly loads and has the tokens of a task.

    To import transformers takes two thirds of the time of `runner check`. This only ever says yes:
    in all other cases transformers loads the tokenizer, and its error is the one that is printed.
    """
    needed = _NEEDED.get(task)
    if (
        needed is None
        or "tokenizer.json" not in model.digests
        or any(name in model.digests for name in _OTHER_FORMATS)
    ):
        return False
    from tokenizers import Tokenizer

    try:
        settings = _mapping(model, "tokenizer_config.json")
        named = _mapping(model, "special_tokens_map.json") | settings
        own = tokens_of_class(
            str(model.settings.get("model_type")), settings.get("tokenizer_class")
        )
        if own is None or "auto_map" in settings:
            return False
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        texts = [_text(named.get(role, own.get(role))) for role in needed]
    except Exception:  # noqa: BLE001 - tokenizers raises this class; transformers explains it
        return False
    has_words = tokenizer.get_vocab_size() > len(tokenizer.get_added_tokens_decoder())
    return has_words and all(text and tokenizer.token_to_id(text) is not None for text in texts)


def _mapping(model: ModelInput, name: str) -> dict[str, Any]:
    if name not in model.digests:
        return {}
    found = json.loads(Path(model.path / name).read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no mapping")
    return found


def _text(token: object) -> str | None:
    """Returns the text of a token as transformers accepts it; None: it may be wrong."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None
