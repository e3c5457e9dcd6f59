"""Files to fetch and to verify: bytes that no tool can compress or skip, made quickly and equal on every run."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

MIB = 2**20
_HEADER = 4096  # bytes of a safetensors file before its tensor: a multiple of what disks write at a time


def write_safetensors(path: Path, size: int) -> None:
    """A safetensors file of `size` bytes with one tensor in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor = size - _HEADER
    text = json.dumps({"weight": {"dtype": "U8", "shape": [tensor], "data_offsets": [0, tensor]}}).encode()
    header = struct.pack("<Q", _HEADER - 8) + text.ljust(_HEADER - 8)
    noise = random.Random(size).randbytes(16 * MIB)
    with open(path, "wb", buffering=0) as file:
        file.write(header)
        for number in range(0, tensor, len(noise)):
            file.write((number.to_bytes(8, "little") + noise[8:])[: tensor - number])


def write_small_files(folder: Path, count: int, size: int) -> list[str]:
    """`count` text files of `size` bytes, a hundred to a folder; returns their paths."""
    noise = random.Random(count)
    paths = []
    for number in range(count):
        path = f"part-{number // 100:03d}/text-{number:05d}.txt"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(noise.randbytes(size // 2).hex())
        paths.append(path)
    return paths
