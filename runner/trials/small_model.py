"""The folder of a rehearsal's model: links to the staged files, config.json, fewer weights.

The weights are copied as bytes, so torch is not imported, and nothing but them is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.inputs import ModelInput, safetensors_header
from runner.trials.layers import Small, kept_weights

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
