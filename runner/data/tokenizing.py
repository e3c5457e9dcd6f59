"""Tokenizers of staged models: load one, and what it says of its tokens and words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from runner.from_stage import UsageError, shortage
from runner.inputs import ModelInput, unreadable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


Tokenizer: TypeAlias = "PreTrainedTokenizerBase"  # of transformers, which imports slowly


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The dtype of token ids in a store: two bytes where the vocabulary allows it."""
    import numpy as np

    return np.dtype("u2" if len(tokenizer) <= 2**16 else "u4")


def load_tokenizer(model: ModelInput) -> Tokenizer:
    """Loads the tokenizer of a staged model, once per process.

    Raises:
        UsageError: transformers cannot load one from the folder.
    """
    return _load(model.path, model.new_tokens, model.new_special_tokens)


def read_tokenizer(
    folder: Path, new: tuple[str, ...] = (), special: tuple[str, ...] = ()
) -> Tokenizer:
    """Loads a tokenizer as it was staged, and adds tokens.

    Args:
        folder: of the model.
        new, special: the tokens that are added.

    Raises:
        UsageError: as for `load_tokenizer`.
    """
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        found.add_tokens(list(new))
        found.add_tokens(list(special), special_tokens=True)
        return found
    except Exception as error:  # tokenizers raises Exception itself
        if shortage(error):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why, remedy = _why_not(folder, said)
        raise UsageError(f"{folder}: no tokenizer can be loaded: {why}", remedy) from None


_load = cache(read_tokenizer)


def _why_not(folder: Path, said: str) -> tuple[str, str]:
    """Returns why a tokenizer cannot be loaded, and what fixes it.

    Without sentencepiece, transformers tries tiktoken instead, and then asks for that.

    Args:
        folder: of the model.
        said: the first line of the error.
    """
    remedy = "Stage a model whose repository has tokenizer.json (or vocab.txt, tokenizer.model)."
    if "custom code" in said:
        return (
            "tokenizer_config.json asks for code of the model's own (auto_map), which "
            "`runner train` never runs",
            "Stage a model whose tokenizer needs no code of its own; or train with a script of "
            "yours behind `runner exec`.",
        )
    if (folder / "tokenizer.json").is_file():
        if "untagged enum" in said:
            here = metadata.version("tokenizers")
            return (
                f"tokenizer.json is in a format that tokenizers {here}, which is installed here, "
                f"does not know: {said}",
                f"pip install -U tokenizers transformers (in the environment of the job: a newer "
                f"tokenizers than {here}), or stage a model whose tokenizer is older.",
            )
        return said, remedy
    for path in sorted(folder.glob("*.model")):
        if not is_sentencepiece(path):
            return (
                f"{path.name} is no SentencePiece model, and there is no tokenizer.json: {said}",
                "Stage the tokenizer's files again, from one revision, with tokenizer.json.",
            )
        if find_spec("sentencepiece") is None:
            return (
                f"its only tokenizer file is {path.name}, and sentencepiece, which reads it, is "
                "not installed",
                "pip install sentencepiece protobuf (in the environment of the job), or stage a "
                "model whose repository has tokenizer.json.",
            )
    return said, remedy


def is_sentencepiece(path: Path) -> bool:
    """Whether a file begins as SentencePiece's models do: with the first field of a protobuf."""
    with open(path, "rb") as file:
        return file.read(1) == b"\n"


def end_of_text(task: str, tokenizer: Tokenizer) -> int:
    """Returns the token between documents: the end of a text, else the separator.

    Args:
        task: the name, for the message.
        tokenizer: of the model.

    Raises:
        UsageError: the tokenizer has neither.
    """
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UsageError(
        f"{task}: the tokenizer in {tokenizer.name_or_path} has neither an end-of-text "
        "nor a separator token.",
        "Stage the tokenizer_config.json or special_tokens_map.json that names them, "
        "or another model.",
    )


def word_begins(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Returns for each token id whether a word begins with it: bool (vocabulary,).

    A word is what WordPiece cuts into pieces; for byte-level BPE and SentencePiece, what stands
    between white space, with its punctuation.

    Raises:
        UsageError: the tokenizer does not mark word boundaries.
    """
    import numpy as np

    fast = fast_tokenizer(tokenizer)
    rules = json.loads(fast.to_str()) if fast is not None else {}
    is_first = _first_pieces(rules)
    if is_first is None:
        raise UsageError(
            f"whole_words: the tokenizer in {tokenizer.name_or_path} does not mark word "
            "boundaries: it is neither WordPiece nor byte-level BPE nor SentencePiece with "
            "tokenizer.json.",
            "Remove whole_words: each token is then masked by itself.",
        )
    vocabulary = tokenizer.get_vocab()
    found = np.ones(max(vocabulary.values()) + 1, np.bool_)
    added = {token["content"] for token in rules["added_tokens"]}
    for token, number in vocabulary.items():
        found[number] = token in added or is_first(token)
    return found


def _first_pieces(rules: dict[str, Any]) -> Callable[[str], bool] | None:
    """Returns a test whether a word begins with a token, from a tokenizer.json. Pure."""
    model = rules.get("model", {})
    if model.get("type") == "WordPiece":
        prefix = model.get("continuing_subword_prefix") or "##"
        return lambda token: not token.startswith(prefix)
    kinds = {part["type"]: part for part in _parts(rules.get("pre_tokenizer"))}
    if "ByteLevel" in kinds:
        # A space, a new line, a tab, a carriage return, as byte-level tokenizers write them.
        return lambda token: token.startswith(("\u0120", "\u010a", "\u0109", "\u010d"))
    if "Metaspace" in kinds:
        space = kinds["Metaspace"].get("replacement", "\u2581")
        return lambda token: token.startswith(space)
    return None


def _parts(rule: dict[str, Any] | None) -> list[dict[str, Any]]:
    if rule is None:
        return []
    return [rule, *(part for inner in rule.get("pretokenizers", ()) for part in _parts(inner))]


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """Returns the fast tokenizer (`tokenizers.Tokenizer`), without truncation and padding.

    Published tokenizer.json files often set both. Here every token counts, once.

    Returns:
        The fast tokenizer; None: this tokenizer has none.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        fast.no_truncation()
        fast.no_padding()
    return fast


_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(txt|json)|.*\.model|tekken\.json|.*\.tiktoken")


def has_tokenizer(names: Iterable[str]) -> bool:
    """Returns whether a vocabulary is among these files of a model."""
    return any(map(_VOCABULARY.fullmatch, names))


def rows_needed(model: ModelInput) -> int:
    """The rows that an embedding needs for all tokens, with those that the run adds.

    They get the ids that the library tokenizers gives them (added_vocabulary.rs, `add_tokens`).

    Returns:
        0: the run adds none.

    Raises:
        UsageError: there is no tokenizer.json, whose tokens are known.
        DamageError: a file cannot be read.
    """
    new = (*model.new_tokens, *model.new_special_tokens)
    if not new:
        return 0
    tokenizer = _read(model, "tokenizer.json")
    try:
        words = tokenizer["model"]["vocab"]
        ids = words if isinstance(words, dict) else {t: n for n, (t, _) in enumerate(words)}
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"tokenizer.add_tokens: `{model.asset}` has no tokenizer.json whose tokens can be "
            "counted.",
            "Stage a model whose repository has tokenizer.json.",
        ) from None
    added = {t["content"]: int(t["id"]) for t in tokenizer.get("added_tokens") or ()}
    unknown = [token for token in new if token not in ids and token not in added]
    first = max(len(words), max(added.values(), default=-1) + 1)
    return max(*ids.values(), *added.values(), first + len(unknown) - 1) + 1


def _read(model: ModelInput, name: str) -> dict[str, Any]:
    """A JSON file of the model; empty: it has none of that name."""
    if name not in model.digests:
        return {}
    path: Path = model.path / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
