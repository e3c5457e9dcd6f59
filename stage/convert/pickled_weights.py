"""Converts pickled weights to safetensors, in a child process inside the sandbox.

Only this module needs torch, and only the child imports it: `torch.load(weights_only=True)` builds
tensors and plain containers and refuses everything else. Tensors that share memory (tied weights)
are written under each of their names, so loading does not depend on the model's class.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage.errors import DamageError, PolicyError, StageError, UsageError, shortage
from stage.installation import install_command
from stage.sandbox import ask_child, check_memory, close_network, last_words

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def convert_pickles(pickles: Mapping[str, Path], out: Path) -> dict[str, str]:
    """Converts weight files of a repository.

    Args:
        pickles: path in the repository (`pytorch_model.bin`, or shards) -> the file.
        out: a new folder for the new files, under the names that `from_pretrained` reads.

    Returns:
        The new files: path below `out` -> the pickle it is made from. Shards get a new index too.

    Raises:
        UsageError: torch or safetensors is not installed.
        PolicyError: a pickle holds more than tensors.
        DamageError: not a weight file.
        IncompleteError: not enough memory or processes.
    """
    names = {path: _new_name(path) for path in sorted(pickles)}
    for name in names.values():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
    work = [[path, str(pickles[path]), str(out / name)] for path, name in names.items()]
    answer, done = ask_child("stage.convert.pickled_weights", json.dumps(work))
    if not isinstance(answer, dict):  # torch prints a line of its own before it is killed
        check_memory(done, "its pickles could not be converted")
        raise DamageError(
            f"the process that converts pickles ended early: {last_words(done)}.",
            "Often the memory was not enough: `free -h` shows it. Then run the same command again.",
        )
    if "error" in answer:
        raise StageError(answer["error"], answer["remedy"], exit_code=answer["exit_code"])
    made = {name: path for path, name in names.items()}
    return made | _write_indexes(out, made, answer["files"])


def _new_name(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    name = name.removesuffix(".bin") + ".safetensors"
    return (
        folder
        + slash
        + (name.removeprefix("pytorch_") if name.startswith("pytorch_model") else name)
    )


def _write_indexes(
    out: Path, made: Mapping[str, str], tensors: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    """`model.safetensors.index.json` for each set of shards: which tensor is in which file."""
    indexes: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for name, path in made.items():
        if match := _SHARD.fullmatch(name):
            index = f"{match[1]}.safetensors.index.json"
            content = indexes.setdefault(index, {"metadata": {"total_size": 0}, "weight_map": {}})
            content["metadata"]["total_size"] += sum(tensors[path].values())
            content["weight_map"] |= dict.fromkeys(tensors[path], name.rpartition("/")[2])
            origins.setdefault(index, path)
    for index, content in indexes.items():
        (out / index).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return origins


def _main() -> None:
    work = json.loads(sys.stdin.read())
    close_network()
    try:
        files = {path: convert_file(path, source, target) for path, source, target in work}
    except StageError as error:
        answer: dict[str, Any] = {"error": error.message, "remedy": error.remedy}
        print(json.dumps({**answer, "exit_code": error.exit_code}))
    else:
        print(json.dumps({"files": files}))


def convert_file(path: str, source: str, target: str) -> dict[str, int]:
    """Converts one file; runs in the child.

    Args:
        path: names the file in messages.
        source, target: the pickle, and the safetensors file to write.

    Returns:
        Name of each tensor -> its size in bytes.

    Raises:
        StageError: torch is not here, or not a weight file, or one that holds more than tensors.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(
            f"--allow-pickle needs torch and safetensors here: {error}.",
            install_command("train"),
        ) from None
    tensors = _tensors(path, _load(path, source))
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        if shortage(error):
            raise
        raise DamageError(f"{path}: cannot be written as safetensors: {error}.", _OTHER) from None
    Path(target).chmod(0o644)  # safetensors makes files that only their owner can read
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _load(path: str, source: str) -> Any:
    import pickle

    import torch

    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # torch cannot map the format before torch 1.6 into memory.
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global|instantiate|type) [`']?([\w.]+\.\w+)", str(error))
        more = f" ({found[1]})" if found else ""
        raise PolicyError(
            f"{path}: the pickle holds more than tensors{more}; torch refuses to read it.",
            _OTHER,
        ) from None
    except (
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        if shortage(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DamageError(
            f"{path}: not a weight file that torch can read: {first}.", _OTHER
        ) from None


_OTHER = "Take another revision, one with safetensors, or omit the weights with `exclude`."


def _tensors(path: str, loaded: Any) -> dict[str, Any]:
    """Name -> tensor, each with memory of its own."""
    import torch

    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded:
        raise DamageError(f"{path}: holds a {type(loaded).__name__}, not named tensors.", _OTHER)
    seen: set[int] = set()
    tensors: dict[str, Any] = {}
    for name, value in loaded.items():
        if (
            not isinstance(name, str)
            or not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
        ):
            raise DamageError(f"{path}: {name!r} is not a dense tensor.", _OTHER)
        tensor = value.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        tensors[name] = tensor
    return tensors


if __name__ == "__main__":
    _main()
