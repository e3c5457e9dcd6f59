"""Tiny models under the names of large ones: architecture, tokenizer and file names of these."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lib.demo.repositories import paragraphs

SPECIAL = {
    "bert": {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "roberta": {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
    "gpt2": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
LENGTH = 128  # positions


def _tokenizer(kind: str, folder: Path) -> int:
    """Trains a tokenizer on the novel, and returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer, WordPieceTrainer

    special = SPECIAL[kind]
    tokens = list(dict.fromkeys([*special.values()]))
    texts = [text for _, text in paragraphs()["train"][:200]]
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(
            texts, WordPieceTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts,
            BpeTrainer(
                vocab_size=600,
                special_tokens=[*tokens, "<|im_start|>"] if kind == "qwen2" else tokens,
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
    if "cls_token" in special:
        cls, sep = special["cls_token"], special["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in (cls, sep)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LENGTH,
    }
    if kind == "qwen2":
        settings["chat_template"] = CHAT
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def _text_model(kind: str, auto_class: str, folder: Path, **more: int) -> None:
    import transformers

    size = _tokenizer(kind, folder)
    settings: dict[str, Any] = {**SMALL, "vocab_size": size, "max_position_embeddings": LENGTH + 2}
    if kind == "gpt2":
        settings = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": LENGTH,
            "vocab_size": size,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    config = transformers.AutoConfig.for_model(kind, **settings, **more)
    model = getattr(transformers, auto_class).from_config(config)
    model.save_pretrained(folder)


_bert = partial(_text_model, "bert", "AutoModelForMaskedLM")
_qwen = partial(_text_model, "qwen2", "AutoModelForCausalLM", num_key_value_heads=1)
MODELS: Mapping[str, Callable[[Path], None]] = {
    "FacebookAI/roberta-base": partial(_text_model, "roberta", "AutoModelForMaskedLM"),
    "google-bert/bert-base-cased": _bert,
    "google-bert/bert-base-uncased": _bert,
    "openai-community/gpt2": partial(_text_model, "gpt2", "AutoModelForCausalLM"),
    "Qwen/Qwen2-0.5B": _qwen,
    "Qwen/Qwen2-0.5B-Instruct": _qwen,
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen,
    "HuggingFaceTB/SmolLM-360M": partial(_text_model, "llama", "AutoModelForCausalLM"),
}
