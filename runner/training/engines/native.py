"""torch's own engines: DistributedDataParallel, and FSDP2 (`fully_shard`).

Both have torch's optimizers and loss scaling, for whole parameters or DTensors. Master weights,
gradients and moments are float32 in every precision; bf16 and fp16 are only for computing.

A checkpoint is one of torch.distributed.checkpoint, by parameter name: DDP and FSDP2 read each
other's, on any number of ranks. Its content is nested dicts: tensors that all ranks hold whole (one
rank writes each), DTensors (each rank writes its shard) and small values.

FSDP2: `sharding: full` frees a layer's gathered weights after its forward and gathers them again
for its backward; `grad_op` keeps them in between. Gradients are sharded after every micro batch,
because whole ones need too much memory.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, human_count, nearest_name
from runner.job.plan import TrainingPlan
from runner.training.components.device import DTYPES
from runner.training.components.optimization import clip, make_optimizer, skips_on_device
from runner.training.engines.base import compile_blocks, compile_model, gathered, no_split_classes
from runner.training.weights import Weights


def empty_like_saved(
    folder: Path, section: str, parameters: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Empty tensors for what a section of a checkpoint has of each parameter.

    An optimizer makes its state at its first step, so a new one has nothing to load into. A value
    with a parameter's shape is sharded like the parameter; others are whole.

    Args:
        folder: of the checkpoint.
        section: `optimizer`.
        parameters: by their names in the checkpoint.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    empty: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        prefix = f"{section}.{name}."
        found = {
            key.removeprefix(prefix): entry
            for key, entry in saved.items()
            if key.startswith(prefix)
        }
        if found:
            empty[name] = {
                key: _empty(entry, parameter) for key, entry in found.items() if "." not in key
            }
    return empty


def _empty(entry: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _first_error(folder: Path) -> Iterator[None]:
    """Raises the first error of any rank, an OSError before others.

    torch gathers the errors of all ranks in one that is no `Exception`.
    """
    try:
        yield
    except CheckpointException as error:
        traceback.print_exc()
        problems = [problem for problem, _ in error.failures.values()]
        other = RuntimeError(f"{folder}: {problems[0]}")
        raise next((one for one in problems if isinstance(one, OSError)), other) from None


FOLDER = "engine"


class NativeEngine:
    """The loop's protocol, except how the module is spread: a subclass makes `wrapped`.

    Args:
        module: has the names and the weights.
        wrapped: is called.
        config: the run file.
        plan: precision, batch sizes and offload of the run.
        device: of this rank.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        wrapped: nn.Module,
        config: RunConfig,
        plan: TrainingPlan,
        device: torch.device,
    ) -> None:
        self._module, self._wrapped, self._plan, self._device = module, wrapped, plan, device
        self._clip = config.optimizer.clip
        # Read once: between forward and backward FSDP2 has the gathered weights under the same
        # names.
        self._parameters = dict(module.named_parameters())
        self._optimizer = make_optimizer(module, config.optimizer)
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16")

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        return self._wrapped(**{name: tensor.to(self._device) for name, tensor in batch.items()})  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DDP and FSDP2 average over ranks; the loop has scaled for the sum.
        scaled: torch.Tensor = self._scaler.scale(loss * self._plan.world_size)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        norm = clip(self._parameters.values(), self._clip)
        self._update(norm)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _update(self, norm: torch.Tensor) -> None:
        """Updates the weights, unless the gradient is not finite."""
        optimizer: Any = self._optimizer
        if self._scaler.is_enabled():  # the scaler skips such a step itself
            self._scaler.step(optimizer)
        elif skips_on_device(optimizer, norm) or math.isfinite(norm):
            optimizer.step()

    def save(self, folder: Path) -> None:
        # torch wraps a full disk in a RuntimeError. AtomicCheckpoint syncs every file, on the rank
        # that hashes it.
        writer = FileSystemWriter(folder / FOLDER, sync_files=False)
        with _first_error(folder / FOLDER):
            state_dict_saver.save(self._state(), storage_writer=writer)

    def load(self, folder: Path) -> None:
        state = self._state()
        names = [name for name, p in self._parameters.items() if p.requires_grad]
        state["optimizer"] = empty_like_saved(
            folder / FOLDER, "optimizer", {n: self._parameters[n] for n in names}
        )
        with _first_error(folder / FOLDER):  # it reads into the tensors, and replaces small values
            state_dict_loader.load(state, storage_reader=FileSystemReader(folder / FOLDER))
        number = {
            id(p): i
            for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])
        }
        by_number = {
            number[id(self._parameters[name])]: kept for name, kept in state["optimizer"].items()
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        if "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. Weights that are not trained are in the bundle."""
        kept = self._module.state_dict().keys()
        weights = {name: p.detach() for name, p in self._parameters.items() if p.requires_grad}
        buffers = {name: b for name, b in self._module.named_buffers() if name in kept}
        moments = {
            name: dict(self._optimizer.state[p])
            for name, p in self._parameters.items()
            if p.requires_grad
        }
        state: dict[str, Any] = {"model": weights | buffers, "optimizer": moments}
        return (
            {**state, "scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else state
        )

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        def whole(name: str, _: nn.Parameter) -> torch.Tensor:
            parameter = self._parameters[name]
            return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

        is_first = torch.distributed.get_rank() == 0
        return gathered(
            self._module, DTYPES[self._plan.precision], whole, is_first=is_first, frozen=frozen
        )


NAMED = 3  # at most so many weights are named in a message


class DDPEngine(NativeEngine):
    """`DistributedDataParallel` behind the loop's protocol; low precision by autocast."""

    def __init__(
        self, module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
    ) -> None:
        if config.quantization is None:
            Weights(module, device).fill(module.parameters())
        else:  # each rank has quantised its own
            module.to(device)
        if config.compile:
            self.notes = (compile_model(module),)
        on_gpu = device.type == "cuda"
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device.index] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # RunningStatistics averages them, for every engine
        )
        super().__init__(module, wrapped, config, plan, device)
        self._place, self._is_checked = config.path, False

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        wrapped: DistributedDataParallel = self._wrapped  # type: ignore[assignment]
        low = self._plan.precision != "fp32"
        # DDP decides here, not in backward, whether the backward exchanges gradients.
        with (
            nullcontext() if last else wrapped.no_sync(),
            torch.autocast(
                self._device.type, DTYPES[self._plan.precision] if low else None, enabled=low
            ),
        ):
            return super().forward(batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last and not self._is_checked:
            self._is_checked = True
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Refuses weights without a gradient, at the first step.

        DDP waits for each gradient: the next forward would end with "Expected to have finished
        reduction in the prior iteration".

        Raises:
            UsageError: some have none; names them.
        """
        parameters = self._parameters.items()
        unused = [name for name, p in parameters if p.requires_grad and p.grad is None]
        if unused:
            raise UsageError(
                f"{self._place}: engine.name: ddp: {human_count(len(unused), 'weight')} of the "
                "model take no part in the loss, and DDP waits for the gradient of each: "
                f"{', '.join(unused[:NAMED])}{', ...' if len(unused) > NAMED else ''}.",
                "Set engine: {name: fsdp} or {name: deepspeed}.",
            )


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
    chosen = [
        m
        for m in module.modules()
        if type(m).__name__ in names and not tied & {*map(id, m.parameters())}
    ]
    if not chosen:
        problem = "the model does not name its layers."
        if layer:
            near = nearest_name(str(layer), {type(m).__name__ for m in module.modules()})
            hint = f" Did you mean `{near}`?" if near else ""
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
