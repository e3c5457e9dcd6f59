"""LoRA in a rank (with peft): adds the adapter matrices to a model, writes them, or merges them.

`from_pretrained` loads a model whole or quantised; `attach` leaves only the matrices trainable;
`write_adapter` and `merged` give weights that peft or transformers load. peft changes the model in
place: tasks and engines see the same class, with more parameters and fewer that are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.engine import targets_in_peft
from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.job.memory import frozen_width
from runner.job.shapes import check_targets
from runner.tasks import task_named
from runner.training.components.device import DTYPES

Weights = dict[str, torch.Tensor]
OURS = ".default"  # what peft calls an adapter without a name
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FROZEN_STATISTICS = (
    "batch norm stays at the base's running statistics (an adapter cannot carry others)"
)


def loading(config: RunConfig) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` for the first weights: dtype and quantisation.

    Args:
        config: the run file, with its precision decided.
    """
    computed = DTYPES[config.precision]
    if config.lora is None or frozen_width(config) == 4:
        computed = torch.float32
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
