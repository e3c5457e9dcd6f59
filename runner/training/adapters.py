"""LoRA in a rank: a model loaded whole or quantised gets its matrices (peft), and gives them back, alone or merged in.

What `from_pretrained` needs -> model with only the matrices trained -> weights as peft or transformers load them. peft
changes the model in place: tasks and engines see the class they know, with more parameters and fewer that train.
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

from runner.config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.lora import check_targets
from runner.memory import frozen_width
from runner.preflight import default_targets
from runner.training.engines.base import DTYPES

Weights = dict[str, torch.Tensor]
TASK_TYPES = {"causal-lm": "CAUSAL_LM", "instruction": "CAUSAL_LM"}
OURS = ".default"  # peft's name of an adapter that has none
ADAPTER_WEIGHTS = "adapter_model.safetensors"
STILL = "batch norm stays at the base's running statistics (an adapter cannot carry others)"


def loading(config: RunConfig) -> dict[str, Any]:
    """How the first weights are loaded: keyword arguments of `from_pretrained`.

    Args:
        config: with its precision decided.
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
    settings: Any = BitsAndBytesConfig(**(four if wanted.bits == 4 else {"load_in_8bit": True}))  # type: ignore[no-untyped-call]
    # Quantised where it is used: layouts differ between devices.
    place = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return {"dtype": computed, "quantization_config": settings, "device_map": {"": place}}


def attach(model: Any, config: RunConfig, source: ModelInput, drawn: Sequence[str], fresh: tuple[str, ...]) -> str:
    """Gives a model its matrices, in place; only they, and a head that was drawn anew, are trained from here on.

    Args:
        drawn: names of weights that the checkpoint does not have.
        fresh: beginnings of the names of a head, which may be drawn anew.

    Returns:
        What was done, for printing.

    Raises:
        UsageError: a target that the model does not have; weights drawn anew that nothing would train.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    lora = config.lora
    assert lora is not None
    if lost := [name for name in drawn if not name.startswith(fresh or ("\0",))]:
        raise UsageError(
            f"{config.path}: lora: `{source.asset}` does not have {len(lost)} weights of a {config.task} model "
            f"({lost[0]}, ...): they would stay as they are drawn.",
            "Train all weights: remove `lora`. Or stage a model that has them.",
        )
    able = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D, nn.Embedding))}
    check_targets(config, lora.targets, list(able))
    usual = default_targets(config, model.config.model_type)
    targets: list[str] | str = sorted(lora.targets or usual) or "all-linear"
    heads = sorted({name.partition(".")[0] for name in drawn})
    torch.manual_seed(config.seed)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # divided by the rank, whatever it is
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=heads or None,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in able.values()),
        task_type=TASK_TYPES.get(config.task),
    )
    try:
        get_peft_model(model, settings)
    except ValueError as error:
        raise UsageError(
            f"{config.path}: lora: {error}", "Name modules of the model in lora.targets, or remove `lora`."
        ) from None
    settings.base_model_name_or_path = str(config.model.folder or source.source)
    settings.revision = None if config.model.folder else source.commit
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in model.modules():
        # On CPUs with bf16 bitsandbytes repacks 4-bit weights at the first evaluation, for good, with rounded scales,
        # and multiplies with them without a gradient: training would go on, and learn next to nothing.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    still = _keep_still(model)
    return _told(model, config, targets, bool(usual), heads) + (f"; {STILL}" if still else "")


def _keep_still(model: nn.Module) -> bool:
    """Keeps batch norm at the running means and variances of the base, in training too; whether there is any.

    An adapter carries weights, not statistics: if they moved, the model that is exported would not be the one that was
    evaluated. Merged in or not, the same is learned.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.eval()
        norm.train = partial(_as_it_is, norm)  # type: ignore[assignment, method-assign]  # or the loop would wake it
    return bool(norms)


def _as_it_is(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _told(model: Any, config: RunConfig, targets: list[str] | str, usual: bool, heads: list[str]) -> str:
    lora, quantization = config.lora, config.quantization
    why = "as the run file says" if lora and lora.targets else f"peft's own for {model.config.model_type}"
    if isinstance(targets, str):
        targets, why = ["all linear layers"], f"peft knows no targets of {model.config.model_type}"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = quantization.words if quantization else "as they are"
    return (
        f"lora on {', '.join(targets)} ({why}){', and all of ' + ', '.join(heads) if heads else ''}: "
        f"{trained:,} parameters are trained; the others are kept {'in ' if quantization else ''}{kept}"
    )


def write_adapter(model: Any, weights: Weights, folder: Path) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, as `PeftModel.from_pretrained` reads them.

    Args:
        weights: at least those that were trained, by the model's own names.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    # Told not to look whether the vocabulary grew: it would ask the Hub for the base model.
    kept = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in kept.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = copy.copy(model.peft_config["default"])
    settings.target_modules = sorted(settings.target_modules)
    settings.inference_mode = True
    settings.save_pretrained(folder)


def merged(model: Any, weights: Mapping[str, torch.Tensor]) -> tuple[Any, Weights]:
    """The model without matrices: they are added into the weights they belong to, in float32.

    What is quantised is unpacked: the sum is the model that was trained, not the one it was quantised from.

    Args:
        weights: what was trained, and where the model is partitioned the rest too.

    Returns:
        A model of the same class that has no weights, and its weights by name.
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
        if getattr(module, "source_cls", None) is Conv1D:  # bitsandbytes has it the other way round
            key = f"{name.removesuffix('.base_layer')}.weight"
            result[key] = result[key].T.contiguous()
    dtype = next(t.dtype for name, t in whole.items() if t.is_floating_point() and "lora_" not in name)
    settings = copy.deepcopy(model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with torch.device("meta"):
        bare = type(model)(settings)
    return bare, {name: t.to(dtype) if t.is_floating_point() else t for name, t in result.items()}


def _delta(layer: Any, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the two matrices of a layer add to its weight, float32, in the weight's shape."""
    scale = float(layer.scaling["default"])
    if f"{name}.lora_embedding_A{OURS}" in whole:
        first, second = (whole[f"{name}.lora_embedding_{which}{OURS}"].float() for which in "AB")
        return (second @ first).T * scale
    first, second = (whole[f"{name}.lora_{which}{OURS}.weight"].float() for which in "AB")
    product = (second @ first) * scale
    return product.T if layer.fan_in_fan_out else product


def _unpacked(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights and saved buffers of a model that is whole, on the CPU; what is quantised unpacked."""
    if getattr(model, "hf_quantizer", None) is None:
        return
    from peft.utils.integrations import dequantize_module_weight

    kept = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{prefix}.{name}"
            if full not in kept:
                continue
            is_packed = name == "weight" and not tensor.is_floating_point()
            value = dequantize_module_weight(module) if is_packed else tensor
            yield full, value.detach().to("cpu", copy=True)
