"""How many bytes a run needs on disk, and whether they are free."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.errors import IncompleteError, human_size
from runner.plan.shapes import ModelShape
from runner.run_folder.layout import RunFolder


def disk_needed(config: RunConfig, shape: ModelShape) -> int:
    """Returns the most bytes that a run needs on disk.

    These are `keep` checkpoints, the best one, one more while it is written, and the model. A
    checkpoint holds the weights and Adam's two moments in fp32 (12 bytes per parameter) and a
    second copy of the weights (4). With LoRA, it holds these for the trained parameters only; at
    ZeRO stage 3 it also holds all weights (4). The exported model is whole if LoRA is merged.
    """
    if shape.num_trained is not None:
        may_be_stage_3 = config.engine.name == "deepspeed" and config.engine.zero in ("auto", 3)
        frozen = 4 * shape.num_parameters if may_be_stage_3 and not config.quantization else 0
        checkpoints = (16 * shape.num_trained + frozen) * (
            config.checkpoint.keep + 1 + config.checkpoint.best
        )
        merged = config.lora is not None and config.lora.merge
        return checkpoints + 4 * (shape.num_parameters if merged else shape.num_trained)
    return shape.num_parameters * (16 * (config.checkpoint.keep + 1 + config.checkpoint.best) + 4)


def check_disk(config: RunConfig, folder: RunFolder, shape: ModelShape, needed: int) -> None:
    """Compares the free space at the run folder with what the run still needs.

    Args:
        needed: bytes that the run needs in all, from `disk_needed`.

    Raises:
        IncompleteError: too little is free.
    """
    existing = folder.root.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    more = disk_still_needed(config, folder.checkpoints, needed)
    if free >= more:
        return
    beside = ""
    if more < needed:
        beside = f" beside the checkpoints that are there ({human_size(needed)} in all)"
    least = replace(config, checkpoint=replace(config.checkpoint, keep=1))
    with_one = disk_still_needed(least, folder.checkpoints, disk_needed(least, shape))
    fewer = ", or keep fewer: --set checkpoint.keep=1" if free >= with_one < more else ""
    also = ""
    if not fewer and with_one < more:
        also = f" (--set checkpoint.keep=1 needs {human_size(with_one)})"
    raise IncompleteError(
        f"{folder.root}: checkpoints and model need up to {human_size(more)}{beside}; "
        f"{human_size(free)} are free.",
        f"Free space there{',' if fewer else ' or'} choose another --output{fewer}{also}",
    )


def disk_still_needed(config: RunConfig, checkpoints: Path, needed: int) -> int:
    """Returns how many bytes a run needs beyond those that its own checkpoints already take.

    A new checkpoint replaces an old one, but only when it is complete. So space for one is always
    needed.

    Args:
        config: the run file.
        checkpoints: the folder with the run's checkpoints.
        needed: the most bytes that the run needs in all.
    """
    there = sum(p.stat().st_size for p in checkpoints.glob("step-*/**/*") if p.is_file())
    one = needed // (config.checkpoint.keep + 1 + config.checkpoint.best)
    return max(needed - there, one)
