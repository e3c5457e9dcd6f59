"""How fast this node's devices compute and copy. Runs in a child process, which imports torch.

The best of several measurements counts: a ceiling is what the hardware can do, and everything that
disturbs a measurement makes it smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runner.trials.kernels import run_kernels

GIB = 2**30
LONGEST_S = 1.0
"""Seconds per measurement, at most; each is made at least three times."""


def software() -> dict[str, Any]:
    """The versions and the devices that torch sees. Asks for no memory on a device."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "device": "CPU",
        "devices": 0,
    }
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return facts | {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "compiled for": " ".join(torch.cuda.get_arch_list()),
        "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": ".".join(map(str, nccl)),
    }


def check_kernels() -> dict[str, Any]:
    """Runs one kernel on each visible device.

    Raises:
        StageError: torch has no kernels for a device, or the device does not work.
    """
    return {"devices that compute": run_kernels()[0]}


def matmul(size: int) -> dict[str, float]:
    """TFLOP/s of square matrices, per precision.

    Args:
        size: rows of each matrix; 8192 fills a data centre's GPU.
    """
    device = _device()
    results = {}
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ):
        if device.type == "cpu" and name in ("fp16", "tf32"):
            continue  # CPUs have no tf32, and few have fp16
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        seconds = _least_seconds(lambda a=left, b=right: a @ b)  # type: ignore[misc]
        torch.backends.cuda.matmul.allow_tf32 = before
        results[f"{name} TFLOP/s"] = 2 * size**3 / seconds / 1e12
    return results


def copy(num_bytes: int) -> dict[str, float]:
    """GB/s of copies: on the device (read and write counted), and from the host, pinned or not.

    Args:
        num_bytes: the length of a copy.
    """
    device = _device()
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    results = {
        "on the device GB/s": 2 * num_bytes / _least_seconds(lambda: target.copy_(source)) / 1e9
    }
    if device.type == "cuda":
        pageable = torch.ones(num_bytes, dtype=torch.uint8)
        for name, host in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
            to_device = _least_seconds(lambda h=host: target.copy_(h, non_blocking=True))  # type: ignore[misc]
            results[f"from {name} memory GB/s"] = num_bytes / to_device / 1e9
    return results


def attention() -> dict[str, Any]:
    """Which kernels of `scaled_dot_product_attention` work for a causal model in 16 bits."""
    device = _device()
    dtype = torch.bfloat16 if device.type == "cpu" or _has_bf16() else torch.float16
    query = torch.randn(1, 4, 256, 64, device=device, dtype=dtype)
    found = []
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        try:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(query, query, query, is_causal=True)
            found.append(backend.name.removesuffix("_ATTENTION").lower())
        except RuntimeError:  # "No available kernel"
            continue
    return {"attention kernels": " ".join(found), "in": str(dtype).removeprefix("torch.")}


def measure(what: str, *arguments: int) -> dict[str, Any]:
    """Calls one of the functions above by its name. The entry for a child process."""
    functions: dict[str, Callable[..., dict[str, Any]]] = {
        "software": software,
        "kernels": check_kernels,
        "matmul": matmul,
        "copy": copy,
        "attention": attention,
    }
    return functions[what](*arguments)


def _least_seconds(work: Callable[[], Any]) -> float:
    """The least seconds of one call; the first call is not counted."""
    work()
    _wait()
    least, began, count = float("inf"), time.perf_counter(), 0
    while count < 3 or (time.perf_counter() - began < LONGEST_S and count < 50):
        start = time.perf_counter()
        work()
        _wait()
        least = min(least, time.perf_counter() - start)
        count += 1
    return least


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _has_bf16() -> bool:
    return torch.cuda.get_device_properties(0).major >= 8
