"""Sums over the ranks that nobody waits for: they are started in one step and read in the next.

On GPUs the sum is made on the device (NCCL) and copied to pinned memory, so that neither the host
nor the device waits. On CPUs a thread of gloo makes it during the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from runner.training.components.process_group import Ranks


class HostValue:
    """A vector's copy on the host, which is made when the device gets there.

    Args:
        value: a number or scalar is a vector of one.
    """

    def __init__(self, value: float | torch.Tensor) -> None:
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1)
        self._copy, self._made = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record()

    def read(self) -> list[float]:
        """The values of a vector. Waits until the device got there."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy.tolist()


class Totals:
    """Sums over all ranks, in float64. All ranks make it at the same time.

    Args:
        ranks: this rank among the others.
        device: of this rank.
        computed: scalars on the device.
        known: values that the host knows.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        computed: Sequence[torch.Tensor],
        known: Sequence[float],
    ) -> None:
        on_host = torch.tensor([0.0] * len(computed) + list(known), dtype=torch.float64)
        on_gpu = device.type == "cuda"
        if on_gpu:
            on_host = on_host.pin_memory()
        self._values = on_host.to(device, non_blocking=True)
        for number, scalar in enumerate(computed):
            self._values[number].copy_(scalar)
        self._work = dist.all_reduce(
            self._values, group=None if on_gpu else ranks.group, async_op=True
        )
        self._host: HostValue | None = None

    def on_device(self) -> torch.Tensor:
        """The sums, shape (number of values,). On a GPU only later work of the device waits."""
        if self._host is None:
            self._work.wait()
            self._host = HostValue(self._values)
        return self._values

    def read(self) -> list[float]:
        """The sums, on the host."""
        self.on_device()
        assert self._host is not None
        return self._host.read()
