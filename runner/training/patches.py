"""What is changed inside torch, transformers and DeepSpeed, all in one place.

Each change needs a private name of a library. `COMPARED` has the versions whose code was read for
it. Rank 0 prints a line where another version is installed, and where a version has no such name:
then the library does as it always does, and the line says what that costs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from runner.errors import say
from runner.training.weights import is_first

COMPARED = {
    "torch": ("2.6", "2.13"),
    "transformers": ("5.0", "5.23"),
    "deepspeed": ("0.19", "0.19"),
}
"""Library -> the first and the last version whose code was read. Patch releases are not told apart.
"""


def _has(library: str, owner: object, name: str, without: str) -> bool:
    """Whether a library still has a private name; prints a line if not.

    Args:
        library: its name in `COMPARED`.
        owner: the module or object that should have the name.
        name: an attribute.
        without: what follows if the change is not made.
    """
    _note_version(library)
    if hasattr(owner, name):
        return True
    if is_first():
        say(f"note: {library} {version(library)} has no {name}: {without}")
    return False


@functools.cache
def _note_version(library: str) -> None:
    """Prints a line, once per process, if an installed version is not in `COMPARED`."""
    first, last = COMPARED[library]
    installed = version(library)
    if is_first() and not _release(first) <= _release(installed) <= _release(last):
        say(
            f"note: {library} {installed} is installed; what airlift changes inside of it was "
            f"compared with {first} to {last} only"
        )


def _release(text: str) -> list[int]:
    """The first two numbers of a version, which can be compared."""
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


@contextmanager
def _replaced(
    library: str, owner: object, name: str, change: Callable[[Any], Any], without: str
) -> Iterator[None]:
    """Inside it, a private name has another value.

    Args:
        library, owner, name, without: as for `_has`.
        change: the library's value -> the other one.
    """
    if not _has(library, owner, name, without):
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def in_file_types() -> Iterator[None]:
    """`from_pretrained` leaves weights in the types of the files, so that they need no memory.

    They are then views of the mapped files. Only weights that the checkpoint does not have are in
    the requested type. `Weights` casts each when its turn comes.
    """
    from transformers import core_model_loading

    def uncast(copies: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, device=None, dtype=None: copies(tensor, device, None)

    # All of transformers' readers come through this function (core_model_loading.py,
    # spawn_materialize), which casts. There is no argument that leaves each weight its own type.
    where, without = (
        (core_model_loading, "_materialize_copy"),
        "rank 0 holds all weights in float32",
    )
    with _replaced("transformers", *where, uncast, without):
        yield


def search_no_packed_sequences() -> None:
    """Ends transformers' search for documents that share a row, which waits for the device.

    A batch that has such documents has a mask for them too; without a mask, all of a row belongs
    together.
    """
    from transformers import masking_utils

    # Called for each batch without a mask (masking_utils.py, _preprocess_mask_arguments). It reads
    # values of a tensor of the device, so a GPU would stand still once per micro batch.
    name = "find_packed_sequence_indices"
    if _has("transformers", masking_utils, name, "a GPU may wait once per micro batch"):
        masking_utils.find_packed_sequence_indices = _no_packed_sequences


def _no_packed_sequences(position_ids: torch.Tensor) -> None:
    """Finds none, in place of transformers' function."""


@contextmanager
def faults_of_save(engine: Any, faults: list[Exception]) -> Iterator[None]:
    """Inside it, what DeepSpeed's engine raises while it writes is kept, not raised.

    A rank that left DeepSpeed's save for a full disk would never come to the barrier at its end,
    where the others wait.

    Args:
        engine: what `deepspeed.initialize` returned.
        faults: gets what was raised.
    """

    def kept(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **more: Any) -> Any:
            try:
                return write(*arguments, **more)
            except (OSError, RuntimeError) as error:
                faults.append(error)

        return attempt

    files, script = (engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script")
    without = "ranks may wait for minutes where the disk is full"
    with (
        _replaced("deepspeed", *files, kept, without),
        _replaced("deepspeed", *script, kept, without),
    ):
        yield


@contextmanager
def loads_converted(engine: Any) -> Iterator[None]:
    """Inside it, DeepSpeed's engine loads a checkpoint that its converter has made.

    In DeepSpeed's settings that would have to be known before the engine is made.
    """
    where = (engine._config, "load_universal_checkpoint")
    without = "a checkpoint of another number of ranks may not load"
    with _replaced("deepspeed", *where, lambda _: True, without):
        yield


def omit_shared_memory_op() -> None:
    """Keeps DeepSpeed from compiling its collective in shared memory, which only inference uses.

    On a CPU it would do so when the process group is made (deepspeed/comm/torch.py).
    """
    import deepspeed

    if _has("deepspeed", deepspeed.ops, "__compatible_ops__", "it may need a compiler on CPUs"):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def import_uncompiled_muon() -> None:
    """Imports DeepSpeed's Muon, which no run has, without compiling its kernels.

    DeepSpeed asks of each optimizer whether it is a Muon. The import for that question decorates
    three functions, which imports all of torch's compiler: a second per rank.
    """
    from deepspeed.runtime import compiler

    def uncompiled(_: object) -> Callable[..., Any]:
        return lambda: lambda function: function

    where, without = (compiler, "compile"), "each rank starts a second later"
    with _replaced("deepspeed", *where, uncompiled, without):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def change_allocator(setting: str) -> bool:
    """Changes the CUDA allocator after torch's import, for memory that is allocated from now on.

    Args:
        setting: as in PYTORCH_CUDA_ALLOC_CONF.

    Returns:
        Whether it was changed: torch has a name for that.
    """
    # The variable is read once, when torch is imported. Since torch 2.9 the first name is there.
    change: Callable[[str], None] | None = getattr(
        torch._C, "_accelerator_setAllocatorSettings", None
    )
    without = "PYTORCH_CUDA_ALLOC_CONF has to be exported before the run"
    if change is None and _has("torch", torch.cuda.memory, "_set_allocator_settings", without):
        change = torch.cuda.memory._set_allocator_settings
    if change is not None:
        change(setting)
    return change is not None


def write_collectives(path: Path) -> None:
    """Writes the last collectives of this rank, as torch does by itself when NCCL fails.

    The launcher ends ranks that hang long before a collective times out.
    """
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None)
    # Its name is of NCCL; newer versions have one for any backend, too.
    if dump is None and _has("torch", c10d, "_dump_fr_trace", "a hang shows stacks alone"):
        dump = c10d._dump_fr_trace
    if dump is not None:
        path.write_bytes(dump())
