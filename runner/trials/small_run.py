"""What a rehearsal changes about a run: fewer layers and rows, a small batch, two steps, no GPU.

config.json -> the config.json of the small model, and its folder: links to the staged files, and
those weights that belong to its layers. They are copied as bytes, so torch is not imported, and
nothing but them is read. Run -> the run that is rehearsed, with the reason of each change. All else
stays: task, engine, LoRA, optimizer, sequence length, tokenizer, ds_config.json.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.child import in_child
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe
from runner.from_stage import keys_of
from runner.inputs import ModelInput
from runner.job.host_memory import free_on_machine, host_memory
from runner.job.memory import state_needed
from runner.job.model_probe import count_parameters
from runner.job.run_data import bytes_of_text
from runner.job.shapes import Device
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from stage.bundle.inspect import safetensors_header

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
    cut_settings = {**shorter, key: kept}
    if inner is not settings:
        cut_settings = {**settings, "text_config": cut_settings}
    return Small(cut_settings, kept, of)


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


def write_small_model(
    model: ModelInput, small: Small, folder: Path, source: Path | None
) -> ModelInput:
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


RANKS = 2  # the fewest that exchange something
STEPS = 2  # one, a checkpoint, and one after the resume
BYTES_OF_A_TOKEN = 16
"""More than any text has on average, so that the rows that are read fill the sequences."""
ROWS = {"train": 32, "validation": 8}
"""Rows that are read where each is a sample."""
LIBRARIES = 2**30
"""Bytes that Python, torch and its libraries take per rank."""
_AT_A_TIME = 3 * 2**28  # bytes of logits, their gradient and their float32 copy, per rank


class SmallRun(NamedTuple):
    """The run that is rehearsed, and what differs from the user's."""

    run: TrainingRun
    changes: tuple[Choice, ...]


def small_run(run: TrainingRun, hidden: Path, model: ModelInput, zero: int | None) -> SmallRun:
    """Returns the run that is rehearsed, still with all rows.

    The changes are made in the settings that were read, not with `--set`: a ds_config.json with
    another batch or precision would contradict them.

    Args:
        run: the user's.
        hidden: the rehearsal's folder.
        model: the small model.
        zero: the ZeRO stage of the job; None: not known.
    """
    changes = [*_shorter(run.config), *_without_gpus(run.config)]
    engine = run.config.engine
    if engine.name == "deepspeed" and engine.zero == "auto" and zero is not None:
        changes.append(Choice("engine.zero", zero, "what the whole model gets in the job"))
    if run.config.model.folder is not None and model is not run.inputs.model:
        changes.append(Choice("model.init", "pretrained", ""))  # its weights are in the small model
    config = replace(run.config, accumulation=None)
    for choice in changes:
        config = _changed(config, choice.key, choice.value)
    inputs = replace(run.inputs, model=model, environment=None)
    small = replace(run, config=config, inputs=inputs, folder=RunFolder(hidden / "run"))
    return SmallRun(small, tuple(choice for choice in changes if choice.reason))


def _changed(component: Any, key: str, value: object) -> Any:
    """A component of a run file with another value at a dotted key."""
    first, _, rest = key.partition(".")
    name = keys_of(type(component))[first].field
    if rest:
        value = _changed(getattr(component, name), rest, value)
    return replace(component, **{name: value})


def _shorter(config: RunConfig) -> list[Choice]:
    """Two steps of two ranks, each with its checkpoint. What has no reason follows from these."""
    return [
        Choice("batch.global", RANKS, f"{RANKS} ranks, one sequence each"),
        Choice("batch.micro", 1, ""),
        Choice("steps", STEPS, "one, a checkpoint, and one after the resume"),
        Choice("epochs", None, ""),
        Choice("environment", None, ""),
        Choice("hang_after", "auto", ""),
        Choice("checkpoint.every", 1, ""),
        Choice("checkpoint.keep", 1, ""),
        Choice("evaluation.patience", None, ""),
    ]


def _without_gpus(config: RunConfig) -> list[Choice]:
    """Replaces what only a GPU or the node of a job can have."""
    changes = []
    if config.precision in ("auto", "fp16"):
        asked = "" if config.precision == "auto" else f", instead of {config.precision}"
        changes.append(Choice("precision", "fp32", f"on a CPU{asked}"))
    if config.compile:
        changes.append(Choice("compile", False, "it needs the compiler of the nodes"))
    if config.engine.offload == "nvme":
        changes.append(Choice("engine.offload", "cpu", "nvme is a disk of the nodes"))
        changes.append(Choice("engine.nvme_path", None, ""))
    return changes


def with_rows(small: SmallRun, reads: int) -> SmallRun:
    """Limits the rows that are read of each dataset.

    Args:
        small: of `small_run`.
        reads: how many times as many rows are read as should be enough.
    """
    config, inputs = small.run.config, small.run.inputs
    limits: list[dict[str, int]] = [{} for _ in inputs.datasets]
    for role, several in small.run.recipes.items():
        sequences = RANKS * STEPS if role == "train" else RANKS
        for limit, data in zip(limits, inputs.datasets, strict=True):
            for recipe in (r for r in several if r.dataset is data.settings):
                most = recipe.split.rows if recipe.limit is None else recipe.limit
                limit[role] = max(1, min(_rows(recipe, sequences, role) * reads, most))
    sources = tuple(
        replace(source, limit=limit) for source, limit in zip(config.sources, limits, strict=True)
    )
    if config.dataset is not None:
        config = replace(config, dataset=sources[0])
    else:
        config = replace(config, datasets=sources)
    datasets = tuple(
        replace(data, settings=source)
        for data, source in zip(inputs.datasets, sources, strict=True)
    )
    rows = ", ".join(f"{data.settings.limit['train']} of {data.asset}" for data in datasets)
    change = Choice("dataset.limit", rows, "rows that fill these steps")
    limited = replace(small.run, config=config, inputs=replace(inputs, datasets=datasets))
    return SmallRun(limited, (*small.changes, change))


def _rows(recipe: Recipe, sequences: int, role: str) -> int:
    """How many rows should fill so many sequences."""
    if recipe.documents != "joined" or not recipe.split.rows:
        return ROWS[role]
    size = max(1.0, bytes_of_text(recipe) / recipe.split.rows)
    return max(ROWS[role], math.ceil(sequences * recipe.sequence_length * BYTES_OF_A_TOKEN / size))


def counted(run: TrainingRun) -> TrainingRun:
    """Returns a run whose parameters are counted: by transformers, where the model has no weights.

    Raises:
        StageError: as for `shape_of`, or transformers does not build the model.
    """
    if run.shape.num_parameters:
        return run
    what = (run.config, run.config.model.folder or run.inputs.model.path)
    remedy = "Run it where there is more memory."
    return run.given(
        TrainingRun.counted, in_child(count_parameters, what, "counting parameters", remedy)
    )


def memory_needed(run: TrainingRun) -> int:
    """Bytes of this machine's memory that the ranks of a rehearsal need.

    Raises:
        StageError: as for `decide`.
    """
    run = counted(run).on(Device.cpu(2**62), RANKS)
    state = state_needed(run.config, run.shape, RANKS)[run.plan.zero]
    # Rank 0 holds all weights once more while it loads and exports them.
    return RANKS * (state + LIBRARIES + _AT_A_TIME) + 4 * run.shape.num_parameters


def memory_here(environ: Mapping[str, str]) -> int:
    """Bytes of this machine's memory that are free for this user's processes."""
    return min([host_memory(environ), *free_on_machine()])
