"""Engines around a small GPT-2 on two ranks, watched: which types they compute, add up and send in.

Case (`zero3-bf16`) -> what was seen. Nothing here casts; nor does a task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.training.components.language import Language
from runner.training.engines.base import Engine
from runner.training.setup import make_engine

RANKS = 2
MANY = 16
"""Micro batches of a step. Added up in bf16, their sum would be off by 2e-4."""
ENGINES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "_scaled_dot_product_flash_attention_for_cpu",
}
SENT = {"allreduce_", "reduce_", "_reduce_scatter_base_", "reduce_scatter_", "allreduce_coalesced_"}


class Watch(TorchDispatchMode):
    """The types of matrix products and of what collectives add up, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        kind = (
            "product"
            if name in PRODUCTS
            else "sent"
            if namespace == "c10d" and name in SENT
            else ""
        )
        if kind:
            # One number is a flag or a norm, not a gradient.
            self.seen[kind] |= {
                str(t.dtype) for t in _tensors(args) if t.is_floating_point() and t.numel() > 1
            }
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def small() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Language(
        GPT2LMHeadModel(settings), causal=True, head=methodcaller("get_output_embeddings")
    )


def batch(part: int, rank: int) -> dict[str, torch.Tensor]:
    """A micro batch."""
    random = torch.Generator().manual_seed(1000 * rank + part)
    ids = torch.randint(0, 64, (2, 16), generator=random)
    return {"input_ids": ids, "labels": ids}


def made(run_file: Path, name: str, precision: str, accumulation: int) -> Engine:
    """An engine that clips nothing away, but goes the way of one that does."""
    zero = int(name[-1]) if name.startswith("zero") else 3 if name == "fsdp" else 0
    engine = "deepspeed" if name.startswith("zero") else name
    config = RunConfig.load(run_file, [f"engine.name={engine}", "optimizer.clip=1e9"])
    total = RANKS * 2 * accumulation
    plan = TrainingPlan(16, RANKS, total, 2, accumulation, precision, zero, ())
    return make_engine(small(), config, plan, torch.device("cpu"))


def step(engine: Engine, accumulation: int) -> float | torch.Tensor:
    """One step; returns the gradient's norm."""
    for part in range(accumulation):
        last = part == accumulation - 1
        loss = engine.forward(batch(part, dist.get_rank()), last=last)
        engine.backward(loss / (RANKS * accumulation * 30), last=last)
    return engine.step(1e-3)


@contextmanager
def gradients(engine: Any, seen: dict[str, set[str]]) -> Iterator[None]:
    """Notes the types that the optimizer updates, and of the gradients that it does it with."""
    optimizer = getattr(engine, "_base", None) or engine._optimizer

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                seen["master"].add(str(parameter.dtype))
                seen["gradient"].add(str(parameter.grad.dtype))

    handle = optimizer.register_step_pre_hook(note)
    yield
    handle.remove()


def observed(run_file: Path, name: str, precision: str) -> dict[str, Any]:
    """What one step of two micro batches computes and sends in."""
    engine = made(run_file, name, precision, 2)
    with Watch() as watch, gradients(engine, watch.seen):
        norm = step(engine, 2)
    seen = {kind: sorted(types) for kind, types in watch.seen.items()}
    return {**seen, "norm": float(norm), "skips": precision == "fp16" or is_skipped(engine)}


def is_skipped(engine: Engine) -> bool:
    """Whether a step with a gradient of inf says so, and changes no weight."""
    before = engine.export()
    for part in range(2):
        loss = engine.forward(batch(part, dist.get_rank()), last=part == 1)
        engine.backward(loss * math.inf, last=part == 1)
    norm, after = float(engine.step(1e-3)), engine.export()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same and not math.isfinite(norm)


def reference(accumulation: int, *, autocast: bool) -> float:
    """The norm of the sum in float64 of the micro batches' gradients, each computed in bf16."""
    module = small() if autocast else small().to(torch.bfloat16)
    total = {
        name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()
    }
    for part in range(accumulation):
        for rank in range(RANKS):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = module(**batch(part, rank))
            (loss / (accumulation * 30)).backward()
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.double() / RANKS
    return float(torch.cat([t.flatten() for t in total.values()]).norm())


def observations(run_file: Path) -> dict[str, Any]:
    """All cases. Every rank calls it."""
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on CPUs, which compute in it, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    found: dict[str, Any] = {}
    for name in ENGINES:
        for precision in ("fp32", "bf16", "fp16"):
            if (name, precision) not in (("zero0", "bf16"), ("zero0", "fp16")):  # the plan refuses
                found[f"{name}-{precision}"] = observed(run_file, name, precision)
        if name != "zero0":
            found[f"{name}-sum"] = float(step(made(run_file, name, "bf16", MANY), MANY))
    found |= {"sum": reference(MANY, autocast=False), "sum-ddp": reference(MANY, autocast=True)}
    return found
