"""Reads parquet footers and safetensors headers of a bundle, without running any code of it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle.verifier import NO_MEANS
from stage.errors import DamageError, shortage
from stage.files import human_count, is_pointer
from stage.lock.document import loads
from stage.lock.model import Column

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
_MAX_HEADER = 100_000_000  # bytes: the limit of the safetensors library
# Bits of a number by its name: `F8_E4M3`, `BF16`, `BOOL`. Small ones share bytes (`F4`).
_DTYPE = re.compile(r"(?:F|BF|I|U|C)([0-9]{1,3})(?:_[A-Z0-9]+)?|BOOL")


def safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name -> its entry, from a safetensors file whose header and size fit together.

    The format (github.com/huggingface/safetensors, README "Format"): 8 bytes of length, a JSON
    header, then the tensors without gaps or overlaps up to the end of the file.

    Raises:
        DamageError: it is not such a file.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            # Each key once, as the format demands.
            header: dict[str, Any] = loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its `__metadata__` is no table of texts")
        end = 0
        for begin, until in sorted(map(_span, header.values())):
            if begin != end:
                raise ValueError(f"a tensor begins at byte {begin}, the one before ends at {end}")
            end = until
        if end != size - 8 - length:
            left = size - 8 - length
            raise ValueError(f"its tensors have {end} bytes, the file has {left} for them")
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        said = (
            str(error) if isinstance(error, ValueError) else f"its header cannot be read: {error!r}"
        )
        problem = _POINTER if is_pointer(path) else said[:200]
        raise DamageError(
            f"{path.name}: not a sound safetensors file: {problem}.", _BROKEN
        ) from None
    return header


def _span(entry: Any) -> tuple[int, int]:
    """Where a tensor begins and ends.

    Raises:
        ValueError, KeyError, TypeError: its dtype, shape and offsets do not fit together.
    """
    (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    known = _DTYPE.fullmatch(dtype)
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"a tensor from byte {begin} to {end}")
    if known is None or len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a tensor of {ascii(dtype)[:20]} {str(shape)[:40]}")
    if (end - begin) * 8 != math.prod(shape) * int(known[1] or 8):
        raise ValueError(f"a tensor of {dtype} {str(shape)[:40]} from byte {begin} to {end}")
    return begin, end


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
