"""Files that are whole and do not fit each other, the task or the library: T of the list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.first_job.harness import (
    Change,
    Found,
    assert_found,
    assert_silent,
    both,
    bundle_of_variants,
    check,
    edit,
    remove,
)

BERT, GPT2, CHAT = "tiny-bert", "tiny-gpt2", "tiny-chat"
CAUSAL: dict[str, Any] = {"task": "causal-lm"}
TALKS: dict[str, Any] = {
    "task": "instruction",
    "dataset": {"asset": "chats", "messages": "messages"},
}


def text(name: str, content: str | bytes) -> Change:
    """Writes a file of a model."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def weights(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the weights of a model."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def narrow(ending: str) -> Change:
    """Makes one weight shorter."""

    def cut(tensors: dict[str, Any]) -> None:
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = tensors[name][:-8].copy()

    return weights(cut)


def without(part: str) -> Change:
    """Leaves out the weights of these names."""

    def leave(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return weights(leave)


def newer_config(settings: dict[str, Any]) -> None:
    settings.update(model_type="qwen9", transformers_version="9.1.0")


def renamed(prefix: str) -> Change:
    """Names the weights as a wrapper around the model does."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return weights(rename)


def config(**values: Any) -> Change:
    """Changes keys of config.json."""
    return edit("config.json", lambda document: document.update(values))


def template(text: str) -> Change:
    """Gives a model another chat template."""
    return both(
        remove("chat_template*"),
        edit("tokenizer_config.json", lambda d: d.update(chat_template=text)),
    )


IN_TURNS = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)
OWN_CODE = {"AutoTokenizer": ["tokenization_mine.MyTokenizer", None]}
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")
# entry -> model that is copied, what is done to it, keys of the run file, what `check` must say
ROWS: dict[str, tuple[str, Change, dict[str, Any], Found]] = {
    "T1": (
        GPT2,
        edit("config.json", newer_config),
        CAUSAL,
        Found(("does not read", "model type `qwen9`"), "transformers>=9.1.0"),
    ),
    "T2": (
        GPT2,
        edit("tokenizer.json", lambda d: d["model"].update(type="NextGeneration")),
        CAUSAL,
        Found(("no tokenizer can be loaded", "did not match any variant"), "tokenizers"),
    ),
    "T3": (
        BERT,
        both(
            remove("tokenizer.json"),
            edit("tokenizer_config.json", lambda d: d.update(tokenizer_class="BertTokenizer")),
        ),
        {},
        Found(("has no tokenizer: none of its files", "vocab.txt"), "from the same repository"),
    ),
    "T4": (
        GPT2,
        remove(*TOKENIZER_FILES),
        CAUSAL,
        Found(("tokenizer",), "tokenizer"),
    ),
    "T5": (
        CHAT,
        both(
            remove("tokenizer.json"),
            text("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"),
            edit("tokenizer_config.json", lambda d: d.update(tokenizer_class="LlamaTokenizer")),
        ),
        CAUSAL,
        Found(("sentencepiece",), "pip install sentencepiece"),
    ),
    "T6": (
        CHAT,
        both(
            remove("tokenizer.json", "tokenizer_config.json"),
            text("tokenizer.model", b"this is neither SentencePiece nor tiktoken\n"),
        ),
        CAUSAL,
        Found(("no tokenizer can be loaded",), "tokenizer.json"),
    ),
    "T7": (
        BERT,
        edit("tokenizer.json", lambda d: d["model"]["vocab"].update(further=5000)),
        {},
        Found(("knows 5001 tokens, its model 1024", "ids up to 5000"), "both from one repository"),
    ),
    "T8": (
        BERT,
        edit("config.json", lambda d: d.update(hidden_size=128)),
        {},
        Found(("weights and its config.json differ", "hidden_size is 128"), "from one revision"),
    ),
    "T9": (
        BERT,
        narrow("layer.1.output.LayerNorm.weight"),
        {},
        Found(("layer.1.output.LayerNorm.weight has shape [56]",), "from one revision"),
    ),
    "T11": (
        CHAT,
        both(
            remove("chat_template*"),
            edit("tokenizer_config.json", lambda d: d.pop("chat_template", None)),
        ),
        TALKS,
        Found(("has no chat template",), "stage a copy of its folder"),
    ),
    "T12": (
        BERT,
        edit("tokenizer_config.json", lambda d: d.pop("mask_token")),
        {},
        Found(("has no mask token",), "`task: causal-lm`"),
    ),
    "T13": (
        GPT2,
        lambda _folder: None,
        CAUSAL | {"sequence_length": 65},
        Found(("sequence_length 65", "has 64 positions"), "Set sequence_length: 64 or less"),
    ),
    "T15": (
        CHAT,
        template(IN_TURNS),
        TALKS | {"dataset": {"asset": "twice", "messages": "messages"}},
        Found(("row 0", "Conversation roles must alternate"), "Fix the row"),
    ),
    "T16": (
        CHAT,
        config(pad_token_id=99999),
        CAUSAL,
        Found(("Padding_idx must be within num_embeddings",), "correct that key"),
    ),
    "T17": (
        GPT2,
        renamed("module."),
        CAUSAL,
        Found(("named `module....`", "DistributedDataParallel"), "removeprefix('module.')"),
    ),
    "T18": (
        GPT2,
        lambda _folder: None,
        CAUSAL | {"lora": {"targets": ["q_proj"]}},
        Found(("has no module `q_proj`",), "c_attn"),
    ),
    "T19": (
        CHAT,
        config(attn_implementation="flash_attention_2"),
        CAUSAL,
        Found(("flash_attention_2 needs flash-attn",), "correct that key"),
    ),
}  # fmt: skip


# Not on the page yet.
MORE: dict[str, tuple[str, Change, dict[str, Any], Found]] = {
    "own code": (
        CHAT,
        edit(
            "tokenizer_config.json", lambda d: d.update(tokenizer_class="Mine", auto_map=OWN_CODE)
        ),
        CAUSAL,
        Found(("code of the model's own (auto_map)",), "needs no code of its own"),
    ),
    "cut off": (
        GPT2,
        text("generation_config.json", '{"eos_token_id": 1, '),
        CAUSAL,
        Found(("generation_config.json is not JSON",), "Stage the model again"),
    ),
    "no type": (
        GPT2,
        edit("config.json", lambda d: d.pop("model_type")),
        CAUSAL,
        Found(("has no model_type",), "-hf"),
    ),
    "no assistant": (
        CHAT,
        lambda _folder: None,
        TALKS | {"dataset": {"asset": "bots", "messages": "messages"}},
        Found(("no message of the role `assistant`", "the roles are bot"), "`assistant`", 0),
    ),
    "too long": (
        CHAT,
        lambda _folder: None,
        TALKS
        | {
            "sequence_length": 8,
            "dataset": {"asset": "chats", "messages": "messages", "too_long": "drop"},
        },
        Found(("all are longer than sequence_length 8",), "too_long: cut", 0),
    ),
    "no layer": (
        BERT,
        without(".1."),
        {},
        Found(("the weights lack bert.encoder.layer.1.",), "from one revision"),
    ),
    "quantised": (
        GPT2,
        edit("config.json", lambda d: d.update(quantization_config={"quant_method": "gptq"})),
        CAUSAL,
        Found(("is quantised already", "cannot be trained"), "it was made from"),
    ),
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, bundle: Path, twins_bundle: Path) -> Path:
    """A bundle with a faulty model for each entry, and a sound `gpt2`."""
    models = {name: bundle / "data/models" / name for name in (BERT, GPT2)}
    models[CHAT] = twins_bundle / "data/models" / CHAT
    sources = {
        entry.lower().replace(" ", "-"): (models[name], change)
        for entry, (name, change, *_) in (ROWS | MORE).items()
    }
    sources["gpt2"] = (models[GPT2], lambda _folder: None)
    return bundle_of_variants(tmp_path_factory.mktemp("variants"), sources)


@pytest.mark.parametrize("entry", [*ROWS, *MORE])
def test_what_does_not_fit_is_found_on_the_login_node(
    variants: Path, tmp_path: Path, entry: str
) -> None:
    _, _, keys, found = (ROWS | MORE)[entry]
    assert_found(
        check(tmp_path, variants, **{"model": {"asset": entry.lower().replace(" ", "-")}, **keys}),
        found,
    )


def test_a_tokenizer_without_a_padding_token_is_no_fault(variants: Path, tmp_path: Path) -> None:
    assert_silent(check(tmp_path, variants, model={"asset": "gpt2"}, **CAUSAL))
