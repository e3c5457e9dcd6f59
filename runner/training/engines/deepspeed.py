"""DeepSpeed at ZeRO 0 to 3, on GPUs (nccl) and CPUs (gloo).

What is set, and why, is in `ds_config`: a pure function of the plan and of their own ds_config.json. Nothing is
compiled at start: DeepSpeed would build its own Adam for the CPU, where torch's fused one does as well, and a
shared-memory collective that only inference uses. Only NVMe offload needs a compiler (its asynchronous files).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.config import RunConfig
from runner.errors import UsageError
from runner.plan import Plan
from runner.resume import read_state
from runner.training.engines.base import DTYPES, gathered
from runner.training.engines.norms import widen_norms
from runner.training.optimizers import make_optimizer
from runner.training.staging import Stage

TAG = "engine"
CONVERTED = "universal.tmp"


def ds_config(config: RunConfig, plan: Plan, *, pin: bool = False) -> dict[str, Any]:
    """The configuration handed to DeepSpeed: theirs, with what this run decided on top. Pure.

    Args:
        pin: whether offloaded tensors lie in pinned memory, which only a GPU has use for.
    """
    theirs = dict(config.deepspeed)
    zero = {**dict(theirs.pop("zero_optimization", {})), "stage": plan.zero}
    if not any(key.startswith("offload_") for key in zero):
        zero |= _offload(config, plan, pin)
    low: dict[str, Any] = {"bf16": {"enabled": True}} if plan.precision == "bf16" else {}
    if plan.precision == "fp16":
        # loss_scale 0: dynamic, from 2**16 down.
        low = {"fp16": {"loss_scale": 0, "initial_scale_power": 16, **dict(theirs.pop("fp16", {})), "enabled": True}}
    return {
        "steps_per_print": 2**31,
        **{key: value for key, value in theirs.items() if key not in ("bf16", "fp16")},
        **low,
        "zero_optimization": zero,
        "train_batch_size": plan.total,
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }


def _offload(config: RunConfig, plan: Plan, pin: bool) -> dict[str, Any]:
    """Optimizer state off the device; at stage 3 the weights too."""
    if plan.offload == "none":
        return {}
    place: dict[str, Any] = {"device": plan.offload, "pin_memory": pin}
    if plan.offload == "nvme":
        place["nvme_path"] = config.engine.nvme_path
    return {"offload_optimizer": place, **({"offload_param": place} if plan.zero == 3 else {})}


class DeepSpeedEngine:
    """`deepspeed.initialize` behind the loop's protocol."""

    notes: tuple[str, ...] = ()

    def __init__(self, module: nn.Module, config: RunConfig, plan: Plan, device: torch.device) -> None:
        deepspeed = _import_joined(device)
        if plan.offload == "nvme":
            _check_asynchronous_files(config)
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # partitioning fails on views (DeepSpeed#6571)
        self._plan, self._config, self._device = plan, config, device
        settings = ds_config(config, plan, pin=device.type == "cuda")
        self._stage = Stage(device)
        self.notes = widen_norms(module, plan.precision)
        if plan.zero == 3:
            # Partitions weight by weight; `initialize` alone would first move the whole model to the device.
            deepspeed.zero.Init(module=module, config_dict_or_path=settings)
        # torch's fused Adam does for what is offloaded to the CPU what DeepSpeed would compile.
        fused = device.type == "cuda" or plan.offload != "none"
        self._base = make_optimizer(module, config.optimizer, fused=fused)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=self._base, config=settings, dist_init_required=False
        )
        self._count_on()
        if config.compile:
            self._engine.compile()

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        return self._engine(**{name: tensor.to(self._device) for name, tensor in batch.items()})  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed divides by accumulation and averages over ranks; the loop has scaled for the sum.
        self._engine.backward(loss * (self._plan.accumulation * self._plan.world_size))
        if not last:
            self._engine.step()  # counts the micro batch; updates nothing before the boundary

    def step(self, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._norm_at_stage_0() if self._is_plain else None
        if norm is None or math.isfinite(norm):
            self._engine.step()
        else:  # every other stage passes over such a step by itself
            self._engine.module.zero_grad(set_to_none=True)
            self._engine.micro_steps += 1
        return float(norm if norm is not None else self._engine.get_global_grad_norm() or 0.0)

    @property
    def _is_plain(self) -> bool:
        """Stage 0 in fp32 keeps torch's optimizer as it is, which knows no norm."""
        return self._plan.zero == 0 and self._plan.precision == "fp32"

    def _norm_at_stage_0(self) -> float:
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self._leaves_out_frozen
        )

    def stage(self, folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
        keeper = _Keeper(self._engine.checkpoint_engine, self._stage)
        self._engine.checkpoint_engine = keeper
        try:
            self.save(folder)
        finally:
            self._engine.checkpoint_engine = keeper.real
        return keeper.write

    def load(self, folder: Path) -> None:
        saved = read_state(folder)
        # At stage 0 every rank holds everything: any number of ranks can read it.
        if self._plan.zero == 0 or (saved.world_size, saved.zero) == (self._plan.world_size, self._plan.zero):
            self._load(folder)
        else:
            self._load_converted(folder, saved.world_size)

    def _load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._leaves_out_frozen)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        self._count_on()  # a checkpoint brings its own loss scaler

    def _count_on(self) -> None:
        """At the smallest loss scale DeepSpeed would raise a bare `Exception`; the loop counts such steps, and tells.

        It then passes over the step as over those before, and stays at that scale.
        """
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False

    @property
    def _leaves_out_frozen(self) -> bool:
        """What LoRA does not train comes from the bundle again; at stage 3 DeepSpeed keeps it with the rest."""
        return self._config.lora is not None and self._plan.zero < 3

    def _load_converted(self, folder: Path, saved_ranks: int) -> None:
        """A checkpoint partitioned for other ranks: rank 0 converts it (DeepSpeed's universal checkpoint).

        It knows AdamW on a whole model only: anything else has been refused (runner.resume).
        """
        converted = folder.parent / CONVERTED  # beside it: a checkpoint holds what its list names and nothing else
        said: list[str | None] = [None]
        if dist.get_rank() == 0:
            said[0] = _convert(folder / TAG, converted)
        dist.broadcast_object_list(said)
        if said[0] is not None:
            raise OSError(f"{folder}: converting it for {self._plan.world_size} ranks failed: {said[0]}")
        kept = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        # Said in the configuration it would have to be known before the engine is made.
        self._engine._config.load_universal_checkpoint = True
        self._load(converted)
        self._engine._config.load_universal_checkpoint = False
        # At stage 3 DeepSpeed gives every group the decay of the first, and all weights one and the same count of
        # steps, a tensor that each of them would increase.
        for group, values in zip(self._optimizer.param_groups, kept, strict=True):
            group.update(values)
        for state in self._base.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(converted)
        self.notes = (*self.notes, f"checkpoint of {saved_ranks} ranks converted for {self._plan.world_size}")

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param

        is_partitioned = self._plan.zero == 3 or (self._plan.zero and self._plan.precision != "fp32")

        def whole(_: str, parameter: nn.Parameter) -> torch.Tensor:
            # Only what is trained has a float32 copy; what is frozen has at stage 3 to be gathered.
            full = safe_get_full_fp32_param(parameter) if is_partitioned and parameter.requires_grad else None
            if full is None and hasattr(parameter, "ds_id"):
                with deepspeed_gathered(parameter):
                    return parameter.data.clone()
            return parameter.data if full is None else full

        dtype, is_first = DTYPES[self._plan.precision], dist.get_rank() == 0
        return gathered(self._engine.module, dtype, whole, is_first=is_first, frozen=frozen)


class _Keeper:
    """Stands in for what DeepSpeed saves files with: keeps copies of their content, to be written later.

    DeepSpeed's own decoupled engine needs libaio and a compiler, and starts a process for each rank.
    """

    def __init__(self, real: Any, stage: Stage) -> None:
        self.real, self._stage = real, stage
        self._files: list[tuple[Any, str]] = []

    def save(self, state_dict: Any, path: str) -> None:
        self._files.append((self._stage.stage(state_dict), path))

    def write(self) -> None:
        """Writes all files."""
        for content, path in self._files:
            self.real.save(content, path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def deepspeed_gathered(parameter: nn.Parameter) -> Any:
    """A context in which a parameter of stage 3 is whole on every rank."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameter)


def _import_joined(device: torch.device) -> Any:
    """DeepSpeed, in the group that the ranks have joined already."""
    import deepspeed

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        # It takes the GPU of that number; where Slurm shows each task its own GPU alone, that is 0 for all.
        os.environ["LOCAL_RANK"] = str(device.index)
    # All five rank variables are set, but it must not go looking for MPI in any case.
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _check_asynchronous_files(config: RunConfig) -> None:
    """NVMe offload compiles against libaio at start: said here, not in a compiler's words in the middle of it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    lacks = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if not AsyncIOBuilder().is_compatible(verbose=False):
        lacks.append("libaio (libaio-devel, libaio-dev)")
    if lacks:
        raise UsageError(
            f"{config.path}: engine.offload: nvme needs {', '.join(lacks)} on this node.",
            "Set engine.offload: cpu, or load a module that has it.",
        )


def _convert(source: Path, target: Path) -> str | None:
    """Runs DeepSpeed's converter, which touches no device, in a process of its own; the problem in words, or None."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source),
         "--output_folder", str(target / TAG), "--inject_missing_state"],
        env={**os.environ, "DS_ACCELERATOR": "cpu"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n")
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
