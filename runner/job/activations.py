"""What a micro batch takes on a rank's device beside the model's state: measured, or estimated.

`measured` runs `runner.training.footprint` in a child process, because the launcher does not import
torch. This takes seconds, so the answer is kept in the user's state folder until something that it
follows from changes. Where torch or transformers is not installed here, `estimated` is a formula;
the reason is printed with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner import kept
from runner.child import in_child
from runner.config.run_config import RunConfig
from runner.errors import StageError, UsageError, human_size
from runner.inputs import ModelInput
from runner.job.model_layers import why_not_here
from runner.job.shapes import ModelShape

# Of a GPU's memory. The rest is for the CUDA context, NCCL's buffers, workspaces of cuBLAS and
# cuDNN, and fragmentation, none of which is measured.
USABLE = 0.9
BUCKET = 50_000_000  # elements; what our ds_config sets
PREFETCH = 50_000_000  # elements; its stage3_prefetch_bucket_size
LIVE = 1_000_000_000  # elements; its stage3_max_live_parameters

_SOURCES = (Path(__file__), Path(__file__).parents[1] / "training" / "footprint.py")
# A micro batch takes the same with other values of these keys.
_WITHOUT_MEMORY = re.compile(
    "(name|bundle|epochs|steps|schedule|checkpoint|evaluation|hang_after|seed|slurm|datasets?|path|"
    "notes|lines)($|[.])"
)
# transformers imports these where they are installed; the child needs none of what they do.
_NOT_NEEDED = ("scipy", "sklearn")


@dataclass(frozen=True)
class Footprint:
    """The memory of a micro batch, in bytes.

    Attributes:
        each: per sequence, at the peak of a step.
        kept: per sequence, what the forward pass keeps for the backward pass.
        fixed: at the peak, whatever the micro batch is.
        buffers: of the engine, always.
        why_estimated: why it is a formula's; empty: it was measured.
    """

    each: int
    kept: int
    fixed: int
    buffers: int
    why_estimated: str = ""

    def largest(self, available: int) -> int:
        """Returns how many sequences fit in `available` bytes."""
        return max(0, available - self.fixed - self.buffers) // max(1, self.each)

    def __str__(self) -> str:
        fixed = human_size(self.fixed + self.buffers)
        if self.why_estimated:
            return (
                f"about {human_size(self.each)} of activations per sequence and {fixed} of buffers "
                f"(estimated: {self.why_estimated})"
            )
        return (
            f"{human_size(self.each)} per sequence at the peak ({human_size(self.kept)} of "
            f"activations) and {fixed} for any micro batch, measured on the meta device,"
        )


def measured(
    config: RunConfig,
    length: int,
    zero: int,
    *,
    model: ModelInput,
    shape: ModelShape,
    world_size: int,
) -> Footprint:
    """Measures in a child process, once; estimates where that is not possible here.

    Args:
        config: the run file, with its precision decided.
        length: tokens per sequence.
        zero: what the ranks partition, as a ZeRO stage.
        model: the bundle's model.
        shape: its counts.
        world_size: number of ranks.

    Raises:
        UsageError: the model cannot be trained as the run file says.
    """
    if why_not := why_not_here(config):
        return estimated(config, shape, length, zero, why_not)
    path = _kept_at(config, length, zero, model, shape, world_size)
    try:
        return Footprint(**kept.read(path))
    except TypeError:  # there is none, or it is of another version
        pass
    try:
        found = in_child(
            _measure, (config, length, zero, model, shape, world_size), "measuring memory", ""
        )
    except UsageError:
        raise
    except StageError as error:
        return estimated(config, shape, length, zero, error.message)
    if not found.why_estimated:
        kept.keep(path, asdict(found))
    return found


def _kept_at(
    config: RunConfig, length: int, zero: int, model: ModelInput, shape: ModelShape, world_size: int
) -> Path:
    """The file of a measurement; its name follows from all that decides what is measured."""
    given = sorted(key for key in config.given if not _WITHOUT_MEMORY.match(key))
    settings = {k: v for k, v in asdict(config).items() if not _WITHOUT_MEMORY.match(k)}
    first = (config.model.folder / "config.json",) if config.model.folder is not None else ()
    sources = [path.read_bytes() for path in (*_SOURCES, *first) if path.is_file()]
    return kept.path_of(
        "memory",
        kept.versions("torch", "transformers", "peft"),
        [hashlib.sha256(source).hexdigest() for source in sources],
        {**settings, "given": given, "theirs": sorted(config.theirs)},
        [length, zero, world_size, asdict(shape), os.environ.get("AIRLIFT_KERNELS")],
        sorted(model.tokenizer_digests.items()),
    )


def _measure(
    config: RunConfig, length: int, zero: int, model: ModelInput, shape: ModelShape, world_size: int
) -> Footprint:
    """In the child."""
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # `import` fails then
    from runner.training.footprint import footprint

    return footprint(config, length, zero, model=model, shape=shape, world_size=world_size)


def estimated(config: RunConfig, shape: ModelShape, length: int, zero: int, why: str) -> Footprint:
    """Estimates without torch. Pure.

    Per layer and token 34 bytes x hidden (Korthikanti et al., arXiv:2205.05198, eq. 2, without the
    attention map, which SDPA does not keep), and half as much again for what is kept in float32;
    with activation checkpointing 2 bytes x hidden, and one whole layer. Logits take 12 bytes per
    token of the vocabulary: in float32, their softmax and their gradient.

    Args:
        config: the run file.
        shape: the model's counts.
        length: tokens per sequence.
        zero: what the ranks partition, as a ZeRO stage.
        why: why it is not measured.
    """
    layer = 51 * shape.hidden
    layers = layer * shape.layers
    if config.activation_checkpointing:
        layers = layer + 2 * shape.hidden * shape.layers
    each = length * (layers + 12 * shape.vocabulary) if shape.hidden else 0
    every, trained = shape.num_parameters, shape.num_trained or shape.num_parameters
    buffers = 0
    if config.engine.name == "deepspeed":
        theirs = config.deepspeed.get("zero_optimization") or {}
        buffers = bucket_bytes(theirs, config.precision, zero, every, trained)
    return Footprint(each, each, 0, buffers, why)


def bucket_bytes(
    settings: Mapping[str, Any], precision: str, zero: int, every: int, trained: int
) -> int:
    """Returns the bytes of DeepSpeed's flat buckets, and at stage 3 of gathered weights. Pure.

    Source: deepspeed/runtime/zero/stage_1_and_2.py (ipg_buffer), stage3.py and
    partitioned_param_coordinator.py of 0.19.8. A bucket counts as no larger than the model.

    Args:
        settings: `zero_optimization` of the DeepSpeed configuration.
        precision: of the run.
        zero: the stage.
        every: parameters of the model.
        trained: those that are trained.
    """
    if zero == 0:
        return 0

    def setting(name: str, default: int) -> int:
        value = settings.get(name)
        return int(value) if isinstance(value, (int, float)) else default

    width = 4 if precision == "fp32" else 2
    bucket = min(trained, setting("reduce_bucket_size", BUCKET))
    copies = 2 if settings.get("overlap_comm", True) else 1
    # A bucket is cast to float32 to be reduced.
    total = bucket * (copies * width + (0 if width == 4 else 4))
    if zero == 3:
        live = setting("stage3_max_live_parameters", LIVE)
        ahead = setting("stage3_prefetch_bucket_size", PREFETCH)
        total += min(every, live + ahead) * width
    return total
