"""Checks before a rank starts that the model has the layers that `engine.wrap` names.

The model is built on torch's meta device, which takes no memory. This happens in a child process,
because the launcher does not import torch. The ranks check it where torch or transformers is not
installed here, or where the ranks run another environment.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runner.child import in_child
from runner.config.run_config import RunConfig
from runner.config.tasks import TASKS
from runner.errors import StageError, UsageError


def check_wrap(config: RunConfig, model: Path) -> str | None:
    """Builds the model without weights and looks for the layers of `engine.wrap`.

    Args:
        config: the run file.
        model: the folder with the model's config.json.

    Returns:
        A line for the user; None: there was nothing to check.

    Raises:
        UsageError: the model has no such layer; the message lists the layers it has.
    """
    # A number of parameters cannot be wrong: the ranks print what it chooses.
    if config.engine.name != "fsdp" or "layer" not in (config.engine.wrap or {}):
        return None
    if why_not := why_not_here(config):
        return f"engine.wrap: left to the ranks: {why_not}"
    try:
        found = in_child(_look, (config, model), "building the model", "")
    except UsageError:
        raise
    except StageError as error:
        found = f"left to the ranks: {error.message}"
    return f"engine.wrap: {found}"


def check_fsdp(config: RunConfig, kind: str) -> None:
    """Refuses FSDP2 on CPUs with a torch that has it for GPUs only.

    Before torch 2.7, `fully_shard` uses streams that `torch.cpu` does not have.

    Args:
        config: the run file.
        kind: of the device, `cuda` or `cpu`.

    Raises:
        UsageError: this torch cannot do it.
    """
    if config.engine.name != "fsdp" or kind != "cpu":
        return
    found = version("torch")
    if tuple(int(part) for part in found.split(".")[:2]) < (2, 7):
        raise UsageError(
            f"{config.place('engine.name')}: "
            f"engine.name: fsdp on CPUs needs torch 2.7 or newer; this is {found}.",
            "Set engine: {name: deepspeed} or {name: ddp}.",
        )


def why_not_here(config: RunConfig) -> str:
    """Returns why a model cannot be built by this command's Python; empty: it can."""
    if config.environment is not None or config.slurm.container:
        return "they run another environment than this command"
    for package in ("torch", "transformers"):
        try:
            version(package)
        except PackageNotFoundError:
            return f"{package} is not installed here"
    return ""


def _look(config: RunConfig, model: Path) -> str:
    """The layers that are wrapped, as text; runs in the child.

    Raises:
        UsageError: the model has no such layer.
    """
    from runner.training.engines.fsdp import blocks_of

    return blocks_of(on_meta(config, model), config)[1]


def on_meta(config: RunConfig, model: Path, **how: Any) -> Any:
    """Builds the run's transformers model without weights, on torch's meta device.

    Only for child processes and ranks: it imports torch.

    Args:
        config: the run file.
        model: the folder with the model's config.json.
        how: keyword arguments of `from_config`.
    """
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(str(model), local_files_only=True)
    auto = getattr(transformers, TASKS[config.task].auto)
    # Imports the model's module now: transformers 5.0 makes tensors while it is imported, and reads
    # them, which cannot be done on the meta device.
    auto._model_mapping.get(type(settings), None)
    with torch.device("meta"):
        return auto.from_config(settings, **how)
