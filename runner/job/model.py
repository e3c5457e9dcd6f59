"""Whether transformers has the model for the task, and whether its files are all there."""

from __future__ import annotations

import json
import re
from importlib import metadata

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput, index_problems, safetensors_header
from runner.job.installed import is_installed
from runner.job.shapes import ModelShape, Shapes, text_settings
from runner.tasks import TASKS, has_model, task_named

WRAPPERS = {
    "base_model.model.": "from peft, without merge_and_unload()",
    "_orig_mod.": "after torch.compile",
    "module.": "from within DistributedDataParallel or DeepSpeed",
}
"""The begin of all names in weights that were saved with a wrapper around the model."""


def check_model(config: RunConfig, model: ModelInput, outline: ModelShape) -> None:
    """Refuses a model that transformers cannot use for the task."""
    task, kind = task_named(config.task), model.settings.get("model_type")
    if kind is None:
        raise UsageError(
            f"{config.path}: {model.path / 'config.json'} has no model_type, so it is not of a "
            "model that transformers can load.",
            "Stage the repository of the same model in transformers' format (often its name ends "
            "in -hf).",
        )
    # A task that reads other keys of a dataset is no way out: the run file would have none of them.
    others = [
        other.name
        for other in TASKS.values()
        if other.dataset_keys == task.dataset_keys and kind in other.model_types
        if not other.sees_ahead(model.settings)
    ]
    if not has_model(task, kind):
        raise UsageError(
            f"{config.place('task')}: transformers has no {config.task} model of type `{kind}` "
            f"({model.path / 'config.json'}).",
            f"Set task: {others[0]}" if others else "Use another model.",
        )
    if task.sees_ahead(model.settings):
        remedy = f"Set task: {others[0]}, or use" if others else "Use"
        raise UsageError(
            f"{config.place('model.asset')}: `{config.model.asset}` ({kind}) is an encoder: "
            "a token would see the one it has to guess.",
            f"{remedy} a decoder such as GPT-2.",
        )
    _check_first_weights(config, model, outline)
    _check_weights_can_be_trained(config, model)


def _check_weights_can_be_trained(config: RunConfig, model: ModelInput) -> None:
    is_trained = config.lora is not None or config.model.init == "pretrained"
    if is_trained and "quantization_config" in model.settings:
        why = "LoRA here begins with whole weights, and quantises them itself."
        if config.lora is None:
            why = "such weights cannot be trained."
        raise UsageError(
            f"{config.place('model.asset')}: "
            f"`{model.asset}` is quantised already ({model.path / 'config.json'}); "
            f"{why}",
            "Stage the model that it was made from.",
        )
    if config.model.init == "pretrained" and not any(
        name.endswith(".safetensors") for name in model.digests
    ):
        raise UsageError(
            f"{config.place('model.asset')}: `{model.asset}` has no weights in this bundle.",
            "Stage the weights."
            if config.lora
            else "Set model.init: scratch, or stage the weights.",
        )


def check_files(config: RunConfig, model: ModelInput, shapes: Shapes) -> None:
    """Refuses what config.json and the names of the weights alone tell.

    Raises:
        UsageError: the weights have a wrapper's names, a shard of the index or a package that
            config.json asks for is not here, or a small JSON file is cut off.
    """
    _check_names(model, shapes)
    _check_index(config, model)
    _check_json(config, model)
    text = text_settings(model.settings)
    for key in ("attn_implementation", "_attn_implementation"):
        if str(text.get(key)).startswith("flash_attention") and not is_installed("flash_attn"):
            raise UsageError(
                f"{config.path}: {model.path / 'config.json'}: {key}: {text[key]} needs "
                "flash-attn, which is not installed here.",
                "Install it, or correct that key at its source.",
            )


def _check_names(model: ModelInput, shapes: Shapes) -> None:
    for prefix, how in WRAPPERS.items():
        if shapes and all(name.startswith(prefix) for name in shapes):
            raise UsageError(
                f"`{model.asset}`: its weights are named `{prefix}...`: they were saved {how}, and "
                "transformers would find none of them and draw all at random.",
                "Save the model again with `save_pretrained` of the model inside, or rename: "
                "save_file({k.removeprefix('" + prefix + "'): v for k, v in "
                "load_file(F).items()}, F, {'format': 'pt'}), of safetensors.torch; then stage it.",
            )


def _check_json(config: RunConfig, model: ModelInput) -> None:
    """Refuses small JSON files beside the weights that are cut off: the export reads them."""
    for name in sorted(model.digests):
        if not name.endswith("_config.json"):
            continue
        try:
            json.loads((model.path / name).read_bytes())
        except ValueError as error:
            raise UsageError(
                f"{config.path}: {model.path / name} is not JSON: {error}.",
                "Stage the model again: the file is cut off at its source.",
            ) from None


def newer_transformers(model: ModelInput) -> str:
    """Returns the version of transformers that wrote config.json, if it is newer than ours."""
    wrote = str(model.settings.get("transformers_version") or "")
    if not is_installed("transformers") or not re.match(r"\d+\.\d+", wrote):
        return ""
    release = ".".join(re.findall(r"\d+", wrote)[:3])  # 4.57.0.dev0 became 4.57.0
    return release if _numbers(release) > _numbers(metadata.version("transformers")) else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _check_index(config: RunConfig, model: ModelInput) -> None:
    """Checks that the shards of an index are here, with the weights that it names."""
    name = "model.safetensors.index.json"
    if name not in model.digests:
        return
    try:
        weight_map = json.loads((model.path / name).read_bytes()).get("weight_map")
    except (OSError, ValueError, AttributeError):
        weight_map = None
    tensors = {
        n: safetensors_header(model.path / n) for n in model.digests if n.endswith(".safetensors")
    }
    if problems := index_problems(weight_map, tensors):
        raise UsageError(
            f"{config.path}: `{model.asset}`: {name} {'; '.join(problems[:3])}.",
            "Fetch the whole model: an `include` or `exclude` in the manifest can leave files out.",
        )


def _check_first_weights(config: RunConfig, model: ModelInput, outline: ModelShape) -> None:
    """Refuses `model.init` with another architecture: tokenizer and config come from the asset."""
    if config.model.folder is None:
        return
    path = config.model.folder / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        # Another run with the same new tokens has exported a larger embedding.
        shape, known = ModelShape.of(theirs), (ModelShape.of(model.settings), outline)
        same = theirs.get("model_type") == model.settings.get("model_type") and shape in known
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path}: not a model's config: {error}.", "Export the model again."
        ) from None
    if not same:
        raise UsageError(
            f"{config.place('model.init')}: model.init: the weights in {config.model.folder} "
            f"are not of the shape of `{model.asset}`.",
            "Name the asset that the first run began with.",
        )
