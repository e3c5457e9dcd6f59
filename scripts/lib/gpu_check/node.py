"""The first items: facts of this machine, and how fast its devices compute and copy."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from runner.errors import StageError
from scripts.lib.gpu_check import facts
from scripts.lib.gpu_check.record import Item

# Device -> arguments: matrices of 8192 and copies of 1 GiB fill a data centre's GPU.
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}


def measured(what: str, *arguments: int) -> dict[str, Any]:
    """Runs a function of `ceilings` in a child process: a device that fails ends only the child."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, what, *arguments).result()
        except BrokenProcessPool:
            raise StageError(f"measuring {what} ended its process.", "See above.", 1) from None


def _measure(what: str, *arguments: int) -> dict[str, Any]:
    from scripts.lib.gpu_check.ceilings import measure

    return measure(what, *arguments)


def items(environ: Mapping[str, str], kind: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> what measures it, in order.

    Args:
        environ: the environment variables.
        kind: `cuda` or `cpu`.
    """
    return {
        "facts": lambda: facts.node_facts(environ),
        "kernels": lambda: measured("kernels"),
        "matmul": lambda: measured("matmul", MATMUL_SIZE[kind]),
        "copy": lambda: measured("copy", COPY_BYTES[kind]),
        "attention": lambda: measured("attention"),
    }


def run_item(name: str, work: Callable[[], dict[str, Any]]) -> Item:
    """Runs one item. A failure is a result, not an end."""
    began = time.monotonic()
    try:
        values = work()
    except StageError as error:
        return Item(name, "failed", time.monotonic() - began, {}, str(error))
    except Exception as error:  # noqa: BLE001 - the items behind it are wanted all the same
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}"
        return Item(name, "failed", time.monotonic() - began, {}, words)
    return Item(name, "ok", time.monotonic() - began, values)
