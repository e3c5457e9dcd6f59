"""What LoRA trains and what the rest weighs, from the shapes of a model's weights. Pure.

Shapes of the safetensors headers -> which weights the targets name, how many parameters are trained, how many
quantised. An estimate where a checkpoint names its weights otherwise than the model does: the ranks look at the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runner.config import RunConfig
from runner.errors import UsageError
from runner.shapes import ModelShape

Shapes = Mapping[str, Sequence[int]]
IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Target:
    """What peft calls a module that gets matrices: its whole name, or how it ends."""

    name: str

    def names(self, module: str) -> bool:
        """Whether it means this module."""
        return module == self.name or module.endswith(f".{self.name}")


def with_lora(shape: ModelShape, config: RunConfig, shapes: Shapes | None, defaults: Sequence[str]) -> ModelShape:
    """`shape` with what is trained and what is quantised; as it is where the run trains all weights.

    Args:
        shapes: name -> shape of each weight; None where no weights are there.
        defaults: the targets where the run file has none; empty: all linear layers.

    Raises:
        UsageError: a target that no weight belongs to.
    """
    lora = config.lora
    if lora is None:
        return shape
    if not shapes:
        # Four square matrices a layer: attention's.
        return replace(shape, num_trained=8 * lora.rank * shape.hidden * shape.layers)
    matrices = {
        name.removesuffix(".weight"): s for name, s in shapes.items() if name.endswith(".weight") and len(s) > 1
    }
    inner = {name: s for name, s in matrices.items() if IN_A_LAYER.search(name)}
    targets = [Target(name) for name in lora.targets or defaults]
    check_targets(config, lora.targets, list(matrices))
    chosen = [s for name, s in matrices.items() if any(t.names(name) for t in targets)] if targets else inner.values()
    return replace(
        shape,
        num_trained=lora.rank * sum(s[0] + math.prod(s[1:]) for s in chosen),
        num_quantized=sum(math.prod(s) for s in inner.values()) if config.quantization else 0,
    )


def check_targets(config: RunConfig, targets: Sequence[str], modules: Sequence[str]) -> None:
    """Refuses a target that no module has.

    Args:
        modules: the names of all that could have matrices.

    Raises:
        UsageError: naming those there are.
    """
    for target in targets:
        if not any(Target(target).names(module) for module in modules):
            inner = [name for name in modules if IN_A_LAYER.search(name)]
            known = sorted({name.rpartition(".")[2] for name in inner or modules})
            raise UsageError(
                f"{config.path}: lora.targets: the model `{config.model.asset}` has no module `{target}`.",
                f"It has: {', '.join(known)}.",
            )
