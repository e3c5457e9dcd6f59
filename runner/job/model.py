"""Whether transformers has the model for the task, and whether its files are all there."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

from runner import kept
from runner.config.data import LANGUAGE
from runner.config.run_config import RunConfig
from runner.config.tasks import TASKS
from runner.errors import UsageError, shortage
from runner.inputs import ModelInput, index_problems, safetensors_header
from runner.job.installed import is_installed, is_light, why_not_here
from runner.job.shapes import ModelShape, grown
from runner.job.transformers_tables import (
    is_encoder,
    leave_torch_alone,
    model_types,
    pads_embedding,
    words_of,
)
from runner.job.weights import text_settings


def check_model(config: RunConfig, model: ModelInput) -> None:
    """Refuses a model that transformers cannot use for the task."""
    names = {task: model_types(kind.table) for task, kind in TASKS.items()}
    kind = model.settings.get("model_type")
    encodes = is_encoder(model.settings)
    is_known = is_installed("transformers") or any(kind in types for types in names.values())
    if kind is None:
        raise UsageError(
            f"{config.path}: {model.path / 'config.json'} has no model_type, so it is not of a "
            "model that transformers can load.",
            "Stage the repository of the same model in transformers' format (often its name ends "
            "in -hf).",
        )
    if is_known and kind not in names[config.task]:
        # Suggest only language tasks: they read the same column. Other tasks need other keys.
        others = [task for task in LANGUAGE if kind in names[task] and config.task in LANGUAGE]
        other = next((task for task in others if task == "masked-lm" or not encodes), None)
        wanted = "" if any(kind in types for types in names.values()) else newer_transformers(model)
        why, remedy = "", f"Set task: {other}" if other else "Use another model."
        if wanted:
            here = metadata.version("transformers")
            why = f"; it was written by transformers {wanted}, and {here} is installed here"
            remedy = (
                f"pip install -U 'transformers>={wanted}', in the environment of the job too; "
                "or use another model."
            )
        raise UsageError(
            f"{config.place('task')}: transformers has no {config.task} model of type `{kind}` "
            f"({model.path / 'config.json'}{why}).",
            remedy,
        )
    if config.task in ("causal-lm", "instruction") and encodes:
        remedy = "Set task: masked-lm, or use" if config.task in LANGUAGE else "Use"
        raise UsageError(
            f"{config.place('model.asset')}: `{config.model.asset}` ({kind}) is an encoder: "
            "a token would see the one it has to guess.",
            f"{remedy} a decoder such as GPT-2.",
        )
    _check_first_weights(config, model)
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


def check_config(config: RunConfig, model: ModelInput) -> None:
    """Refuses a config.json that the installed transformers does not read.

    Its type is known, and a value in it is wrong: a width that the heads do not divide, text where
    a number belongs. To import transformers takes a second, so a config that it reads is kept.

    Raises:
        UsageError: transformers refuses it; with its words.
    """
    if why_not_here(config) or is_light():
        return
    path = kept.path_of(
        "configs",
        kept.versions("transformers", "flash-attn"),
        sorted(model.tokenizer_digests.items()),
    )
    if kept.read(path) == model.asset:
        return
    leave_torch_alone()
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(model.path), local_files_only=True, trust_remote_code=False)
    except ImportError:
        return  # of torch, or of a package for one kind of model: the ranks have it
    except Exception as error:
        if shortage(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        wanted, here = newer_transformers(model), metadata.version("transformers")
        remedy = "Stage the model again, with its own config.json unchanged, or use another model."
        if wanted:
            remedy = (
                f"transformers {wanted} wrote it: pip install -U 'transformers>={wanted}', in the "
                "environment of the job too."
            )
        raise UsageError(
            f"{config.path}: transformers {here} does not read "
            f"{model.path / 'config.json'}: {said}",
            remedy,
        ) from None
    check_values(config, model)
    kept.keep(path, model.asset)


def check_values(config: RunConfig, model: ModelInput) -> None:
    """Refuses values of config.json that end a rank while the model is built or used.

    transformers reads them all: it compares no numbers, and looks names up only in the model.

    Raises:
        UsageError: some are wrong; names the keys.
    """
    text = text_settings(model.settings)
    _check_json(config, model)
    problems = [*_of_heads(text), *_of_names(text), *_of_padding(text, model.settings)]
    for key in ("attn_implementation", "_attn_implementation"):
        if str(text.get(key)).startswith("flash_attention") and not is_installed("flash_attn"):
            problems.append(f"{key}: {text[key]} needs flash-attn, which is not installed here")
    if problems:
        raise UsageError(
            f"{config.path}: {model.path / 'config.json'}: {'; '.join(problems)}.",
            "Stage the model again, with its own config.json unchanged, or correct that key at its "
            "source.",
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


def _of_heads(text: Mapping[str, Any]) -> list[str]:
    heads, shared = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        return [f"num_attention_heads {heads} is no multiple of num_key_value_heads {shared}"]
    return []


def _of_names(text: Mapping[str, Any]) -> list[str]:
    """Names of functions that the installed transformers does not have."""
    problems = []
    known = words_of("activations.py", "ACT2CLS")
    for key in ("hidden_act", "activation_function", "hidden_activation"):
        name = text.get(key)
        if known and isinstance(name, str) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean `{near[0]}`?)" if near else ""
            problems.append(f"{key}: transformers has no activation `{name}`{hint}")
    ropes = words_of("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if ropes and isinstance(kind, str) and kind not in (ropes | {"default", "mrope", "su"}):
            problems.append(f"{key}: transformers has no rope_type `{kind}`")
    return problems


def _of_padding(text: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    padding = text.get("pad_token_id", settings.get("pad_token_id"))
    rows, kind = text.get("vocab_size"), str(text.get("model_type", settings.get("model_type")))
    if not (isinstance(padding, int) and isinstance(rows, int) and padding >= rows > 0):
        return []
    if not (kind.isidentifier() and pads_embedding(kind)):
        return []
    return [f"pad_token_id {padding} is beyond vocab_size {rows}: it has no row"]


def newer_transformers(model: ModelInput) -> str:
    """Returns the version of transformers that wrote config.json, if it is newer than ours."""
    wrote = str(model.settings.get("transformers_version") or "")
    if not is_installed("transformers") or not re.match(r"\d+\.\d+", wrote):
        return ""
    release = ".".join(re.findall(r"\d+", wrote)[:3])  # 4.57.0.dev0 became 4.57.0
    return release if _numbers(release) > _numbers(metadata.version("transformers")) else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_index(config: RunConfig, model: ModelInput) -> None:
    """Checks that the shards of an index are here, with the weights that it names.

    Raises:
        UsageError: some are not.
    """
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


def _check_first_weights(config: RunConfig, model: ModelInput) -> None:
    """Refuses `model.init` with another architecture: tokenizer and config come from the asset."""
    if config.model.folder is None:
        return
    path = config.model.folder / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        shapes = [ModelShape.of(settings, 1) for settings in (theirs, model.settings)]
        # Another run with the same new tokens has exported a larger embedding.
        same = theirs.get("model_type") == model.settings.get("model_type") and (
            shapes[0] == shapes[1]
            or replace(shapes[0], num_parameters=0)
            == replace(grown(shapes[1], model), num_parameters=0)
        )
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
