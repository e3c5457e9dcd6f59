"""How weights reach the ranks: rank 0 reads them, and hands them out one at a time.

Reading everything on every rank takes 4 bytes per parameter and rank of a node. Here rank 0 maps
the safetensors files and all other ranks build the model on `meta`, without memory. An engine then
takes weight by weight: rank 0 copies it from the file to its device and broadcasts it, and each
rank keeps what the engine keeps of it. A weight's copy on rank 0 ends with its turn.

The running statistics of batch norm: each rank normalises by its own micro batches. After every
step the running means and variances are averaged over the ranks, so evaluation and export are the
same on every rank and with every engine. Otherwise DDP would take rank 0's, and FSDP2 and DeepSpeed
would evaluate with each rank's own and export rank 0's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.run_config import RunConfig
from runner.from_stage import StageError, UsageError

T = TypeVar("T")
LOW = (torch.float16, torch.bfloat16)  # buffers and untrained weights of these become float32


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What rank 0 makes, on every rank; or its error. All ranks call it.

    Args:
        make: called on rank 0 only. Its result can be pickled.
        group: of all ranks; None: that of torch, whose backend may need a GPU.

    Raises:
        Exception: what `make` raised, on every rank, so that none waits for another.
    """
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = make()
        except Exception as error:  # noqa: BLE001 - every rank raises it
            outcome[1] = error if _can_be_sent(error) else RuntimeError(f"rank 0: {error!r}")
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def _can_be_sent(error: Exception) -> bool:
    """Whether another process can rebuild an error."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        return False
    return True


def widen_untrained(model: nn.Module) -> None:
    """Makes buffers and weights that are not trained float32; `Weights` does it for the others."""
    for parameter in model.parameters():
        if parameter.dtype in LOW and not parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in LOW:
                setattr(module, name, buffer.float())


@dataclass
class _Weight:
    """One parameter, and the names of all places that use it."""

    names: list[str]
    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool
    value: torch.Tensor | None = None


class Weights:
    """All weights of a module, to be filled in. All ranks make it at the same time.

    The module has rank 0's structure, buffers and ties afterwards, and its parameters are on
    `meta`.

    Args:
        module: has its weights on rank 0; what other ranks have is not used.
        device: of this rank. Weights and buffers come here.
        narrow: the type of all floating-point weights; None: float32 for those that are trained,
            and their own for the others.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, *, narrow: torch.dtype | None = None
    ) -> None:
        self._device, self._narrow = device, narrow
        self._lent = torch.empty(0, dtype=torch.uint8, device=device)
        ours = _weights(module) if is_first() else []
        specs: list[_Weight] = from_first(
            lambda: [_Weight(w.names, w.shape, w.dtype, w.is_trained) for w in ours]
        )
        self._waiting: dict[int, _Weight] = {}
        self._module = module
        for number, weight in enumerate(specs):
            weight.value = ours[number].value if ours else None
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            self._waiting[id(self._set(weight, empty))] = weight
        ours.clear()
        self._spread_buffers()

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fills in those of these parameters that are still empty, for good."""
        for weight in self._taken(parameters):
            size = weight.shape.numel() * self._dtype(weight).itemsize
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._set(weight, self._value(weight, memory, broadcast=True))

    def lend(
        self, parameters: Iterable[nn.Parameter], *, broadcast: bool = True
    ) -> list[nn.Parameter]:
        """Fills them in until the next call, whose weights are in the same memory.

        Allocated and freed one by one, weights of many sizes would leave gaps as large as half the
        model in the C library's memory, between the shards that stay.

        Args:
            parameters: of the module.
            broadcast: False: the caller does that; other ranks get any content.

        Returns:
            The new parameters: the caller copies its part of them.
        """
        weights = self._taken(parameters)
        sizes = [-(-w.shape.numel() * self._dtype(w).itemsize // 64) * 64 for w in weights]
        if sum(sizes) > self._lent.numel():
            self._lent = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._lent = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        parts = torch.split(self._lent[: sum(sizes)], sizes) if sizes else ()
        return [
            self._set(weight, self._value(weight, part, broadcast=broadcast))
            for weight, part in zip(weights, parts, strict=True)
        ]

    def finish(self) -> None:
        """Checks that nothing is empty, and that nothing is still in memory that was lent.

        Raises:
            RuntimeError: an engine has kept a weight that it should have copied.
        """
        lent = self._lent.untyped_storage().data_ptr() if self._lent.numel() else None
        for name, parameter in self._module.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            is_lent = local.numel() and local.untyped_storage().data_ptr() == lent
            if local.is_meta or is_lent:
                raise RuntimeError(f"{name}: {'never filled in' if local.is_meta else 'lent'}")

    def _taken(self, parameters: Iterable[nn.Parameter]) -> list[_Weight]:
        """The weights of those parameters that are still empty. They are filled in next."""
        found = (self._waiting.pop(id(empty), None) for empty in list(parameters))
        return [weight for weight in found if weight is not None]

    def _dtype(self, weight: _Weight) -> torch.dtype:
        if not weight.dtype.is_floating_point:
            return weight.dtype
        return self._narrow or (torch.float32 if weight.is_trained else weight.dtype)

    def _value(self, weight: _Weight, memory: torch.Tensor, *, broadcast: bool) -> torch.Tensor:
        """A weight in `memory` (bytes, at least as many as it needs)."""
        dtype = self._dtype(weight)
        memory = memory[: weight.shape.numel() * dtype.itemsize]
        value = memory.view(dtype).view(weight.shape)
        if is_first():
            assert weight.value is not None
            # A copy: training must not depend on the mapped file.
            value.copy_(weight.value)
            weight.value = None
            _check_numbers(value, weight.names[0])
        if broadcast and value.numel():
            # As bytes: every backend sends those, whatever the type.
            dist.broadcast(memory, 0)
        return value

    def _set(self, weight: _Weight, value: torch.Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=weight.is_trained)
        for name in weight.names:
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, parameter)
        return parameter

    def _spread_buffers(self) -> None:
        """Rank 0's buffers on every rank, and tensors that a module keeps as plain attributes."""
        modules = dict(self._module.named_modules())
        kept = from_first(
            lambda: [
                (path, name, tensor.cpu())
                for path, module in modules.items()
                for name, tensor in (*module.named_buffers(recurse=False), *vars(module).items())
                if isinstance(tensor, torch.Tensor)
            ]
        )
        for path, name, tensor in kept:
            # In their own type: rotary frequencies and running statistics need float32.
            if name in dict(modules[path].named_buffers(recurse=False)):
                setattr(modules[path], name, tensor.to(self._device, copy=True))
            elif getattr(modules[path], name).is_meta:
                setattr(modules[path], name, tensor)


def _check_numbers(value: torch.Tensor, name: str) -> None:
    """Refuses a weight with nan or inf: the first step would end the run, and blame the step.

    The least and the largest value are not finite either then, and they take no memory. (The sum
    in float32 takes a copy of a weight of 16 bits.)

    Raises:
        StageError: on rank 0, before the first step.
    """
    if not value.is_floating_point() or not value.numel():
        return
    # Those functions know no types of 8 bits, which fit into 16.
    numbers = value if value.element_size() > 1 else value.to(torch.float16)
    if not torch.stack(torch.aminmax(numbers)).isfinite().all():
        raise StageError(
            f"the weight {name} has values that are nan or inf, as they are in its file"
            + (", or beyond 65504, the most in fp16." if value.dtype == torch.float16 else "."),
            "Stage another revision of the model (or export it again, if it is yours)"
            + ("; or set precision: bf16 or fp32." if value.dtype == torch.float16 else "."),
            exit_code=1,
        )


def _weights(module: nn.Module) -> list[_Weight]:
    """The parameters of a module, in its order, tied ones once."""
    found: dict[int, _Weight] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        weight = found.setdefault(
            id(parameter),
            _Weight([], parameter.shape, parameter.dtype, parameter.requires_grad, parameter.data),
        )
        weight.names.append(name)
    return list(found.values())


def check_batch_norm(module: nn.Module, config: RunConfig, precision: str) -> None:
    """Refuses batch norm whose weights the engine casts to 16 bits.

    torch's takes no weights of 16 bits beside running statistics of 32, and in 16 bits a running
    mean cannot move by its small steps. DDP computes under autocast, which keeps it in float32.

    Raises:
        UsageError: the engine would cast the weights of the module's batch norm.
    """
    casts = precision != "fp32" and config.engine.name != "ddp"
    if casts and any(isinstance(m, _BatchNorm) for m in module.modules()):
        raise UsageError(
            f"{config.place('engine.name')}: this model has batch norm, which cannot be trained "
            f"in {precision} with {config.engine.name}.",
            "Set engine: {name: ddp}, or precision: fp32.",
        )


class RunningStatistics:
    """The running means and variances of a module's batch norm, if it has any."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [
            m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats
        ]

    @torch.no_grad()
    def agree(self) -> None:
        """Averages them over the ranks. All ranks call it after each step.

        A running mean is linear in its inputs, so this is the running mean of the averages.
        """
        buffers = [
            b
            for m in self._norms
            if m.training
            for b in (m.running_mean, m.running_var)
            if b is not None
        ]
        if not buffers:
            return
        flat = torch.cat([buffer.float().flatten() for buffer in buffers])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))
