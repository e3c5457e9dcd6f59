"""Writing a checkpoint while training continues: a thread, and copies of what it writes.

`Background` runs one piece of work at a time in a thread. An error in it is raised where it is
waited for. `HostCopy` copies nested dicts and lists of tensors into the node's memory, so training
does not change what is written. The memory is kept for the next copy, pinned where there is a GPU,
because allocating it takes longer than filling it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary


class Background:
    """Work in a thread beside the training loop. For use by one thread only."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`. `finish` must have been called after the work before."""

        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if on_gpu else None

        def run() -> None:
            try:
                if device is not None:
                    # A new thread has device 0: every rank would use memory of the first GPU, and
                    # NCCL and cudaMemcpy would meet tensors of another one.
                    torch.cuda.set_device(device)
                work()
            except BaseException as problem:  # noqa: BLE001 - raised by `finish`, in the thread that trains
                self._problem = problem

        # A daemon thread: a rank that gives up must not wait for a thread that waits for a lost
        # rank.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether work has ended that `finish` has not been called for."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the work has ended with an error, which `finish` will raise."""
        return self._problem is not None

    def finish(self) -> bool:
        """Waits for the work.

        Returns:
            Whether there was any.

        Raises:
            BaseException: the error that ended the work.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return True


class HostCopy:
    """The memory of one rank's copies. None is allocated before the first copy.

    torch's own `DefaultStager` does the same from torch 2.9 on. V100 clusters with an old driver
    have torch 2.6 or 2.7.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Storage of a tensor -> the memory of its copy, for as long as the tensor exists.
        self._memory: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @torch.no_grad()
    def stage(self, state: Any) -> Any:
        """Copies `state`. A second copy of the same tensors overwrites the first.

        Args:
            state: nested dicts, lists and tuples. Tensors that share memory share it in the copy.
                Other objects are copied as `copy.deepcopy` does.

        Returns:
            The same structure, with all tensors in the node's memory.
        """
        # Whole storages, each once: a weight may be in a state under two names.
        storages: dict[int, torch.UntypedStorage] = {}
        copied = self._copied(state, storages)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # the copies do not block
        return copied

    def _copied(self, value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
        if isinstance(value, DTensor):
            # `from_local` would move the copy to the mesh's device.
            names, spec = value.__tensor_flatten__()  # type: ignore[no-untyped-call]
            parts = {name: getattr(value, name) for name in names}
            for name, part in parts.items():
                if isinstance(part, torch.Tensor):  # newer torch also lists the mesh
                    parts[name] = self._copied(part, storages)
            return DTensor.__tensor_unflatten__(  # type: ignore[no-untyped-call]
                parts, spec, value.size(), value.stride()
            )
        if isinstance(value, torch.Tensor):
            source = value.untyped_storage()
            if source._cdata not in storages:
                storages[source._cdata] = self._filled(source)
            return torch.empty(0, dtype=value.dtype).set_(
                storages[source._cdata], value.storage_offset(), value.size(), value.stride()
            )
        if isinstance(value, dict):
            same = copy.copy(value)  # an OrderedDict with its attributes, too
            for key, inner in value.items():
                same[key] = self._copied(inner, storages)
            return same
        if type(value) in (list, tuple):
            return type(value)(self._copied(inner, storages) for inner in value)
        return copy.deepcopy(value)

    def _filled(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        kept: torch.UntypedStorage | None
        kept = self._memory.get(source)  # type: ignore[no-untyped-call]
        if kept is None or kept.nbytes() != source.nbytes():
            kept = torch.empty(
                source.nbytes(), dtype=torch.uint8, pin_memory=self._on_gpu
            ).untyped_storage()
            self._memory[source] = kept
        kept.copy_(source, non_blocking=self._on_gpu)
        return kept
