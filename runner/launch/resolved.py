"""What is decided of a run, as data: `resolved.json` in its folder.

The launcher, or `runner prepare`, writes what needs no device. Each rank reads it, and opens
neither the run file nor the bundle's lock. Rank 0 adds the plan, and sends it to the others. Only
the version of Airlift that wrote it reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import Mistakes, __version__
from runner.job.job import Job
from runner.job.partition import Partition
from runner.job.plan import MicroBound, TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.run_folder.layout import RunFolder, write_json

_NOT_PASSED_ON = (Mistakes, dict[str | None, Partition])
"""Types of fields that serve the launcher alone: mistakes while reading, Slurm's partitions."""


@dataclass(frozen=True)
class Resolved:
    """What is decided of a run.

    Attributes:
        shape: the model's counts.
        stores: `train` and `validation` -> the files of their prepared data.
        data: the key of the training data.
        attempt: counts the starts of the ranks by one launcher, from 1.
        options: of the work that the ranks do, by name.
        bound: what earlier starts have shown of micro batches.
        plan: what `auto` means on the devices; None until rank 0 has decided.
        device: of each rank, known with the plan.
        steps: optimizer steps of the whole run, known with the plan.
        notes: lines that rank 0 prints before the first step.
        version: of Airlift, which may change the format.
    """

    job: Job
    shape: ModelShape
    stores: Mapping[str, tuple[Path, ...]]
    data: str
    attempt: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    bound: MicroBound | None = None
    plan: TrainingPlan | None = None
    device: Device | None = None
    steps: int = 0
    notes: tuple[str, ...] = ()
    version: str = __version__

    @staticmethod
    def of(job: Job, **options: Any) -> Resolved:
        """Decides what needs no device.

        Args:
            options: of the work, by name; they fit into JSON.

        Raises:
            StageError: as for `shape_of`, `sequence_length` and `recipes`.
        """
        bound = _read_bound(job.folder)
        return Resolved(job, job.shape, job.stores, job.data, options=options, bound=bound)

    def decided(self) -> TrainingPlan:
        """The plan, after rank 0 has decided."""
        assert self.plan is not None
        return self.plan


def write(resolved: Resolved) -> None:
    """Writes `resolved.json` into the run folder, atomically."""
    write_json(resolved.job.folder.resolved, _plain(resolved))


def read(folder: RunFolder) -> Resolved:
    """Reads what this start has written to the run folder."""
    found: Resolved = _read(Resolved, json.loads(folder.resolved.read_text(encoding="utf-8")))
    return found


def tried_with(resolved: Resolved) -> dict[str, str]:
    """What decides how much memory a micro batch takes, and how much there is."""
    config, model, plan = resolved.job.config, resolved.job.inputs.model, resolved.decided()
    device, engine = resolved.device, config.engine.name
    assert device is not None
    return {
        "model": f"{model.source}@{model.commit}",
        "task": config.task,
        "sequence_length": str(plan.sequence_length),
        "precision": plan.precision,
        "engine": f"{engine}, stage {plan.zero}, offload {plan.offload}",
        "optimizer": config.optimizer.name,
        "lora": config.lora.describe() if config.lora else "",
        "quantization": config.quantization.describe() if config.quantization else "",
        "activation_checkpointing": str(config.activation_checkpointing),
        "compile": str(config.compile),
        "device": f"{device.name}, {device.memory} bytes",
        "ranks": str(plan.world_size),
    }


def write_bound(folder: RunFolder, bound: MicroBound) -> None:
    """Keeps what a start has shown of micro batches, for the next start of the run."""
    write_json(folder.micro, _plain(bound))


def _read_bound(folder: RunFolder) -> MicroBound | None:
    try:
        found: MicroBound = _read(MicroBound, json.loads(folder.micro.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of another version, or none: the guess is tried again
    return found


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of the fields that pass on."""
    names = [item.name for item in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else ()
    found = typing.get_type_hints(cls)
    return {name: found[name] for name in names or found if found[name] not in _NOT_PASSED_ON}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        cls: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in _hints(cls)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read(hint: Any, data: Any) -> Any:
    """The value of a type that `_plain` has made plain."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        made = [one for one in inner if typing.get_origin(one) in (tuple, dict) or _has_fields(one)]
        made += [one for one in inner if one is Path and data is not None]
        is_made = isinstance(data, dict | list) or Path in made
        return _read(made[0], data) if made and is_made else data
    if hint is Path or origin is frozenset:
        return (origin or hint)(data)
    if _has_fields(hint):
        hints = _hints(hint)
        named = data if isinstance(data, dict) else dict(zip(hints, data, strict=True))
        return hint(**{name: _read(hints[name], item) for name, item in named.items()})
    if origin is tuple:
        items = [inner[0]] * len(data) if inner[-1] is ... else inner
        return tuple(_read(one, item) for one, item in zip(items, data, strict=True))
    if origin in (dict, Mapping):
        pairs = data.items() if isinstance(data, dict) else data
        return {_read(inner[0], key): _read(inner[1], item) for key, item in pairs}
    return tuple(data) if hint is object and isinstance(data, list) else data


def _has_fields(hint: Any) -> bool:
    """Whether a type is a dataclass or a named tuple."""
    return dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
