"""What engines share: the protocol of the loop, gathering, and `compile: true`.

The loop uses six methods of an engine, and does not know which engine it has.

`torch.compile` is for each block in place, or for the whole model. A compiled transformer decides
about its attention mask while it is traced, where the content of the batch is not known. So
transformers makes a mask of every causal model, and attention with a mask has no flash kernel
(`_ignore_causal_mask_sdpa` in transformers.masking_utils). Between compiled blocks that decision is
made as without `compile`. Also, equal blocks are compiled once. `nn.Module.compile` changes no
name: checkpoints and exported models are the same without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Engine(Protocol):
    """A module spread over the ranks, with its optimizer.

    Attributes:
        notes: what it decided automatically, one line each, for printing.
    """

    notes: tuple[str, ...]

    def forward(self, batch: dict[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        """The module's output. `last`: the step's last backward will follow."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradient of one micro batch.

        Args:
            loss: the sum of the micro batch's losses, scaled so that the sum over all micro batches
                of all ranks is the gradient of the step's mean loss.
            last: whether it is the step's last one.
        """
        ...

    def step(self, rate: float) -> float | torch.Tensor:
        """Clips gradients, updates weights and clears gradients.

        A step whose gradient is not finite updates nothing. Then the norm is inf or nan, and fp16
        halves its loss scale.

        Args:
            rate: the learning rate of this step.

        Returns:
            The gradient's norm before clipping; a scalar on the device where the host need not
            wait for it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes this rank's part of weights and optimizer state. All ranks call it.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote on any number of ranks. All ranks call it.

        Raises:
            UsageError: this engine cannot read it on another number of ranks.
        """
        ...

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        """The model's weights on rank 0's CPU, by name; empty on other ranks. All ranks call it.

        Args:
            frozen: whether weights that are not trained are included.
        """
        ...


def gathered(
    module: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[str, nn.Parameter], torch.Tensor],
    *,
    is_first: bool,
    frozen: bool = True,
) -> dict[str, Any]:
    """Weights in `dtype` and the saved buffers, on rank 0's CPU; empty on other ranks.

    Where only some weights are trained, these are small and stay in float32.

    Args:
        module: the model with its loss.
        dtype: of the exported weights.
        whole: returns a parameter unpartitioned. Every rank calls it for every parameter in the
            same order, so it may be a collective.
        is_first: whether this is rank 0.
        frozen: whether weights that are not trained are included; without them no buffers either.
    """
    state: dict[str, Any] = {}
    adapted = any(not parameter.requires_grad for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        if not (frozen or parameter.requires_grad):
            continue
        full = whole(name, parameter)
        to = torch.float32 if adapted and parameter.requires_grad else dtype
        if is_first:
            state[name] = full.detach().to(
                "cpu", to if full.is_floating_point() else None, copy=True
            )
    if is_first and frozen:
        kept = module.state_dict().keys()  # omits the buffers that are not saved
        state |= {
            name: buffer.detach().cpu().clone()
            for name, buffer in module.named_buffers()
            if name in kept
        }
    return state


# Graphs of one block: training and evaluation, each with and without a mask, each with fixed and
# with varying sizes.
VARIANTS = 8


def compile_model(module: nn.Module, *, hooked: bool = False) -> str:
    """Compiles a model's blocks in place; the whole model where it has none.

    Args:
        module: before an engine wraps it, with the shapes of its whole weights.
        hooked: as in `compile_blocks`.

    Returns:
        What was compiled, and why.
    """
    blocks = transformer_blocks(module)
    if not blocks:
        module.compile()
        return "compile: the whole model (it has no repeated transformer blocks)"
    why = "attention keeps its fast kernels, equal blocks compile once"
    return compile_blocks(blocks, why, hooked=hooked)


def compile_blocks(blocks: list[nn.Module], reason: str, *, hooked: bool = False) -> str:
    """Compiles modules in place, one by one.

    At the ninth graph of one function torch gives up compiling it, with one line in the log. Each
    shape of blocks takes its own graphs, so this allows that many for each shape.

    Args:
        blocks: the modules. What is inside of another one becomes a part of its graph.
        reason: why these.
        hooked: whether hooks of the blocks gather their weights, which torch cannot compile. Then
            only what is between the hooks is compiled.

    Returns:
        What was compiled, and the reason.
    """
    config = torch._dynamo.config
    needed = VARIANTS * len({_shapes(block) for block in blocks})
    # The name that torch 2.6 has too.
    config.cache_size_limit = max(config.cache_size_limit, needed)
    for block in blocks:
        if hooked:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()
    counts = Counter(type(block).__name__ for block in blocks)
    listed = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return f"compile: block by block, {listed} ({reason})"


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, without those inside of others.

    These are modules of a class that transformers keeps on one device (`_no_split_modules`), that
    occurs more than once, and that computes attention or has the same shapes everywhere. So the
    convolutions of a ResNet, which mostly differ in shape, are none.
    """
    known = no_split_classes(module)
    found: dict[str, list[nn.Module]] = defaultdict(list)
    for one in module.modules():
        if type(one).__name__ in known:
            found[type(one).__name__].append(one)
    chosen = {
        id(one)
        for several in found.values()
        if len(several) > 1 and (_attends(several[0]) or len({_shapes(b) for b in several}) == 1)
        for one in several
    }
    return _outermost(module, chosen)


def no_split_classes(module: nn.Module) -> set[str]:
    """The classes of a model's layers: those that transformers keeps on one device."""
    return {
        str(name)
        for m in module.modules()
        for name in (getattr(m, "_no_split_modules", None) or ())
    }


def _attends(block: nn.Module) -> bool:
    """Whether a block computes attention. transformers' classes that do all say so."""
    return any("attention" in type(part).__name__.lower() for part in block.modules())


def _shapes(block: nn.Module) -> tuple[object, ...]:
    return (type(block), *((name, p.shape) for name, p in block.named_parameters()))


def _outermost(module: nn.Module, chosen: set[int]) -> list[nn.Module]:
    """The chosen modules that are in no other chosen module, in order."""
    if id(module) in chosen:
        return [module]
    return [one for child in module.children() for one in _outermost(child, chosen)]
