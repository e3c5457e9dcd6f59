"""Small real models: random weights, and tokenizers trained on real English."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.demo.repositories import paragraphs


def tiny_tokenizer(special: dict[str, str], vocabulary: int, *, wordpiece: bool) -> Any:
    """A real tokenizer, trained on the demo's English; equal on each call."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = (text for _, text in paragraphs()["train"])
    symbols = list(dict.fromkeys(special.values()))
    if wordpiece:
        normalizer, pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        parted = (pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)) for text in texts)
        words = Counter(word for several in parted for word, _ in several)
        tokenizer = Tokenizer(
            models.WordPiece(
                _word_pieces(words, symbols, vocabulary), unk_token=special["unk_token"]
            )
        )
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
        ends = [(symbol, tokenizer.token_to_id(symbol)) for symbol in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=ends,
        )
        # Published tokenizers often have these settings. They must not affect prepared data.
        tokenizer.enable_truncation(16)
        tokenizer.enable_padding(length=16)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=symbols)
        )
    inputs = ["input_ids", *(["token_type_ids"] if wordpiece else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **special)


def _word_pieces(words: Mapping[str, int], symbols: Sequence[str], size: int) -> dict[str, int]:
    """All letters and the commonest words. tokenizers' WordPieceTrainer differs on each call."""
    letters = sorted({letter for word in words for letter in word})
    common = sorted(
        (word for word in words if len(word) > 1), key=lambda word: (-words[word], word)
    )
    pieces = [*symbols, *letters, *(f"##{letter}" for letter in letters), *common][:size]
    return {piece: number for number, piece in enumerate(pieces)}


def tiny_model_files(folder: Path, kind: str) -> dict[str, bytes]:
    """A model repository with random weights.

    Args:
        kind: `bert`, `steady` (a BERT without dropout), `headless` (a BERT without its masked-lm
            head) or `gpt2`.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if kind == "gpt2":
        special = {"eos_token": "<|endoftext|>"}
        tokenizer = tiny_tokenizer(special, 1024, wordpiece=False)
        model: Any = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=64,
                n_embd=64,
                n_layer=2,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    else:
        names = ("unk", "sep", "pad", "cls", "mask")
        tokenizer = tiny_tokenizer(
            {f"{name}_token": f"[{name.upper()}]" for name in names}, 1024, wordpiece=True
        )
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            **(
                {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
                if kind == "steady"
                else {}
            ),
        )
        model = BertModel(config) if kind == "headless" else BertForMaskedLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
