"""The counts of a model and the device of a rank; and whether its files are those of a model.

config.json and the shapes in the safetensors headers -> number of parameters, of trained parameters
(LoRA), of quantised parameters. These are estimates where a checkpoint has other weight names than
the model. The ranks look at the model itself. Without weights transformers counts the parameters
(`model_probe.count_parameters`): no formula knows the experts, heads and towers of every
architecture.

The functions at the end find a model that is not for the task, and files that are not all there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.config.engine import targets_in_peft
from runner.config.run_config import RunConfig
from runner.data.tokenizing import rows_needed
from runner.from_stage import DamageError, UsageError, human_count
from runner.inputs import ModelInput, unreadable
from runner.job.installed import is_installed
from runner.tasks import TASKS, has_model, task_named
from stage.bundle.inspect import index_problems, safetensors_header

Shapes = Mapping[str, Sequence[int]]
EMBEDDINGS = (
    ".embed_tokens.weight", ".word_embeddings.weight", ".word_embedding.weight", ".wte.weight",
    ".embed_in.weight", ".tok_embeddings.weight", ".shared.weight",
)  # fmt: skip
"""The ends of the names of token embeddings in transformers."""
IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Attributes:
        kind: `cuda` or `cpu`.
        name: for messages.
        memory: bytes that a rank may use.
        has_bf16, has_fp16: whether it is fast in this precision.
        host_memory: bytes of the node's memory per rank, for offloaded state; 0: not known.
        limit: why it has no more of the node's memory, for messages; empty: it has it all.
    """

    kind: str
    name: str
    memory: int
    has_bf16: bool
    has_fp16: bool
    host_memory: int = 0
    limit: str = ""

    @staticmethod
    def cpu(memory: int) -> Device:
        """Returns a rank's share of a node's CPUs.

        `check`, the launcher and the ranks use this one rule. The device has no fp16: few CPUs
        compute in it, DeepSpeed refuses the others, and the CPU of a job is not known before the
        job starts.

        Args:
            memory: bytes of the node's memory that the rank may use.
        """
        return Device("cpu", "CPU", memory, True, False)


@dataclass(frozen=True)
class ModelShape:
    """Counts of a model, from its config.json and its safetensors headers.

    Attributes:
        num_parameters: of the model, without LoRA; 0: not known, so nothing that follows from it
            is known either (memory, disk, FLOPs).
        longest: the most tokens (or image patches) in a sequence; None: no limit.
        hidden: width of the hidden states.
        layers: number of layers.
        vocabulary: number of tokens that the model knows.
        num_trained: parameters that LoRA adds and trains; None: all of the model's are trained.
        num_quantized: the model's parameters that are kept quantised.
    """

    num_parameters: int
    longest: int | None
    hidden: int
    layers: int
    vocabulary: int
    num_trained: int | None = None
    num_quantized: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any], num_parameters: int = 0) -> ModelShape:
        """Reads the usual keys of a Hugging Face config.json.

        Args:
            settings: the content of config.json.
            num_parameters: the count; 0: not known.
        """
        text = text_settings(settings)

        def first(*names: str) -> int:
            return next((int(text[n]) for n in names if isinstance(text.get(n), int)), 0)

        return ModelShape(
            num_parameters,
            _longest(settings.get("model_type"), first),
            first("hidden_size", "n_embd", "d_model", "dim"),
            first("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            first("vocab_size"),
        )


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the language model."""
    inner = settings.get("text_config")
    return inner if isinstance(inner, dict) else settings


def embedding_rows(shape: ModelShape, shapes: Shapes) -> tuple[int, str]:
    """The rows of the token embedding (0: not known), and where that is written."""
    rows = {
        f"its {name} has so many rows": weight[0]
        for name, weight in shapes.items()
        if len(weight) == 2 and f".{name}".endswith(EMBEDDINGS)
    }
    if len(set(rows.values())) > 1:
        rows = {}
    known = {"its vocab_size": shape.vocabulary, **rows}
    where = min(known, key=lambda name: known[name] or math.inf)
    return known[where], where


def _longest(model_type: object, first: Any) -> int | None:
    longest = first("max_position_embeddings", "n_positions", "n_ctx") or None
    if side := first("image_size"):
        # The patches and the class token (ViT).
        return int((side // max(1, first("patch_size"))) ** 2 + 1)
    # RoBERTa's positions begin after the padding index: 514 rows are 512 positions
    # (modeling_roberta.py).
    return (
        longest - 2
        if longest and model_type in ("roberta", "xlm-roberta", "camembert", "longformer")
        else longest
    )


def is_target(module: str, target: str) -> bool:
    """Returns whether a LoRA target names a module: its whole name or its end, as in peft."""
    return module == target or module.endswith(f".{target}")


def with_lora(
    shape: ModelShape, config: RunConfig, shapes: Shapes | None, defaults: Sequence[str]
) -> ModelShape:
    """Adds the counts of trained and quantised parameters to `shape`.

    Args:
        shape: the model's counts; returned unchanged where the run trains all weights.
        config: the run file.
        shapes: name -> shape of each weight; None: the model has no weights.
        defaults: the targets where the run file has none; empty: all linear layers.

    Raises:
        UsageError: a target matches no weight.
    """
    lora = config.lora
    if lora is None:
        return shape
    if not shapes:
        # The four square matrices of attention in each layer.
        return replace(shape, num_trained=8 * lora.rank * shape.hidden * shape.layers)
    matrices = {
        name.removesuffix(".weight"): s
        for name, s in shapes.items()
        if name.endswith(".weight") and len(s) > 1
    }
    inner = {name: s for name, s in matrices.items() if IN_A_LAYER.search(name)}
    targets = lora.targets or defaults
    check_targets(config, lora.targets, list(matrices))
    chosen = (
        [s for name, s in matrices.items() if any(is_target(name, t) for t in targets)]
        if targets
        else inner.values()
    )
    return replace(
        shape,
        num_trained=lora.rank * sum(s[0] + math.prod(s[1:]) for s in chosen),
        num_quantized=sum(math.prod(s) for s in inner.values()) if config.quantization else 0,
    )


def check_targets(config: RunConfig, targets: Sequence[str], modules: Sequence[str]) -> None:
    """Refuses a LoRA target that matches no module.

    Args:
        config: the run file.
        targets: the targets of the run file.
        modules: the names of all modules that could get matrices.

    Raises:
        UsageError: a target matches no module; the message lists the modules.
    """
    for target in targets:
        if not any(is_target(module, target) for module in modules):
            inner = [name for name in modules if IN_A_LAYER.search(name)]
            known = sorted({name.rpartition(".")[2] for name in inner or modules})
            raise UsageError(
                f"{config.place('lora.targets')}: "
                f"lora.targets: the model `{config.model.asset}` has no module "
                f"`{target}`.",
                f"It has: {', '.join(known)}.",
            )


def outline_of(model: ModelInput) -> ModelShape:
    """Returns a run's model by its config.json alone, with the rows that the run adds.

    Raises:
        UsageError, DamageError: as for `rows_needed`.
    """
    return grown(ModelShape.of(model.settings), rows_needed(model), model.settings)


def shape_of(
    config: RunConfig,
    model: ModelInput,
    outline: ModelShape,
    shapes: Shapes | None,
    counted: int = 0,
) -> ModelShape:
    """Returns the counts of a run's model, with the trained and quantised parameters.

    Args:
        outline: by its config.json, of `outline_of`.
        shapes: name -> shape of each weight; None: the model has no weights.
        counted: the number of parameters by `model_probe.count_parameters`, for a model without
            weights.

    Raises:
        UsageError: a LoRA target matches no weight.
    """
    number = counted if shapes is None else sum(math.prod(shape) for shape in shapes.values())
    shape = grown(ModelShape.of(model.settings, number), outline.vocabulary, model.settings)
    targets = targets_in_peft(model.settings.get("model_type")) if config.lora else []
    return with_lora(shape, config, shapes, targets)


def grown(shape: ModelShape, rows: int, settings: Mapping[str, Any]) -> ModelShape:
    """Returns the counts of a model whose embedding has at least so many rows.

    Args:
        settings: the content of config.json.
    """
    if rows <= shape.vocabulary or not shape.vocabulary:
        return shape
    tables = 1 if settings.get("tie_word_embeddings", True) else 2
    more = (rows - shape.vocabulary) * shape.hidden * tables
    number = shape.num_parameters and shape.num_parameters + more
    return replace(shape, vocabulary=rows, num_parameters=number)


def describe_new_tokens(shape: ModelShape, model: ModelInput) -> str:
    """A line on the tokens that the run adds; empty: it adds none.

    Args:
        shape: the model's counts, with the rows that the run adds.
    """
    added = len(model.new_tokens) + len(model.new_special_tokens)
    if not added:
        return ""
    number, rows = human_count(added, "token"), shape.vocabulary
    before = ModelShape.of(model.settings).vocabulary
    room = f"the embedding has room for them ({before} rows)"
    if rows > before:
        room = f"the embedding grows from {before} to {rows} rows, which begin near their mean"
    return f"tokenizer: {number} added; {room}"


def human_parameters(count: int) -> str:
    """`1,234 parameters`, `0.43 M parameters`, `22.7 M parameters`, `parameters not known`."""
    if not count:
        return "parameters not known"
    if count < 10_000:
        return human_count(count, "parameter")
    return f"{count / 1e6:.{1 if count >= 10_000_000 else 2}f} M parameters"


def weight_shapes(model: ModelInput) -> dict[str, list[int]] | None:
    """Returns name -> shape of every weight, from the safetensors headers; None: no weights.

    Raises:
        UsageError: a header cannot be read.
    """
    weights = [model.path / name for name in model.digests if name.endswith(".safetensors")]
    if not weights:
        return None
    return {k: entry["shape"] for path in weights for k, entry in _header(path).items()}


def _header(path: Path) -> dict[str, Any]:
    try:
        return safetensors_header(path)
    except DamageError as error:
        problem = f"{path.parent}/{error.message}"
        raise UsageError(problem, unreadable(path, "damaged").remedy) from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


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
