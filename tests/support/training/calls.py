"""The operations of torch that some code calls."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What the host waits for on a GPU, with all that comes before it.
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "item", "equal"}


class Calls(TorchDispatchMode):
    """Notes the name of each operation while it is entered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
