"""The final model, as others load it: safetensors, config, tokenizer, card, or an adapter as peft has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.inputs import ModelInput
from runner.lora_config import LoraConfig
from runner.training.adapters import merged, write_adapter

NOT_TOKENIZER = (".safetensors", ".index.json", ".md", "config.json")


def export(
    model: Any, weights: Mapping[str, Any], lora: LoraConfig | None, source: ModelInput, card: str, folder: Path
) -> None:
    """Writes a model folder that `from_pretrained` loads, or `PeftModel.from_pretrained`, whole or not at all.

    Args:
        model: the transformers model; `weights` has its weights, by its own names. With LoRA at least those that are
            trained, and where they are to be merged into weights that are not quantised, all.
        source: where the tokenizer's files come from; they are copied as they are.
        card: the text of its README.md.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if lora is not None and not lora.merge:
        write_adapter(model, dict(weights), temporary)
    else:
        whole, complete = merged(model, weights) if lora else (model, dict(weights))
        _write_whole(whole, complete, temporary)
    for name in source.digests:
        if _belongs_to_tokenizer(name) and not (temporary / name).exists():
            shutil.copyfile(source.path / name, temporary / name)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    for path in temporary.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors are written 0600; colleagues want to read them
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_whole(model: Any, weights: dict[str, Any], folder: Path) -> None:
    model.config.dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    with _no_progress_bar():
        model.save_pretrained(folder, state_dict=weights)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar for one shard, into job logs too."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _belongs_to_tokenizer(name: str) -> bool:
    """Files at the top that are neither weights nor what `save_pretrained` writes anew; licences go along.

    What prepares a model's images counts as well.
    """
    if "/" in name:
        return False
    return name in ("tokenizer_config.json", "preprocessor_config.json") or not name.endswith(NOT_TOKENIZER)
