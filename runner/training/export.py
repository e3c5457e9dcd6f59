"""The final model, as others load it: safetensors, config and tokenizer in one folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.inputs import ModelInput

NOT_TOKENIZER = (".safetensors", ".index.json", ".md", "config.json")


def export(model: Any, prefix: str, state: Mapping[str, Any], source: ModelInput, folder: Path) -> None:
    """Writes a model folder that `from_pretrained` loads, whole or not at all.

    Args:
        model: the transformers model; only its class and config matter, `state` has the weights.
        prefix: what names in `state` begin with (the task's module around the model).
        source: where the tokenizer's files come from; they are copied as they are.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    config = model.config
    config.dtype = dtype
    with _no_progress_bar():
        model.save_pretrained(temporary, state_dict=weights)
    for name in source.digests:
        if _belongs_to_tokenizer(name) and not (temporary / name).exists():
            shutil.copyfile(source.path / name, temporary / name)
    for path in temporary.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors are written 0600; colleagues want to read them
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


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
