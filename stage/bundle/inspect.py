"""Reads parquet footers and safetensors headers of a bundle, without running any code of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.errors import NO_MEANS, DamageError, shortage
from stage.files import human_count, is_pointer
from stage.lock.model import Column
from stage.strict_json import loads

WEIGHTS = re.compile(r"model(-.*)?\.safetensors")
TOKENIZER = re.compile(
    r"tokenizer\.(json|model)|tokenizer_config\.json|vocab\.(txt|json)|spiece\.model"
    r"|sentencepiece.*|.*\.tiktoken"
)


@dataclass(frozen=True)
class ParquetFooter:
    """The footer of a parquet file: rows, and columns with their Arrow types."""

    rows: int
    schema: tuple[Column, ...]


def parquet_footer(path: Path) -> ParquetFooter:
    """Reads the footer of a parquet file, not its rows.

    Raises:
        DamageError: it is no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = tuple(Column(f.name, str(f.type)) for f in file.schema_arrow)
            stated, groups = file.metadata.num_rows, file.metadata.num_row_groups
            rows = sum(file.metadata.row_group(number).num_rows for number in range(groups))
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if shortage(error) or (isinstance(error, OSError) and error.errno in NO_MEANS):
            raise
        problem = _POINTER if is_pointer(path) else str(error)
        raise DamageError(
            f"{path.name}: not a parquet file that pyarrow can read: {problem}.", _BROKEN
        ) from None
    if rows != stated or rows < 0:
        raise DamageError(
            f"{path.name}: its footer states {stated} rows, its row groups have {rows}.", _BROKEN
        )
    return ParquetFooter(rows, columns)


_POINTER = "it is a Git LFS pointer, not the file itself"
_BROKEN = "The repository's file itself is broken: try another revision."
MAX_HEADER = 100_000_000  # bytes: the limit of the safetensors library
# Bits of a number by its name: `F8_E4M3`, `BF16`, `BOOL`. Small ones share bytes (`F4`).
_DTYPE = re.compile(r"(?:F|BF|I|U|C)([0-9]{1,3})(?:_[A-Z0-9]+)?|BOOL")
MAX_LENGTH = 2**63 - 1  # of a dimension, a tensor, a file


def safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name -> its entry, from a safetensors file whose header and size fit together.

    The format (github.com/huggingface/safetensors, README "Format"): 8 bytes of length, a JSON
    header, then the tensors without gaps or overlaps up to the end of the file.

    Raises:
        DamageError: it is not such a file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _no_safetensors(path, f"it has {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER or length > size - 8:
            raise _no_safetensors(
                path, f"its header would have {length} bytes, the file has {size}"
            )
        text = file.read(length)
    try:
        header = loads(text)  # each key once, as the format demands
    except (ValueError, RecursionError):
        raise _no_safetensors(path, "its header is not JSON, or has a key twice") from None
    if not isinstance(header, dict):
        raise _no_safetensors(path, "its header is not a mapping")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _no_safetensors(path, "its metadata are not texts")
    spans = sorted(_span(path, name, entry) for name, entry in header.items())
    end = 0
    for begin, until, name in spans:
        if begin != end:
            raise _no_safetensors(
                path, f"{name!r} begins at byte {begin}, the one before it ends at {end}"
            )
        end = until
    if end != size - 8 - length:
        raise _no_safetensors(
            path, f"its tensors have {end} bytes, the file has {size - 8 - length} for them"
        )
    return header


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise _no_safetensors(path, f"{name!r} lacks dtype, shape or data_offsets")
    name = ascii(name[:200])[1:-1]
    if (
        not all(
            type(number) is int and 0 <= number <= MAX_LENGTH for number in (begin, end, *shape)
        )
        or begin > end
    ):
        raise _no_safetensors(path, f"{name!r} has a shape or offsets that cannot be")
    known = _DTYPE.fullmatch(dtype)
    if known is None:
        raise _no_safetensors(path, f"{name!r} is of the unknown kind {dtype[:20]!a}")
    if (end - begin) * 8 != _numbers(shape) * int(known[1] or 8):
        raise _no_safetensors(path, f"{name!r} is {dtype} {shape[:9]} and has {end - begin} bytes")
    return begin, end, name


def _numbers(shape: list[int]) -> int:
    """How many numbers a tensor of this shape has; at most `MAX_LENGTH + 1`."""
    if 0 in shape:
        return 0
    count = 1
    for length in shape:
        count = min(count * length, MAX_LENGTH + 1)
    return count


def _no_safetensors(path: Path, problem: str) -> DamageError:
    problem = _POINTER if is_pointer(path) else problem
    return DamageError(f"{path.name}: not a sound safetensors file: {problem}.", _BROKEN)


def index_problems(weight_map: Any, tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong between an index of shards and the shards here.

    Args:
        weight_map: tensor -> file, as the index has it.
        tensors: file -> its header, for every safetensors file in the folder of the index.
    """
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        return ["has no `weight_map` of tensors to files"]
    missing = sorted({file for file in weight_map.values() if file not in tensors})
    problems = [f"names {file}, which is not here" for file in missing]
    lost = [f"{t} ({f})" for t, f in weight_map.items() if f in tensors and t not in tensors[f]]
    if lost:
        count = human_count(len(lost), "tensor")
        problems.append(f"names the wrong file for {count}: {lost[0]} first")
    return problems
