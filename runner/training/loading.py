"""How a model is loaded: the same on every rank, with its weights on rank 0.

With LoRA (peft), `how_to_load` loads a model whole or quantised; `attach` leaves only the matrices
trainable; `write_adapter` and `merged` give weights that peft or transformers load. peft changes
the model in place: tasks and engines see the same class, with more parameters and fewer that are
trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.engine import targets_in_peft
from runner.config.run_config import RunConfig
from runner.data.tokenizing import rows_needed
from runner.from_stage import UsageError
from runner.inputs import ModelInput
from runner.job.findings import raise_errors
from runner.job.memory import frozen_width
from runner.job.model_probe import judge
from runner.job.shapes import check_targets
from runner.tasks import task_named
from runner.training.components.device import DTYPES, use_tanh_gelu
from runner.training.patches import in_file_types
from runner.training.weights import from_first, widen_untrained


def load_model(
    auto: Any, config: RunConfig, model: ModelInput, *, fresh: tuple[str, ...] = (), **settings: Any
) -> tuple[Any, str]:
    """Loads a transformers model, the same on every rank.

    The weights are pretrained, or random from config.json (`init: scratch`). Weights that the
    checkpoint does not have (a new head) are drawn with the run's seed.

    Args:
        auto: the `AutoModelFor...` class.
        config: the run file, with its precision decided.
        model: the bundle's model.
        fresh: first parts of names of weights that may have another shape in the checkpoint; they
            get new random values.
        settings: values that replace those of config.json.

    Returns:
        The model, and where its weights come from, for printing. Ranks other than 0 have a model
        without weights (on `meta`): the engine spreads those of rank 0, which are float32, or in
        the types of the files and to become float32. With LoRA, frozen weights are in the run's
        precision. Quantised weights are on every rank's device.

    Raises:
        UsageError: weights of the checkpoint do not fit the model of its config.json.
    """
    if config.model.folder is not None:
        model = replace(model, asset=str(config.model.folder), path=config.model.folder)
    torch.manual_seed(config.seed)
    if config.quantization is not None:
        # Each rank quantises on its own device, weight by weight; the files are mapped once a node.
        made, drawn = _read(auto, config, model, fresh, settings)
    else:
        made, drawn = _made_once(auto, config, model, fresh, settings)
    origin = f"all weights from {model.asset}"
    if config.model.init == "scratch":
        origin = "all weights are new and random (init: scratch)"
    elif drawn:
        origin = (
            f"weights from {model.asset}; {len(drawn)} it does not have are random: "
            f"{', '.join(drawn[:3])}..."
        )
    if config.lora is not None:
        origin = f"{origin}; {attach(made, config, model, drawn, fresh)}"
    if config.activation_checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.config.use_cache = False
    made.train()
    return made, "; ".join(filter(None, (origin, use_tanh_gelu(made))))


def _made_once(
    auto: Any,
    config: RunConfig,
    model: ModelInput,
    fresh: tuple[str, ...],
    settings: dict[str, Any],
) -> tuple[Any, list[str]]:
    """The model, with weights on rank 0 only; and the names of its weights that are new."""
    made: list[Any] = []

    def read() -> list[str]:
        """On rank 0 only."""
        if config.model.init == "scratch":
            made.append(grow(_bare(auto, config, model, settings), model))
            return []
        # LoRA draws its matrices in the type of the weight beside them.
        lazily = config.lora is None and torch.distributed.is_initialized()
        with in_file_types() if lazily else nullcontext():
            found, drawn = _read(auto, config, model, fresh, settings)
            grow(found, model)
        if lazily:
            widen_untrained(found)
        made.append(found)
        return drawn

    drawn = from_first(read)
    if not made:
        with torch.device("meta"):
            made.append(grow(_bare(auto, config, model, settings), model))
    return made[0], drawn


def grow(made: Any, model: ModelInput) -> Any:
    """Gives a model's embedding rows for the tokens that the run adds, as transformers does.

    They are drawn around the mean of the others, with a billionth of their covariance.
    """
    rows = rows_needed(model)
    embedding = made.get_input_embeddings() if rows else None
    if embedding is not None and rows > embedding.num_embeddings:
        made.resize_token_embeddings(rows, mean_resizing=not embedding.weight.is_meta)
    return made


def _bare(auto: Any, config: RunConfig, model: ModelInput, settings: dict[str, Any]) -> Any:
    """A model with random weights, as its config.json says."""
    from transformers import AutoConfig

    built_from = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **settings)
    return auto.from_config(built_from, dtype=how_to_load(config)["dtype"])


def _read(
    auto: Any,
    config: RunConfig,
    model: ModelInput,
    fresh: tuple[str, ...],
    settings: dict[str, Any],
) -> tuple[Any, list[str]]:
    """The pretrained model, and the names of its weights that the checkpoint does not have."""
    made, info = auto.from_pretrained(
        str(model.path),
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=bool(fresh),
        **how_to_load(config),
        **settings,
    )
    return made, _drawn(info, model, fresh)


def _drawn(info: dict[str, Any], model: ModelInput, fresh: tuple[str, ...]) -> list[str]:
    """The names of the weights that the checkpoint does not have.

    Raises:
        UsageError: weights have another shape, or layers have none, and are not `fresh`.
    """
    misfits = sorted(
        key if isinstance(key, str) else str(key[0]) for key in info["mismatched_keys"]
    )
    if wrong := [name for name in misfits if not name.startswith(fresh or ("\0",))]:
        raise UsageError(
            f"{model.path}: weights do not fit config.json: {wrong[0]}",
            "Stage weights and config together.",
        )
    missing = [name for name in info["missing_keys"] if not name.startswith(fresh or ("\0",))]
    raise_errors(judge(model.asset, {"missing_keys": missing}, model.settings))
    return sorted({*info["missing_keys"], *misfits})


Weights = dict[str, torch.Tensor]
OURS = ".default"  # what peft calls an adapter without a name
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FROZEN_STATISTICS = (
    "batch norm stays at the base's running statistics (an adapter cannot carry others)"
)


def how_to_load(config: RunConfig) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` for the first weights: dtype and quantisation.

    Args:
        config: the run file, with its precision decided.
    """
    computed = torch.float32
    if config.lora is not None and frozen_width(config) != 4:
        computed = DTYPES[config.precision]
    if config.quantization is None:
        return {"dtype": computed}
    from transformers import BitsAndBytesConfig

    wanted = config.quantization
    four: dict[str, Any] = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": wanted.type,
        "bnb_4bit_use_double_quant": wanted.double,
        "bnb_4bit_compute_dtype": computed,
    }
    settings: Any = BitsAndBytesConfig(**(four if wanted.bits == 4 else {"load_in_8bit": True}))
    # Quantise on the device that is used: layouts differ between devices.
    place = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return {"dtype": computed, "quantization_config": settings, "device_map": {"": place}}


def attach(
    model: Any, config: RunConfig, source: ModelInput, drawn: Sequence[str], fresh: tuple[str, ...]
) -> str:
    """Adds the LoRA matrices to a model, in place. Only they, and a new head, are trained.

    Args:
        model: the transformers model.
        config: the run file, with its precision decided.
        source: the base model, for messages and `adapter_config.json`.
        drawn: names of weights that the checkpoint does not have.
        fresh: first parts of the names of a head, which may be new.

    Returns:
        What was done, for printing.

    Raises:
        UsageError: the model does not have a target, or has new weights that LoRA does not train.
    """
    from peft import get_peft_model

    if lost := [name for name in drawn if not name.startswith(fresh or ("\0",))]:
        raise UsageError(
            f"{config.path}: lora: `{source.asset}` does not have {len(lost)} weights of a "
            f"{config.task} model ({lost[0]}, ...): they would stay random.",
            "Train all weights: remove `lora`. Or stage a model that has them.",
        )
    heads = sorted({name.partition(".")[0] for name in drawn})
    settings, targets = _settings(model, config, heads)
    torch.manual_seed(config.seed)
    try:
        get_peft_model(model, settings)
    except ValueError as error:
        raise UsageError(
            f"{config.path}: lora: {error}",
            "Name modules of the model in lora.targets, or remove `lora`.",
        ) from None
    settings.base_model_name_or_path = source.base_of_adapter(config.model.folder)
    settings.revision = None if config.model.folder else source.commit
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in model.modules():
        # On CPUs with bf16 support, bitsandbytes repacks 4-bit weights at the first evaluation,
        # permanently and with rounded scales. It then multiplies with them without a gradient:
        # training would continue and learn almost nothing.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    frozen = f"; {FROZEN_STATISTICS}" if _freeze_statistics(model) else ""
    return _describe(model, config, targets, heads) + frozen


def _settings(model: Any, config: RunConfig, heads: Sequence[str]) -> tuple[Any, list[str] | str]:
    """peft's settings, and the targets in them.

    Args:
        heads: names of modules that are trained whole.
    """
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    lora = config.lora
    assert lora is not None
    able = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, Conv1D, nn.Embedding))
    }
    check_targets(config, lora.targets, list(able))
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    usual = [] if lora.targets else targets_in_peft(model.config.model_type, known)
    targets: list[str] | str = sorted(lora.targets or usual) or "all-linear"
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # divided by the rank, whatever it is
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(heads) or None,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in able.values()),
        task_type=task_named(config.task).peft_type,
    )
    return settings, targets


def _freeze_statistics(model: nn.Module) -> bool:
    """Keeps batch norm at the base's running means and variances in training; True if there is any.

    An adapter carries weights, not statistics: if they moved, the exported model would differ from
    the one that was evaluated. It is the same for merged adapters, so both learn the same.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.eval()
        # Otherwise the loop's `train()` would set them moving.
        norm.train = partial(_unchanged, norm)  # type: ignore[assignment, method-assign]
    return bool(norms)


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _describe(model: Any, config: RunConfig, targets: list[str] | str, heads: list[str]) -> str:
    lora, quantization = config.lora, config.quantization
    why = (
        "as the run file says"
        if lora and lora.targets
        else f"peft's own for {model.config.model_type}"
    )
    if isinstance(targets, str):
        targets, why = ["all linear layers"], f"peft knows no targets of {model.config.model_type}"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = f"in {quantization.describe()}" if quantization else "as they are"
    whole = f", and all of {', '.join(heads)}" if heads else ""
    return (
        f"lora on {', '.join(targets)} ({why}){whole}: "
        f"{trained:,} parameters are trained; the others are kept {kept}"
    )


def write_adapter(model: Any, weights: Weights, folder: Path) -> None:
    """Writes an adapter as `PeftModel.from_pretrained` reads it.

    Args:
        model: the model with its adapter.
        weights: at least the trained weights, by the model's own names.
        folder: gets `adapter_config.json` and `adapter_model.safetensors`.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    # Without `save_embedding_layers=False` peft asks the Hub for the base model's vocabulary.
    kept = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in kept.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = copy.copy(model.peft_config["default"])
    settings.target_modules = sorted(settings.target_modules)
    settings.inference_mode = True
    settings.save_pretrained(folder)


def merged(model: Any, weights: Mapping[str, torch.Tensor]) -> tuple[Any, Weights]:
    """Merges the matrices into the weights they belong to, in float32.

    Quantised weights are unpacked first: the sum is the model that was trained, not the one before
    quantisation.

    Args:
        model: the model with its adapter.
        weights: the trained weights, and all others where the model is partitioned.

    Returns:
        A model of the same class without memory for weights, and its weights by name.
    """
    from transformers.pytorch_utils import Conv1D

    whole = dict(_unpacked(model)) | dict(weights)
    result: Weights = {}
    for name, tensor in whole.items():
        if "lora_" in name or ".original_module." in name:
            continue
        plain = name.replace(".base_layer.", ".").replace(f".modules_to_save{OURS}.", ".")
        result[plain] = tensor
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "scaling"):
            base = result[f"{name}.weight"]
            result[f"{name}.weight"] = (base.float() + _delta(layer, name, whole)).to(base.dtype)
    for name, module in model.named_modules():
        # bitsandbytes keeps the weight of a Conv1D transposed.
        if getattr(module, "source_cls", None) is Conv1D:
            key = f"{name.removesuffix('.base_layer')}.weight"
            result[key] = result[key].T.contiguous()
    dtype = next(
        t.dtype for name, t in whole.items() if t.is_floating_point() and "lora_" not in name
    )
    settings = copy.deepcopy(model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with torch.device("meta"):
        bare = type(model)(settings)
    return bare, {name: t.to(dtype) if t.is_floating_point() else t for name, t in result.items()}


def _delta(layer: Any, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the two matrices of a layer add to its weight: float32, in the weight's shape."""
    scale = float(layer.scaling["default"])
    if f"{name}.lora_embedding_A{OURS}" in whole:
        first, second = (whole[f"{name}.lora_embedding_{which}{OURS}"].float() for which in "AB")
        return (second @ first).T * scale
    first, second = (whole[f"{name}.lora_{which}{OURS}.weight"].float() for which in "AB")
    product = (second @ first) * scale
    return product.T if layer.fan_in_fan_out else product


def _unpacked(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights and saved buffers of a quantised model, on the CPU and unpacked; nothing for
    others.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return
    from peft.utils.integrations import dequantize_module_weight

    kept = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            full = f"{prefix}.{name}"
            if full not in kept:
                continue
            is_packed = name == "weight" and not tensor.is_floating_point()
            value = dequantize_module_weight(module) if is_packed else tensor
            yield full, value.detach().to("cpu", copy=True)
