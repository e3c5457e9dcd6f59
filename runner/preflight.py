"""Everything that can be known to fail before a rank starts, in seconds, on a machine without a GPU.

(run file, inputs, ranks if known) -> lines for people, or the first `UsageError`. Reads headers and configs only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import struct
from pathlib import Path

from runner.config import RunConfig
from runner.data.instruction import Writer
from runner.data.recipe import data_key, documents_of, recipes
from runner.data.tokenizing import frame, load_tokenizer
from runner.errors import IncompleteError, PolicyError, UsageError, human_count, human_size
from runner.history import earlier_settings, settings_of
from runner.inputs import DatasetInput, Inputs, ModelInput, verification
from runner.lora import with_lora
from runner.memory import state_in_words, state_needed
from runner.plan import Plan, check_batch, decide, sequence_length
from runner.records import RunFolder
from runner.resume import check_before_launch, signature
from runner.shapes import Device, ModelShape
from runner.without_torch import check_wrap, leave_torch_alone, models_in_transformers, targets_in_peft

TABLES = {
    "masked-lm": "MASKED_LM",
    "causal-lm": "CAUSAL_LM",
    "instruction": "CAUSAL_LM",
    "image-classification": "IMAGE_CLASSIFICATION",
}
LARGEST_HEADER = 100 * 2**20  # bytes; safetensors' own limit


def check(
    config: RunConfig, inputs: Inputs, folder: RunFolder, world_size: int | None, device: Device | None = None
) -> list[str]:
    """Checks a run before anything is launched.

    Args:
        world_size: ranks, where that is known.
        device: what each of them will have, where that is known.

    Returns:
        What was found, a line each.

    Raises:
        UsageError: what cannot work, with what would; a checkpoint of another run.
        PolicyError: the bundle has to be verified, and is not.
        IncompleteError: the disk is too small for the checkpoints.
    """
    leave_torch_alone()
    _check_installed(config)
    verified = _check_verified(config, inputs)
    model = inputs.model
    shape = shape_of(config, model)
    length, _ = sequence_length(config, shape)
    layers = _check_model_for_task(config, model)
    documents = documents_of(config, model, length)
    how = _check_tokenizer(config, model, shape)
    if world_size is not None:
        check_batch(config, world_size)
    plan = decide(config, shape, device, world_size) if device is not None and world_size is not None else None
    total = config.batch.total
    now = signature(
        config, inputs, data_key(recipes(config, inputs, length)["train"]), total if isinstance(total, int) else None
    )
    resumed = check_before_launch(
        folder.checkpoints,
        now,
        world_size,
        config.steps,
        config.engine.name,
        config.precision,
        _changed(config, folder),
    )
    needed = disk_needed(config, shape)
    _check_disk(config, folder, needed)
    lines = [
        verified,
        f"model {model.asset}: {model.settings.get('model_type')}, {shape.num_parameters / 1e6:.1f} M parameters, "
        f"init {config.model.init}",
        *(_described(config, data, length) for data in inputs.datasets),
        *([f"packing.documents: {documents.value}  ({documents.reason})"] if how is not None else []),
        *([f"samples are written {how}"] if how else []),
        f"disk: up to {human_size(needed)} for {config.checkpoint.keep} checkpoints and the model",
    ]
    if world_size is not None:
        state = state_needed(config, shape, world_size)
        sizes = ", ".join(f"{stage}: {human_size(size)}" for stage, size in state.items())
        words = state_in_words(config, shape)
        lines.append(f"model state a rank, by ZeRO stage, on {human_count(world_size, 'rank')} ({words}): {sizes}")
    if plan is not None and device is not None:
        lines.append(f"it fits: {device.name}, {human_size(device.memory)} a rank; {_decided(config, plan)}")
    lines += [layers] if layers else []
    return [*lines, resumed] if resumed else lines


def _changed(config: RunConfig, folder: RunFolder) -> list[str]:
    """The keys of which the training data depends, where the run that is gone on from had others; with both values."""
    before, after = earlier_settings(folder), settings_of(config)
    same = ("sequence_length", "packing", "dataset", "datasets")
    return [
        f"{key} {before.get(key)} (now {after.get(key)})"
        for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "sequence_length", key))
        if before and before.get(key) != after.get(key) and key.split(".")[0] in same
    ]


def _decided(config: RunConfig, plan: Plan) -> str:
    zero = f"ZeRO stage {plan.zero}, " if config.engine.name == "deepspeed" else ""
    return f"{plan.precision}, {zero}micro batch {plan.micro}"


def _check_installed(config: RunConfig) -> None:
    """What the run file asks for beyond torch and transformers; an environment of the bundle may have what we lack."""
    needs = {
        f"engine.name: {config.engine.name}": "deepspeed" if config.engine.name == "deepspeed" else None,
        f"optimizer.name: {config.optimizer.name}": "bitsandbytes" if config.optimizer.name.endswith("8bit") else None,
        "lora": "peft" if config.lora else None,
        "quantization": "bitsandbytes" if config.quantization else None,
    }
    for key, package in needs.items():
        if package and config.environment is None and importlib.util.find_spec(package) is None:
            raise UsageError(f"{config.path}: {key} needs {package}, which is not installed.", f"pip install {package}")


def _check_verified(config: RunConfig, inputs: Inputs) -> str:
    known = verification(inputs.bundle, os.environ)
    if not known.holds and config.bundle.verified == "required":
        raise PolicyError(
            f"{config.path}: `bundle.verified: required`, and {inputs.bundle} is not: {known.words}.",
            f"stage verify {inputs.bundle}",
        )
    told = known.words if known.holds else f"{known.words} (stage verify {inputs.bundle} reads every byte)"
    return f"bundle {inputs.bundle_id[:12]}: {told}"


def disk_needed(config: RunConfig, shape: ModelShape) -> int:
    """Bytes a run writes at most: `keep` checkpoints, the best one, one more while it is written, and the model.

    A checkpoint holds weights and Adam's two moments in fp32 (12 bytes a parameter) and the weights once more (4). With
    LoRA it holds those of what is trained (at ZeRO stage 3 of all weights: 4 more), and the model is whole if merged.
    """
    if shape.num_trained is not None:
        may_be_stage_3 = config.engine.name == "deepspeed" and config.engine.zero in ("auto", 3)
        frozen = 4 * shape.num_parameters if may_be_stage_3 and not config.quantization else 0
        checkpoints = (16 * shape.num_trained + frozen) * (config.checkpoint.keep + 1 + config.checkpoint.best)
        merged = config.lora is not None and config.lora.merge
        return checkpoints + 4 * (shape.num_parameters if merged else shape.num_trained)
    return shape.num_parameters * (16 * (config.checkpoint.keep + 1 + config.checkpoint.best) + 4)


def shape_of(config: RunConfig, model: ModelInput) -> ModelShape:
    """What the arithmetic needs of a run's model, with what of it is trained.

    Raises:
        UsageError: a header cannot be read; a target of LoRA that no weight belongs to.
    """
    shapes = weight_shapes(model)
    number = None if shapes is None else sum(math.prod(shape) for shape in shapes.values())
    shape = ModelShape.of(model.settings, number)
    return with_lora(shape, config, shapes, default_targets(config, model.settings.get("model_type")))


def default_targets(config: RunConfig, model_type: object) -> list[str]:
    """peft's own targets for an architecture, where the run file names none; empty: it has none either."""
    if config.lora is None or config.lora.targets:
        return []
    return targets_in_peft(str(model_type))


def weight_shapes(model: ModelInput) -> dict[str, list[int]] | None:
    """Name -> shape of every weight according to the safetensors headers; None without weights.

    Raises:
        UsageError: a header cannot be read.
    """
    weights = [name for name in model.digests if name.endswith(".safetensors")]
    return {k: s for name in weights for k, s in _shapes_in(model.path / name).items()} if weights else None


def _shapes_in(path: Path) -> dict[str, list[int]]:
    """safetensors: u64 little-endian header length, then JSON (github.com/huggingface/safetensors, README)."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > LARGEST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        return {name: [int(n) for n in entry["shape"]] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"{path}: not a safetensors file: {error}.", "Run `stage verify` on the bundle.") from None


def _check_model_for_task(config: RunConfig, model: ModelInput) -> str | None:
    """Refuses what transformers cannot do with this model; a line on its layers, where the run file names one."""
    names = {task: models_in_transformers(f"MODEL_FOR_{table}_MAPPING_NAMES") for task, table in TABLES.items()}
    kind = model.settings.get("model_type")
    if kind not in names[config.task]:
        other = next((task for task, known in names.items() if kind in known), None)
        raise UsageError(
            f"{config.path}: transformers has no {config.task} model of type `{kind}` ({model.path / 'config.json'}).",
            f"Set task: {other}" if other else "Use another model.",
        )
    if (
        config.task in ("causal-lm", "instruction")
        and kind in names["masked-lm"]
        and not model.settings.get("is_decoder")
    ):
        raise UsageError(
            f"{config.path}: `{config.model.asset}` ({kind}) is an encoder: a token would see the one it has to guess.",
            "Set task: masked-lm, or use a decoder such as GPT-2.",
        )
    _check_first_weights(config, model)
    if config.lora is not None and "quantization_config" in model.settings:
        raise UsageError(
            f"{config.path}: `{model.asset}` is quantised already ({model.path / 'config.json'}); LoRA here begins "
            "with whole weights, and quantises them itself.",
            "Stage the model that it was made from.",
        )
    if config.model.init == "pretrained" and not any(name.endswith(".safetensors") for name in model.digests):
        raise UsageError(
            f"{config.path}: `{model.asset}` has no weights in this bundle.",
            "Set model.init: scratch, or stage the weights.",
        )
    return check_wrap(config, names[config.task], str(kind))


def _described(config: RunConfig, data: DatasetInput, length: int) -> str:
    share = f", weight {data.settings.weight:g}" if len(config.sources) > 1 else ""
    validation = f"{data.validation.rows:,} to validate" if data.validation else "0 to validate"
    each = "" if config.task == "image-classification" else f"; sequences of {length} tokens"
    return f"data {data.asset}/{data.config}: {data.train.rows:,} rows to train on, {validation}{share}{each}"


def _check_tokenizer(config: RunConfig, model: ModelInput, shape: ModelShape) -> str | None:
    """How instruction samples are written, empty for other texts; None: there are no texts."""
    if config.task == "image-classification":
        return None
    tokenizer = load_tokenizer(model)
    frame(config.task, tokenizer)
    _check_vocabulary(config, model, len(tokenizer), shape)
    if config.task != "instruction":
        return ""
    return "; ".join(dict.fromkeys(Writer.of(source, tokenizer).words for source in config.sources))


def _check_first_weights(config: RunConfig, model: ModelInput) -> None:
    """Weights of a folder must be of the asset's own architecture: tokenizer and config are the asset's."""
    if config.model.folder is None:
        return
    path = config.model.folder / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        shapes = [ModelShape.of(settings, 1) for settings in (theirs, model.settings)]
        same = theirs.get("model_type") == model.settings.get("model_type") and shapes[0] == shapes[1]
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not a model's config: {error}.", "Export the model again.") from None
    if not same:
        raise UsageError(
            f"{config.path}: model.init: the weights in {config.model.folder} are not of the shape of `{model.asset}`.",
            "Name the asset that the first run began with.",
        )


def _check_vocabulary(config: RunConfig, model: ModelInput, num_tokens: int, shape: ModelShape) -> None:
    if shape.vocabulary and num_tokens > shape.vocabulary:
        raise UsageError(
            f"{config.path}: the tokenizer of `{model.asset}` knows {num_tokens} tokens, its model {shape.vocabulary}.",
            "Tokenizer and model do not belong together: stage both from one repository.",
        )


def _check_disk(config: RunConfig, folder: RunFolder, needed: int) -> None:
    place = folder.root.absolute()
    while not place.exists():
        place = place.parent
    free, more = shutil.disk_usage(place).free, disk_still_needed(config, folder.checkpoints, needed)
    if free < more:
        there = f" beside the checkpoints that are there ({human_size(needed)} in all)" if more < needed else ""
        fewer = ", or keep fewer: --set checkpoint.keep=1" if config.checkpoint.keep > 1 else ""
        raise IncompleteError(
            f"{folder.root}: checkpoints and model need up to {human_size(more)}{there}; {human_size(free)} are free.",
            f"Free space there{',' if fewer else ' or'} choose another --output{fewer}",
        )


def disk_still_needed(config: RunConfig, checkpoints: Path, needed: int) -> int:
    """Of the bytes that a run needs at most, those that its own checkpoints do not take already.

    A newer checkpoint takes an older one's place, but only once it is whole: room for one is always needed.
    """
    there = sum(p.stat().st_size for p in checkpoints.glob("step-*/**/*") if p.is_file())
    one = needed // (config.checkpoint.keep + 1 + config.checkpoint.best)
    return max(needed - there, one)
