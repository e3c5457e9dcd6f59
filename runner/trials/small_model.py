"""The model of a rehearsal: which layers are kept, and its folder of links and fewer weights.

config.json -> the config.json of the small model, and which of the weights belong to it. The
weights are copied as bytes, so torch is not imported, and nothing but them is read.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.inputs import ModelInput, safetensors_header

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LEAST = 2
"""A model of one layer has no weights between two layers, which engines partition and gather."""

_NUMBERED = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Small:
    """The same model with fewer layers.

    Attributes:
        settings: its config.json.
        layers, of: how many layers it has, and how many the whole model has.
    """

    settings: dict[str, Any]
    layers: int
    of: int


def number_of_layers(settings: Mapping[str, Any]) -> int | None:
    """Returns how many layers a config.json names; None: it names none."""
    inner = _inner(settings)
    key = _key_of_layers(inner)
    return None if key is None else inner[key]


def cut(settings: Mapping[str, Any]) -> Small | None:
    """Returns the model with its first layers only; None: it is small, or has no known layers.

    Two layers, or as many as it takes until each kind of layer is among them.

    Args:
        settings: config.json.
    """
    inner = _inner(settings)
    key = _key_of_layers(inner)
    if key is None:
        return None
    of = inner[key]
    kept = max(LEAST, _until_each_kind(inner, of))
    if of <= kept:
        return None
    shorter = {
        name: value[:kept] if isinstance(value, list) and len(value) == of else value
        for name, value in inner.items()
    }
    return Small(_with_inner(settings, {**shorter, key: kept}), kept, of)


def kept_weights(names: Iterable[str], layers: int, of: int) -> set[str]:
    """Returns the names of the weights that the model with fewer layers has.

    Layers are numbered in the names: `encoder.layer.0.output`. A numbered part counts as layers if
    it has as many numbers as the model has layers.

    Args:
        names: of all weights.
        layers: how many are kept.
        of: how many there are.
    """
    everything = set(names)
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in everything:
        for match in _NUMBERED.finditer(name):
            numbers[name[: match.start()]].add(int(match[1]))
    stacks = {prefix for prefix, found in numbers.items() if found == set(range(of))}

    def is_kept(name: str) -> bool:
        return all(
            int(match[1]) < layers
            for match in _NUMBERED.finditer(name)
            if name[: match.start()] in stacks
        )

    return {name for name in everything if is_kept(name)}


def _until_each_kind(inner: Mapping[str, Any], of: int) -> int:
    """How many of the first layers show each kind that config.json lists, one entry a layer."""
    most = 0
    for name, value in inner.items():
        if isinstance(value, list) and len(value) == of and name.endswith(("_types", "_type")):
            most = max(most, *(value.index(kind) + 1 for kind in value))
    dense = inner.get("first_k_dense_replace")  # DeepSeek: the layers after it are experts
    return max(most, dense + 1 if isinstance(dense, int) else 0)


def _inner(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def _with_inner(settings: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(settings.get("text_config"), dict):
        return {**settings, "text_config": dict(inner)}
    return dict(inner)


def _key_of_layers(inner: Mapping[str, Any]) -> str | None:
    """The key of a config.json that says how many layers there are."""
    return next((name for name in LAYERS if isinstance(inner.get(name), int)), None)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
AT_ONCE = 2**24  # bytes in memory at a time, while weights are copied
_LENGTH = struct.Struct("<Q")


class _Piece(NamedTuple):
    """One weight: where its bytes are."""

    path: Path
    begin: int
    size: int
    entry: Mapping[str, Any]


def write(model: ModelInput, small: Small, folder: Path, source: Path | None) -> ModelInput:
    """Writes the small model's folder.

    Args:
        model: the staged model.
        small: what it becomes.
        folder: is made.
        source: the folder with the weights; None: the run begins with random ones.

    Returns:
        The model in its new folder.

    Raises:
        StageError: a header of the weights cannot be read.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    digests = {}
    for name, digest in model.digests.items():
        if name == CONFIG or name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model.path / name)
        digests[name] = digest
    text = json.dumps(small.settings, indent=1).encode()
    (folder / CONFIG).write_bytes(text)
    digests[CONFIG] = sha256(text).hexdigest()
    if source is not None:
        _write_weights(source, small, folder / WEIGHTS)
        digests[WEIGHTS] = ""  # is never compared
    return replace(model, path=folder, digests=digests, settings=small.settings)


def _write_weights(source: Path, small: Small, path: Path) -> None:
    """Copies the weights of the kept layers, of all shards, into one file.

    The format: github.com/huggingface/safetensors, README "Format".
    """
    pieces: dict[str, _Piece] = {}
    for shard in sorted(source.glob("*.safetensors")):
        header = safetensors_header(shard)
        with open(shard, "rb") as file:
            data = _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            pieces[name] = _Piece(shard, data + begin, end - begin, entry)
    kept = sorted(kept_weights(pieces, small.layers, small.of))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in kept:
        piece = pieces[name]
        header[name] = {**piece.entry, "data_offsets": [offset, offset + piece.size]}
        offset += piece.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in kept:
            _copy(pieces[name], file)


def _copy(piece: _Piece, target: Any) -> None:
    with open(piece.path, "rb") as source:
        source.seek(piece.begin)
        left = piece.size
        while left:
            data = source.read(min(left, AT_ONCE))
            if not data:
                raise OSError(None, "the file became shorter", str(piece.path))
            target.write(data)
            left -= len(data)
