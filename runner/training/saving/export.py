"""The exported model: safetensors, config, tokenizer and card, or an adapter in peft's layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from runner.config.lora import LoraConfig
from runner.data.tokenizing import read_tokenizer
from runner.inputs import ModelInput, read_checked
from runner.training.components.adapter import merged, write_adapter

# `save_pretrained` writes some of these itself; others are the base model's weights.
NOT_KEPT = (
    ".safetensors", ".index.json", ".md", "config.json",
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite", ".npz",
)  # fmt: skip
# As endings: `processor_config.json` includes preprocessor_config.json.
KEPT = ("tokenizer_config.json", "processor_config.json")
TEMPLATES = "additional_chat_templates/"


def read_companions(source: ModelInput) -> dict[str, bytes]:
    """Reads the staged files that are exported unchanged: tokenizer, chat templates, processor,
    licence.

    This happens before the first step, so that a damaged file costs no training.

    Returns:
        Name -> content.

    Raises:
        DamageError: a file cannot be read, or is not as it was fetched.
    """
    found = {
        name: read_checked(source.path / name, digest)
        for name, digest in source.digests.items()
        if _is_companion(name)
    }
    return found | _with_new_tokens(source)


def _with_new_tokens(source: ModelInput) -> dict[str, bytes]:
    """The files of a tokenizer that has the tokens which the run adds; empty: it adds none."""
    if not (source.new_tokens or source.new_special_tokens):
        return {}
    tokenizer = read_tokenizer(source.path, source.new_tokens, source.new_special_tokens)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.*")}


def read_origin(model: Path) -> tuple[str, ...]:
    """What an earlier run's card says of the weights in this folder; empty if no run made them.

    `model_card` writes it as `airlift:` in the metadata of README.md.
    """
    try:
        text = (model / "README.md").read_text(encoding="utf-8", errors="replace")
        head = text.split("---\n", 2)[1] if text.startswith("---\n") else ""
        metadata = yaml.safe_load(head)
    except (OSError, IndexError, yaml.YAMLError):
        return ()
    found = metadata.get("airlift") if isinstance(metadata, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("made_from"), list):
        return ()
    made_by = f"run {found.get('run')} in bundle {found.get('bundle')}"
    return (made_by, *map(str, found["made_from"]))


def export(
    model: Any,
    weights: Mapping[str, Any],
    lora: LoraConfig | None,
    companions: Mapping[str, bytes],
    card: str,
    folder: Path,
) -> None:
    """Writes a model folder for `from_pretrained` or `PeftModel.from_pretrained`, whole or not at
    all.

    Args:
        model: the transformers model.
        weights: its weights, by its own names. With LoRA at least the trained ones; all, where they
            are merged into weights that are not quantised.
        lora: the run file's settings.
        companions: what `read_companions` read before the first step.
        card: the text of its README.md.
        folder: is replaced.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if lora is not None and not lora.merge:
        write_adapter(model, dict(weights), temporary)
    else:
        whole, complete = merged(model, weights) if lora else (model, dict(weights))
        types = (tensor.dtype for tensor in complete.values() if tensor.is_floating_point())
        whole.config.dtype = next(types)
        whole.save_pretrained(temporary, state_dict=complete)
    for name, content in companions.items():
        path = temporary / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    for path in temporary.rglob("*"):
        # safetensors writes files with mode 0600; colleagues need to read them.
        path.chmod(0o755 if path.is_dir() else 0o644)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _is_companion(name: str) -> bool:
    """Whether a file is exported unchanged: top-level files, but not weights and
    `save_pretrained`'s own.

    Image preprocessing files and additional chat templates count; so do licences.
    """
    if name.startswith(TEMPLATES):
        return name.count("/") == 1 and name.endswith(".jinja")
    return "/" not in name and (name.endswith(KEPT) or not name.endswith(NOT_KEPT))
