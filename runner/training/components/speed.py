"""Faster kernels for the same formulas, and settings of torch for GPUs; each is printed.

`AIRLIFT_KERNELS=reference` in the environment keeps the kernels of transformers and the defaults of
torch. A setting that the user has made in the environment is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import torch
from torch import nn

SWITCH = "AIRLIFT_KERNELS"
OFF = f"{SWITCH}=reference turns it off"
TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def wants_reference(environ: Mapping[str, str]) -> bool:
    """Whether the user wants the reference kernels."""
    return environ.get(SWITCH) == "reference"


def use_tanh_gelu(model: nn.Module, environ: Mapping[str, str] = os.environ) -> str:
    """Replaces transformers' `gelu_new` and `gelu_fast` by torch's tanh GELU, in place.

    It is the same formula (arXiv:1606.08415, 2) in one kernel instead of eight, which reads and
    writes three times less memory. Values differ by rounding: 5e-7 in float32. The model's
    config.json keeps the name of its activation.

    Returns:
        What was done, for printing; empty if nothing was.
    """
    from transformers.activations import FastGELUActivation, NewGELUActivation

    if wants_reference(environ):
        return ""
    replaced = 0
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, (NewGELUActivation, FastGELUActivation)):
                setattr(module, name, nn.GELU(approximate="tanh"))
                replaced += 1
    return f"GELU by torch's tanh kernel: same formula, one pass ({OFF})" if replaced else ""


def tune(
    device: torch.device, task: str, environ: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Sets what makes torch faster on NVIDIA GPUs. Does nothing on other devices.

    Args:
        device: of this rank.
        task: of the run file.
        environ: where users make settings of their own.

    Returns:
        What was set and why, for printing.
    """
    if device.type != "cuda":
        return ()
    if wants_reference(environ):
        return (f"kernels: torch's defaults ({SWITCH}=reference)",)
    notes = [_allow_tf32(environ), _expand_segments(environ)]
    if task == "image-classification":
        torch.backends.cudnn.benchmark = True
        notes.append(
            "cudnn.benchmark: on, images in channels_last: all batches have one shape, and tensor "
            f"cores want the channels last ({OFF})"
        )
    return tuple(notes)


def uses_tf32(environ: Mapping[str, str]) -> bool:
    """Whether float32 products are made in TF32 on a GPU that can (Ampere and later)."""
    if theirs := [environ[name] for name in TF32_VARIABLES if name in environ]:
        return theirs[0] == "1"
    return not wants_reference(environ)


def _allow_tf32(environ: Mapping[str, str]) -> str:
    if theirs := next((name for name in TF32_VARIABLES if name in environ), None):
        return f"TF32: as {theirs}={environ[theirs]} says"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return (
        "TF32: on: float32 products on tensor cores, with 10 bits of mantissa "
        f"(NVIDIA_TF32_OVERRIDE=0 or {OFF})"
    )


def _expand_segments(environ: MutableMapping[str, str]) -> str:
    if theirs := next((name for name in ALLOCATOR_VARIABLES if name in environ), None):
        return f"CUDA allocator: as {theirs}={environ[theirs]} says"
    setting = "expandable_segments:True"
    environ[ALLOCATOR_VARIABLES[1]] = setting  # for child processes
    _change_allocator(setting)
    return (
        f"CUDA allocator: {setting}: batches of many lengths fragment its memory otherwise "
        f"({ALLOCATOR_VARIABLES[1]}=expandable_segments:False or {OFF})"
    )


def _change_allocator(setting: str) -> None:
    """Changes the allocator after torch's import, for memory that is allocated from now on."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.9
    (newer or torch.cuda.memory._set_allocator_settings)(setting)
