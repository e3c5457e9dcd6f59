"""Checks everything that can be known to fail before a rank starts, without a GPU, in seconds.

(run file, inputs, number of ranks if known) -> facts, warnings, and all errors at once. It reads
headers, configs, the tokenizer, and small texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.config.run_config import RunConfig
from runner.config.tasks import data_of
from runner.data.instruction import Writer, try_first_rows
from runner.data.recipe import documents_of, recipes
from runner.data.tokenizer_files import check_tokenizer_files
from runner.data.tokenizing import frame, load_tokenizer, word_begins
from runner.disks import read_mounts
from runner.errors import (
    DamageError,
    PolicyError,
    UsageError,
    check_libraries,
    human_count,
    human_size,
)
from runner.inputs import (
    Inputs,
    ModelInput,
    verification,
)
from runner.job.access import (
    check_disk,
    check_quota,
    check_readable,
    check_writable,
    disk_needed,
    files_to_read,
    nearest_folder,
)
from runner.job.findings import Finding, Findings
from runner.job.installed import (
    check_environment,
    check_fsdp,
    is_installed,
    is_light,
    left_to_ranks,
    why_not_here,
)
from runner.job.load_memory import check_at_load
from runner.job.memory import describe_state, state_needed
from runner.job.model import check_config, check_index, check_model
from runner.job.plan import (
    TrainingPlan,
    check_batch,
    decide,
    sequence_length,
    stage_of,
)
from runner.job.resume import check_checkpoint, note_changes
from runner.job.settings import (
    check_accumulation,
    check_micro,
    check_precision,
    check_rate,
    check_warmup,
)
from runner.job.shapes import (
    Device,
    ModelShape,
    describe_new_tokens,
    human_parameters,
    shape_of,
    weight_shapes,
)
from runner.job.texts import check_classes, check_texts, describe_dataset
from runner.job.transformers_tables import leave_torch_alone
from runner.job.vocabulary import check_vocabulary, read_vocabulary, serves
from runner.job.weights import check_weights, embedding_of
from runner.run_folder.layout import RunFolder


def check(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    world_size: int | None,
    device: Device | None = None,
) -> list[str]:
    """Checks a run before anything is launched. See `examine`.

    Returns:
        Lines for the user.

    Raises:
        StageError: the error that was found, or one that lists all.
    """
    found = examine(config, inputs, folder, world_size, device)
    found.raise_errors()
    return [*found.lines, *found.details, *map(str, found.others)]


def examine(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    world_size: int | None,
    device: Device | None = None,
    *,
    with_texts: bool = False,
) -> Findings:
    """Finds everything that can be known about a run before it is launched.

    Args:
        config: the run file.
        inputs: model, datasets and environment of the run.
        folder: the run folder; it need not exist.
        world_size: number of ranks; None: not known.
        device: the device of each rank; None: not known.
        with_texts: whether small datasets are prepared, to see whether they fill a step.

    Returns:
        Facts, warnings, and errors: UsageError (the run cannot work, or the checkpoint is of
        another run), DamageError (the bundle is known to be damaged), PolicyError (it must be
        verified, and is not), IncompleteError (no space, inodes or quota).
    """
    found = Findings()
    found.attempt(check_libraries, f"{config.path}: the check of its data", "pyarrow")
    found.attempt(check_readable, files_to_read(inputs))
    if found.errors:
        return found  # a bundle that is closed must not be called damaged
    verified = found.attempt(_check_verified, config, inputs)
    if any(isinstance(error, DamageError) for error in found.errors):
        return found  # everything else would follow from it
    with found.keeping():
        _check_writable(folder)
    found.attempt(_check_installed, config)
    found.attempt(check_environment, config, inputs)
    found.attempt(_check_patience, config, inputs)
    if device is not None and not why_not_here(config):
        found.attempt(check_fsdp, config, device.kind)
    found.lines += [verified] if verified else []
    shape = found.attempt(shape_of, config, inputs.model)
    before = len(found.errors)
    found.attempt(check_model, config, inputs.model)
    if shape is not None and len(found.errors) == before:
        found.attempt(check_config, config, inputs.model)
    if shape is not None:
        _examine_model(found, config, inputs.model, shape)
        model_fits = len(found.errors) == before
        length, total = _examine_run(found, config, inputs, folder, shape, world_size, device)
        if model_fits:
            found.attempt(_examine_tokenizer, found, config, inputs, shape, length)
        if with_texts and length is not None and not found.errors:
            wanted = recipes(config, inputs, length)
            classes = check_classes(wanted)
            found.errors += classes.errors
            found.others += classes.others
        if with_texts and length is not None and not found.errors and not is_light():
            texts = check_texts(config, wanted, folder.stores, total)
            found.errors += texts.errors
            found.others += texts.others
    found.lines += filter(None, [left_to_ranks(config)])
    return found


def _check_writable(folder: RunFolder) -> None:
    places = {nearest_folder(path): path for path in (folder.stores, folder.root)}
    for path in places.values():
        check_writable(path)


def _examine_model(
    found: Findings, config: RunConfig, model: ModelInput, shape: ModelShape
) -> None:
    """Compares config.json, weights and tokenizer of a model. Loads none of them."""
    shapes: Mapping[str, Sequence[int]] = {}
    if config.model.init != "scratch" and config.model.folder is None:
        shapes = weight_shapes(model) or {}
        errors, warnings = check_weights(model.asset, model.settings, shapes)
        found.errors += errors
        found.others += warnings
        found.attempt(check_index, config, model)
    if config.task == "image-classification":
        return
    vocabulary = found.attempt(read_vocabulary, model.path)
    embedding = embedding_of(shapes)
    rows = {"its vocab_size": shape.vocabulary}
    if embedding is not None:
        rows |= {f"its {embedding.name} has so many rows": embedding.rows}
    known = {where: number for where, number in rows.items() if number}
    if vocabulary is not None and known:
        where = min(known, key=lambda name: known[name])
        errors, warnings = check_vocabulary(
            model.asset, config.task, vocabulary, known[where], where
        )
        found.errors += errors
        found.others += warnings


def _examine_tokenizer(
    found: Findings, config: RunConfig, inputs: Inputs, shape: ModelShape, length: int | None
) -> None:
    if how := _check_tokenizer(config, inputs, shape):
        found.lines.append(f"samples are written {how}")
    if config.task != "instruction" or length is None or not is_installed("transformers"):
        return
    leave_torch_alone()
    tokenizer = load_tokenizer(inputs.model)
    for recipe in recipes(config, inputs, length)["train"]:
        if problem := found.attempt(try_first_rows, recipe, tokenizer):
            remedy = (
                "Look at these rows: in `messages`, the answers need the role `assistant`; "
                "dataset.response names the column of the answers; a longer sequence_length, or "
                "dataset.too_long: cut, keeps long rows."
            )
            found.others.append(Finding("warning", f"{config.path}: {problem}.", remedy))


def _examine_run(
    found: Findings,
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    shape: ModelShape,
    world_size: int | None,
    device: Device | None,
) -> tuple[int | None, int | None]:
    """Finds what follows from the model's shape: length, batch, memory, checkpoints, disk.

    Returns:
        Tokens of a sequence and sequences of a step; None: not known.
    """
    model = inputs.model
    length = documents = plan = resumed = None
    with found.keeping():
        length, _ = sequence_length(config, shape)
        documents = documents_of(config, model, length)
    if device is not None and world_size is not None and length is not None:
        plan = found.attempt(decide, config, shape, device, world_size)
    elif world_size is not None:
        found.attempt(check_batch, config, world_size)
    if plan is not None and device is not None:
        _examine_memory(found, config, shape, plan, device)
    if length is not None and documents is not None:
        resumed = found.attempt(check_checkpoint, config, inputs, folder, length, world_size)
        found.others += note_changes(config, folder) if resumed else []
    needed = disk_needed(config, shape)
    found.attempt(check_disk, config, folder, shape, needed)
    found.attempt(check_quota, folder.root, needed, read_mounts())
    found.lines += [
        f"model {model.asset}: {model.settings.get('model_type')}, "
        f"{human_parameters(shape.num_parameters)}, init {config.model.init}",
        *filter(None, [describe_new_tokens(shape, model)]),
        *(describe_dataset(config, data, length or 0) for data in inputs.datasets),
    ]
    if config.task != "image-classification" and documents is not None:
        found.lines.append(f"packing.documents: {documents.value}  ({documents.reason})")
    found.details.append(
        f"disk: up to {human_size(needed)} for "
        f"{human_count(config.checkpoint.keep, 'checkpoint')} and the model"
    )
    _describe_memory(found, config, shape, plan, device, world_size)
    found.lines += [resumed] if resumed else []
    total, micro = (plan.total, plan.micro) if plan else (config.batch.total, config.batch.micro)
    precision = plan.precision if plan else config.precision
    found.others += [*check_precision(config, model.settings, precision), *check_warmup(config)]
    found.others += check_rate(config)
    if world_size is not None and isinstance(total, int) and isinstance(micro, int):
        found.others += check_accumulation(config, total, micro, world_size)
    return length, total if isinstance(total, int) else None


def _examine_memory(
    found: Findings,
    config: RunConfig,
    shape: ModelShape,
    plan: TrainingPlan,
    device: Device,
) -> None:
    """Compares the memory of the node and, for a micro batch of the run file, of the GPU."""
    decided = replace(config, precision=plan.precision)  # type: ignore[arg-type]
    on_node = -(-plan.world_size // config.slurm.nodes)
    found.attempt(check_at_load, decided, shape, plan, device, on_node)
    if device.kind == "cuda" and isinstance(config.batch.micro, int) and not found.errors:
        errors, warnings = check_micro(decided, shape, plan, device)
        found.errors += errors
        found.others += warnings


def _describe_memory(
    found: Findings,
    config: RunConfig,
    shape: ModelShape,
    plan: TrainingPlan | None,
    device: Device | None,
    world_size: int | None,
) -> None:
    if world_size is not None:
        state = state_needed(config, shape, world_size)
        ranks, by = human_count(world_size, "rank"), ", by ZeRO stage,"
        sizes = ", ".join(f"{stage}: {human_size(size)}" for stage, size in state.items())
        if config.engine.name != "deepspeed":
            by, sizes = "", human_size(state[stage_of(config.engine)])
        found.details.append(
            f"model state per rank{by} on {ranks} ({describe_state(config, shape)}): {sizes}"
        )
    if plan is not None and device is not None:
        name = config.engine.name
        engine = f"ZeRO stage {plan.zero}" if name == "deepspeed" else name
        found.lines.append(
            f"the memory fits: {device.name}, {human_size(device.memory)} per rank; "
            f"{plan.precision}, {engine}, micro batch {plan.micro}"
        )
        if device.kind == "cpu" and config.quantization is not None:
            found.lines.append(
                "quantised weights are unpacked for each product on a CPU: slow, for trials only"
            )


def _check_installed(config: RunConfig) -> None:
    """Refuses a run that needs a package which the environment of this command does not have."""
    if is_light() or config.environment is not None:
        return  # `left_to_ranks` says so
    needs = {
        f"engine.name: {config.engine.name}": "deepspeed"
        if config.engine.name == "deepspeed"
        else None,
        f"optimizer.name: {config.optimizer.name}": "bitsandbytes"
        if config.optimizer.name.endswith("8bit")
        else None,
        "lora": "peft" if config.lora else None,
        "quantization": "bitsandbytes" if config.quantization else None,
        "wandb: true": "wandb" if config.wandb else None,
    }
    for key, package in needs.items():
        if package and not is_installed(package):
            raise UsageError(
                f"{config.place(key.partition(':')[0])}: {key} needs {package}, which is not "
                "installed.",
                f"pip install {package}",
            )


def _check_patience(config: RunConfig, inputs: Inputs) -> None:
    """Checks that a run that may end early has something to evaluate on."""
    if config.evaluation.patience is not None and not any(d.validation for d in inputs.datasets):
        raise UsageError(
            f"{config.place('evaluation.patience')}: "
            "evaluation.patience needs a validation split, and none is read.",
            "Set dataset.validation to a split of the dataset, or to a share of the training split "
            "(validation: 5%); or remove evaluation.patience.",
        )


def _check_verified(config: RunConfig, inputs: Inputs) -> str:
    known = verification(inputs.bundle, os.environ)
    command = (
        f"stage verify {inputs.bundle}{f' --id {config.bundle.id}' if config.bundle.id else ''}"
    )
    if not known.holds and config.bundle.verified == "required":
        raise PolicyError(
            f"{config.place('bundle.verified')}: "
            f"`bundle.verified: required`, and {inputs.bundle} is not: "
            f"{known.text}.",
            command,
        )
    state = known.text if known.holds else f"{known.text} ({command} reads every byte)"
    return f"bundle {inputs.bundle_id[:12]}: {state}"


def _check_tokenizer(config: RunConfig, inputs: Inputs, shape: ModelShape) -> str | None:
    """Checks that the tokenizer fits the task and the model.

    Returns:
        How instruction samples are written; empty for other texts; None: the task reads no text.
    """
    model = inputs.model
    if data_of(config.task) == "images":
        return None
    if not is_installed("transformers"):
        known = read_vocabulary(model.path) is not None  # compared already
        check_tokenizer_files(config, model, 0 if known else shape.vocabulary)
        return None
    if (
        read_vocabulary(model.path) is not None
        and serves(config.task, model)
        and not config.whole_words
    ):
        return ""
    leave_torch_alone()
    tokenizer = load_tokenizer(model)
    if data_of(config.task) != "labelled":
        frame(config.task, tokenizer)
    if config.whole_words:
        word_begins(tokenizer)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty one of the class that config.json names.
        raise UsageError(
            f"`{config.model.asset}` has no tokenizer: none of its files (tokenizer.json, "
            "vocab.txt, vocab.json, a SentencePiece model) is in the bundle.",
            "Stage the tokenizer's files with the model, from the same repository.",
        )
    if read_vocabulary(model.path) is None:
        _check_vocabulary(config, model, len(tokenizer), shape)
    if config.task != "instruction":
        return ""
    writers = (Writer.of(d.settings, tokenizer, d.train.columns) for d in inputs.datasets)
    return "; ".join(dict.fromkeys(writer.description for writer in writers))


def _check_vocabulary(
    config: RunConfig, model: ModelInput, num_tokens: int, shape: ModelShape
) -> None:
    if shape.vocabulary and num_tokens > shape.vocabulary:
        raise UsageError(
            f"{config.place('model.asset')}: "
            f"the tokenizer of `{model.asset}` knows {num_tokens} tokens, "
            f"its model {shape.vocabulary}.",
            "Tokenizer and model do not belong together: stage both from one repository.",
        )
