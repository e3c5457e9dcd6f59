"""torch.distributed.checkpoint: each rank writes what it holds, any number of ranks reads it.

The content is nested dicts, by name: tensors that all ranks hold whole (one rank writes each),
DTensors (each rank writes its shard) and small values.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes `state` into `folder`. All ranks call it.

    Args:
        folder: of the checkpoint.
        state: nested dicts of tensors and small values.

    Raises:
        OSError, RuntimeError: any rank could not write. torch wraps a full disk in the second.
    """
    # AtomicCheckpoint syncs every file, on the rank that hashes it.
    with _first_error(folder):
        writer = FileSystemWriter(folder, sync_files=False)
        state_dict_saver.save(state, storage_writer=writer)


def load(folder: Path, state: dict[str, Any]) -> None:
    """Reads into the tensors of `state`, in place, and replaces small values. All ranks call it.

    Raises:
        OSError, RuntimeError: it cannot be read.
    """
    with _first_error(folder):
        state_dict_loader.load(state, storage_reader=FileSystemReader(folder))


def empty_like_saved(
    folder: Path, section: str, parameters: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Empty tensors for what a section of a checkpoint has of each parameter.

    An optimizer makes its state at its first step, so a new one has nothing to load into. A value
    with a parameter's shape is sharded like the parameter; others are whole.

    Args:
        folder: of the checkpoint.
        section: `optimizer`.
        parameters: by their names in the checkpoint.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    empty: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        prefix = f"{section}.{name}."
        found = {
            key.removeprefix(prefix): entry
            for key, entry in saved.items()
            if key.startswith(prefix)
        }
        if found:
            empty[name] = {
                key: _empty(entry, parameter) for key, entry in found.items() if "." not in key
            }
    return empty


def _empty(entry: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _first_error(folder: Path) -> Iterator[None]:
    """Raises the first error of any rank, an OSError before others.

    torch gathers the errors of all ranks in one that is no `Exception`.
    """
    try:
        yield
    except CheckpointException as error:
        traceback.print_exc()
        problems = [problem for problem, _ in error.failures.values()]
        other = RuntimeError(f"{folder}: {problems[0]}")
        raise next((one for one in problems if isinstance(one, OSError)), other) from None
