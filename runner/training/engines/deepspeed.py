"""DeepSpeed at ZeRO 0 to 3, on GPUs (nccl) and CPUs (gloo).

What is set, and why, is in `ds_config`: a pure function of the plan and of their own ds_config.json. On a CPU nothing
is compiled at start: DeepSpeed would build a shared-memory collective (only inference uses it) and its own Adam.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.config import OptimizerConfig, RunConfig
from runner.launch import RankEnvironment
from runner.plan import Plan

TAG = "engine"


def ds_config(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """The configuration handed to DeepSpeed: theirs, with what this run decided on top. Pure."""
    theirs = dict(config.deepspeed)
    zero = {**dict(theirs.pop("zero_optimization", {})), "stage": plan.zero}
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


def prepare_environment(environ: dict[str, str] | os._Environ[str], device: str) -> None:
    """Must be called before DeepSpeed is imported: it looks for an accelerator then."""
    if device == "cpu":
        environ["DS_ACCELERATOR"] = "cpu"


def init_distributed(device: str, place: RankEnvironment, meeting_file: str | None) -> None:
    """Joins the other ranks. All five rank variables are set, or DeepSpeed would go looking for MPI.

    Args:
        meeting_file: where ranks on one machine meet; None: at MASTER_ADDR and MASTER_PORT.
    """
    import deepspeed

    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        init_method=f"file://{meeting_file}" if meeting_file else None,
        rank=place.rank,
        world_size=place.world_size,
    )


class DeepSpeedEngine:
    """`deepspeed.initialize` behind the loop's protocol."""

    def __init__(self, module: nn.Module, config: RunConfig, plan: Plan, device: torch.device) -> None:
        import deepspeed

        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # partitioning fails on views (DeepSpeed#6571)
        self._plan, self._clip, self._device = plan, config.optimizer.clip, device
        settings = ds_config(config, plan)
        if plan.zero == 3:
            # Partitions weight by weight; `initialize` alone would first move the whole model to the device.
            deepspeed.zero.Init(module=module, config_dict_or_path=settings)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(module, config.optimizer),
            config=settings,
            dist_init_required=False,
        )

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
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
        self._engine.step()
        return float(norm if norm is not None else self._engine.get_global_grad_norm() or 0.0)

    @property
    def _is_plain(self) -> bool:
        """Stage 0 in fp32 keeps torch's optimizer as it is, which knows no norm."""
        return self._plan.zero == 0 and self._plan.precision == "fp32"

    def _norm_at_stage_0(self) -> float:
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")

    def export(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param

        is_first = torch.distributed.get_rank() == 0
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self._plan.precision]
        state: dict[str, Any] = {}
        for name, parameter in self._engine.module.named_parameters():
            full = parameter.data
            if self._plan.zero == 3 or (self._plan.zero and self._plan.precision != "fp32"):
                # A collective: every rank must ask for every parameter, in the same order.
                full = safe_get_full_fp32_param(parameter)
            if is_first:
                state[name] = full.detach().to("cpu", dtype, copy=True)
        if is_first:
            kept = self._engine.module.state_dict().keys()  # without the buffers that are not saved
            buffers = self._engine.module.named_buffers()
            state |= {name: buffer.detach().cpu().clone() for name, buffer in buffers if name in kept}
        return state


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; biases and norms (vectors) do not decay, as in BERT (google-research/bert, optimization.py)."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    # A parameter that ZeRO-3 has partitioned is an empty vector; its true shape is in `ds_shape`.
    is_vector = {id(p): len(getattr(p, "ds_shape", p.shape)) <= 1 for p in parameters}
    groups = [
        {"params": [p for p in parameters if not is_vector[id(p)]], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if is_vector[id(p)]], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
