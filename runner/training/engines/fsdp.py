"""FSDP2 (`fully_shard`): weights, gradients and moments are sharded over the ranks, layer by layer.

`sharding: full` frees a layer's gathered weights after its forward and gathers them again for its
backward; `grad_op` keeps them in between. Gradients are sharded after every micro batch, because
whole ones need too much memory.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from runner.config.run_config import RunConfig
from runner.errors import UsageError, human_count
from runner.job.plan import TrainingPlan
from runner.training.components.device import DTYPES
from runner.training.engines.compiling import compile_blocks, compile_model, no_split_classes
from runner.training.engines.native import NativeEngine
from runner.training.weights import Weights


class FSDPEngine(NativeEngine):
    """`fully_shard` behind the loop's protocol."""

    def __init__(
        self, module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
    ) -> None:
        blocks, why = blocks_of(module, config)
        self.notes = (f"engine.wrap: {why}",)
        if config.compile:
            why = "FSDP2 gathers their weights one by one"
            how = compile_blocks(blocks, why) if blocks else compile_model(module)
            self.notes = (*self.notes, how)
        mesh = init_device_mesh(device.type, (plan.world_size,))
        policy = MixedPrecisionPolicy()
        if plan.precision != "fp32":
            # Gradients are added up over the ranks in float32, as with DDP under autocast.
            policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[plan.precision], reduce_dtype=torch.float32
            )
        offloads = plan.offload == "cpu" and device.type == "cuda"
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        keeps = config.engine.sharding == "grad_op"
        weights = Weights(module, device)
        for block in blocks:
            # One layer is whole on each rank's device meanwhile, as it is in training.
            weights.lend(block.parameters())
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=not keeps,
            )
        weights.lend(module.parameters())
        fully_shard(
            module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False
        )
        weights.finish()
        super().__init__(module, module, config, plan, device)


def blocks_of(module: nn.Module, config: RunConfig) -> tuple[list[nn.Module], str]:
    """The layers that are gathered one at a time, inner ones first. The rest is gathered as one.

    Returns:
        The layers, and the reason for the choice.

    Raises:
        UsageError: the model has no layer of the requested class, or does not name its layers.
    """
    tied = _tied(module)
    wrap = config.engine.wrap or {}
    if "min_params" in wrap:
        least = int(wrap["min_params"])
        chosen = list(_of_size(module, least, tied))
        return chosen, f"{human_count(len(chosen), 'module')} of at least {least:,} parameters"
    layer = wrap.get("layer")
    known = {str(layer)} if layer else no_split_classes(module)
    found = Counter(type(m).__name__ for m in module.modules() if type(m).__name__ in known)
    names = {name for name, count in found.items() if layer or count > 1}
    if found and not names:
        return [], "the model repeats no layer: all its weights are gathered as one"
    chosen = [m for m in module.modules() if type(m).__name__ in names and not _owned(m) & tied]
    if not chosen:
        problem = "the model does not name its layers."
        if layer:
            near = difflib.get_close_matches(
                str(layer), {type(m).__name__ for m in module.modules()}, n=1
            )
            hint = f" Did you mean `{near[0]}`?" if near else ""
            problem = f"the model `{config.model.asset}` has no layer `{layer}` to wrap.{hint}"
        raise UsageError(
            f"{config.path}: engine.wrap: {problem}",
            f"Its repeated layers: {', '.join(_repeated(module)) or 'none'}. "
            "Or set min_params: 1000000.",
        )
    counted = ", ".join(f"{found[name]} x {name}" for name in sorted(names))
    why = "as the run file says" if layer else "the layers the model itself repeats"
    return chosen[::-1], f"{counted} ({why})"


def _repeated(module: nn.Module) -> list[str]:
    """Classes of composed modules that occur more than once, the largest first."""
    sizes = {
        type(m).__name__: sum(p.numel() for p in m.parameters())
        for m in module.modules()
        if any(m.children())
    }
    counts = Counter(type(m).__name__ for m in module.modules())
    listed = [
        name
        for name in sizes
        if counts[name] > 1 and name not in ("ModuleList", "Sequential", "ModuleDict")
    ]
    return sorted(listed, key=lambda name: -sizes[name])[:8]


def _owned(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}


def _tied(module: nn.Module) -> set[int]:
    """Parameters that several modules use (input and output embedding). They are gathered with the
    whole.
    """
    uses = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return {key for key, count in uses.items() if count > 1}


def _of_size(module: nn.Module, least: int, tied: set[int]) -> Iterator[nn.Module]:
    """Modules of at least `least` parameters, inner ones first.

    The parameters of a chosen module do not count for the modules around it.
    """
    taken: set[int] = set()

    def visit(here: nn.Module) -> Iterator[nn.Module]:
        for child in here.children():
            yield from visit(child)
        left = {id(p): p.numel() for p in here.parameters() if id(p) not in taken}
        container = isinstance(here, (nn.ModuleList, nn.ModuleDict, nn.ParameterList))
        if (
            here is not module
            and not container
            and not set(left) & tied
            and sum(left.values()) >= least
        ):
            taken.update(left)
            yield here

    return visit(module)
