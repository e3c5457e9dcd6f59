"""How much memory a micro batch takes on a GPU, measured without one.

One micro batch of the run's model goes forward and backward on torch's meta device, which computes
shapes and types only. A dispatch mode sees each tensor that appears, and when its memory would be
freed: the most that is alive at once is the peak. Kernels that differ on GPUs are replaced by what
they keep there: fused attention (no map of scores), dropout (one byte per element), and autocast,
which the meta device does not have.

Not measured: the allocator's fragmentation, NCCL's buffers, workspaces of cuBLAS and cuDNN.
`runner.job.activations` leaves a share of the device for them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.run_config import RunConfig
from runner.config.tasks import data_of
from runner.data.recipe import documents_of
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.job.activations import Footprint, bucket_bytes, estimated
from runner.job.memory import frozen_width
from runner.job.model_layers import on_meta
from runner.job.plan import TrainingPlan
from runner.job.shapes import ModelShape
from runner.training.components import lora
from runner.training.components.batch_norm import check_batch_norm
from runner.training.components.device import DTYPES
from runner.training.components.speed import use_tanh_gelu
from runner.training.engines.deepspeed import ds_config
from runner.training.tasks import causal_lm, classification, flex, language, masked_lm
from runner.training.tasks.base import grow

# Two micro batches, in sequences: their difference is what a sequence takes.
SIZES = (4, 8)
# Functions that autocast computes in 16 bits, and in float32 (torch's "CUDA Ops that can autocast
# to float16" and "to float32"), by name.
_LOW = (
    "linear matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addbmm baddbmm "
    "conv1d conv2d conv3d conv_transpose2d einsum"
)
_WIDE = (
    "layer_norm group_norm softmax log_softmax cross_entropy nll_loss pow __pow__ __rpow__ exp log "
    "sum prod cumsum norm rsqrt reciprocal mse_loss l1_loss softplus cosine_similarity"
)
LOW, WIDE = frozenset(_LOW.split()), frozenset(_WIDE.split())


def footprint(
    config: RunConfig,
    length: int,
    zero: int,
    *,
    model: ModelInput,
    shape: ModelShape,
    world_size: int,
) -> Footprint:
    """As `measure`; a formula's estimate where the meta device cannot run the model."""
    try:
        return measure(config, model, length, zero, world_size)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - code of any model; the reason is printed
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        why = f"the model does not run on torch's meta device: {type(error).__name__}: {reason}"
        return estimated(config, shape, length, zero, why)


def measure(
    config: RunConfig, model: ModelInput, length: int, zero: int, world_size: int
) -> Footprint:
    """Measures what a micro batch of this run takes on each rank's GPU, beside the model's state.

    Args:
        config: the run file, with its precision decided.
        model: the bundle's model.
        length: tokens per sequence.
        zero: what the ranks partition, as a ZeRO stage.
        world_size: number of ranks.
    """
    module = built(config, model)
    apart = _has_mask(module, config, model, length)
    kept, peaks = zip(
        *(_step(module, config, length, rows, apart=apart) for rows in SIZES), strict=True
    )
    span = SIZES[1] - SIZES[0]
    each = (peaks[1] - peaks[0]) / span
    fixed = max(0.0, peaks[0] - SIZES[0] * each)
    return Footprint(
        each=math.ceil(each),
        kept=math.ceil((kept[1] - kept[0]) / span),
        fixed=math.ceil(fixed),
        buffers=_buffers(module, config, zero, world_size),
    )


def built(config: RunConfig, model: ModelInput) -> nn.Module:
    """The run's module with its loss, on the meta device, in the types that its engine computes in.

    Quantised weights are in 16 bits here: what a layer keeps for the backward pass is the same.
    """
    is_low = config.precision != "fp32"
    # DDP has float32 weights under autocast; DeepSpeed and FSDP2 compute with cast weights.
    casts = is_low and config.engine.name != "ddp"
    frozen_low = is_low and config.lora is not None and frozen_width(config) == 2
    dtype = DTYPES[config.precision] if casts or frozen_low else torch.float32
    made = grow(on_meta(config, config.model.folder or model.path, dtype=dtype), model)
    if config.lora is not None:
        lora.attach(made, config, model, [], ())
        made.to("meta")
    if config.activation_checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.config.use_cache = False
    check_batch_norm(made, config, config.precision)
    made.train()
    use_tanh_gelu(made)
    if casts:
        made.to(dtype)  # LoRA's own weights too
    return _with_loss(config.task, made)


def _with_loss(task: str, model: Any) -> nn.Module:
    kind = model.config.model_type
    if task == "image-classification":
        return _Images(model)
    if data_of(task) == "labelled":
        if model.config.pad_token_id is None:
            model.config.pad_token_id = 0  # the task sets it too
        return classification.Classify(model, model.config.num_labels)
    if task == "masked-lm":
        name = masked_lm.HEADS.get(kind)
        head: Callable[[Any], nn.Module] | None = (lambda m: getattr(m, name)) if name else None
        return language.Language(model, causal=False, head=head)
    known = kind in causal_lm.HEADS
    return language.Language(
        model, causal=True, head=causal_lm._output_embedding if known else None
    )


class _Images(nn.Module):
    """As `image_classification._Classify`, without what it does to pixels before the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scaled = (pixels.float() / 255 - 0.5) / 0.5
        logits = self.model(pixel_values=scaled.to(self.model.dtype)).logits.float()
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


def _has_mask(module: Any, config: RunConfig, model: ModelInput, length: int) -> bool:
    """Whether batches have a mask for each pair of tokens: documents side by side, without flex
    attention. GPUs with bf16 are those that have it.
    """
    if documents_of(config, model, length).value != "separate":
        return False
    if config.task == "masked-lm":
        return True
    is_new = config.precision == "bf16"
    return not flex.choose(module.model, (flex.AMPERE, 0) if is_new else None)[0]


def micro_batch(
    module: nn.Module, config: RunConfig, length: int, rows: int, *, apart: bool = False
) -> dict[str, Any]:
    """The keyword arguments of `module`, on the meta device.

    Args:
        module: the model with its loss.
        config: the run file.
        length: tokens per sequence.
        rows: sequences.
        apart: whether a mask keeps documents apart.
    """
    if config.task == "image-classification":
        model: Any = module.model
        settings = model.config
        side = getattr(settings, "image_size", None) or 224
        side = side if isinstance(side, int) else max(side)
        channels = getattr(settings, "num_channels", 3)
        return {
            "pixels": torch.empty(rows, channels, side, side, dtype=torch.uint8, device="meta"),
            "labels": torch.empty(rows, dtype=torch.int64, device="meta"),
        }
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    if data_of(config.task) == "labelled":
        # For each pair of tokens, as transformers makes it of the mask of padding. It reads the
        # values of that one, and the meta device has none.
        pairs = torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
        mask = {"attention_mask": pairs}
        return batch | mask | ({"labels": tokens[:, 0]} if _has_one_label(config.task) else {})
    if config.task == "masked-lm" and getattr(module, "_head", None) is not None:
        guessed = math.ceil(config.masked_share * rows * length)
        batch["guessed"] = torch.empty(guessed, dtype=torch.int64, device="meta")
    if apart:
        batch |= {"documents": tokens, "position_ids": tokens}
    return batch


def _has_one_label(task: str) -> bool:
    return task == "text-classification"


def _step(
    module: nn.Module, config: RunConfig, length: int, rows: int, *, apart: bool = False
) -> tuple[int, int]:
    """The bytes that are kept for the backward pass, and the peak, of one micro batch."""
    for parameter in module.parameters():
        # As after the first micro batch: gradients are part of the model's state.
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    batch = micro_batch(module, config, length, rows, apart=apart)
    autocast = None
    if config.engine.name == "ddp" and config.precision != "fp32":
        autocast = DTYPES[config.precision]
    with _autocast_of_meta(), LiveMemory() as memory, OnGPU(autocast):
        loss = module(**batch)
        kept = memory.live
        # As loss.backward() does. A mode is off within a function that it sees, and checkpointed
        # layers are computed again in there.
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), True, True
        )
    return kept, memory.peak


@contextmanager
def _autocast_of_meta() -> Iterator[None]:
    """transformers' rotary embeddings ask whether there is autocast on the device of a tensor.

    torch 2.6 raises an error for the meta device, newer ones answer that there is none.
    """
    ask = torch.is_autocast_enabled

    def answer(*device: str) -> bool:
        return False if device == ("meta",) else ask(*device)

    torch.is_autocast_enabled = answer  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_autocast_enabled = ask


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory of tensors that appear while it is active, until they would be freed.

    Attributes:
        live: bytes now.
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = id(storage)
            if key not in known and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        return [value.untyped_storage()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [storage for inner in value for storage in _storages(inner)]


class OnGPU(TorchFunctionMode):
    """Replaces functions whose kernels on GPUs keep other tensors than the meta device's.

    Args:
        autocast: the type of autocast; None: there is none.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._autocast = autocast
        self._cast: dict[int, torch.Tensor] = {}  # autocast casts each weight once

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return _attention(*map(self._low, args), **{k: self._low(v) for k, v in kwargs.items()})
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if self._autocast is not None and name in LOW:
            args, kwargs = _each(self._low, args), _each(self._low, kwargs)
        elif self._autocast is not None and name in WIDE:
            args, kwargs = _each(_wide, args), _each(_wide, kwargs)
        return func(*args, **kwargs)

    def _low(self, value: Any) -> Any:
        if self._autocast is None or not _is_float(value) or value.dtype == self._autocast:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._autocast)
        if id(value) not in self._cast:
            self._cast[id(value)] = value.to(self._autocast)
        return self._cast[id(value)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _wide(value: Any) -> Any:
    return value.float() if _is_float(value) else value


def _each(change: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: change(value) for name, value in values.items()}
    return tuple(change(value) for value in values)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    # The kernel that takes a mask takes it as numbers, and keeps it.
    mask = None if attn_mask is None else torch.empty_like(attn_mask, dtype=query.dtype)
    return _Attention.apply(query, key, value, mask)  # type: ignore[no-any-return,no-untyped-call]


class _Attention(torch.autograd.Function):
    """Flash or memory-efficient attention (arXiv:2205.14135): keeps no map of scores."""

    @staticmethod
    def forward(ctx: Any, *qkvm: Any) -> Any:
        query, _, value, _ = qkvm
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(*qkvm, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return *(torch.empty_like(tensor) for tensor in (query, key, value)), None


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return _Dropout.apply(input)  # type: ignore[no-any-return,no-untyped-call]


class _Dropout(torch.autograd.Function):
    """torch's fused dropout: keeps one byte for each element."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.save_for_backward(torch.empty_like(inputs[0], dtype=torch.bool))
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty_like(gradients[0])


def _buffers(module: nn.Module, config: RunConfig, zero: int, world_size: int) -> int:
    """The bytes of the engine's own buffers: buckets of gradients, and gathered layers."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if config.engine.name == "deepspeed":
        every = sum(p.numel() for p in module.parameters())
        plan = TrainingPlan(0, world_size, 1, 1, 1, config.precision, zero, ())
        settings = ds_config(config, plan)["zero_optimization"]
        return bucket_bytes(settings, config.precision, zero, every, trained)
    if config.engine.name != "fsdp" or world_size == 1:
        return 0
    from runner.training.engines.fsdp import blocks_of

    # FSDP2 gathers the next layer while one computes: two layers and the buffer that they are
    # gathered in. A layer's gradient is reduced in float32, from a copy. What is in no layer stays
    # gathered.
    width = 4 if config.precision == "fp32" else 2
    blocks = blocks_of(module, config)[0]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    rest = sum(p.numel() for p in module.parameters()) - sum(sizes)
    largest = max(sizes, default=0)
    gathered = sum(sizes) if zero == 2 else 2 * largest
    return (gathered + largest + rest) * width + max(largest, rest) * (width + 4)
