"""Reads tables from the source files of libraries that need torch, without importing them.

A launcher runs without torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from runner.config.model_types import LORA_TARGETS, MODEL_TYPES
from runner.job.installed import is_installed

SILENT = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
TARGETS = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def leave_torch_alone() -> None:
    """Makes transformers, imported after this call, work without torch.

    This saves seconds, and minutes on a slow shared disk. It is for processes that do not train:
    the launcher, and the process that tokenises. A torch that is already imported stays. `None` in
    sys.modules is Python's own way to say that a module cannot be imported (Language Reference,
    5.3.1). transformers 5 has no option for it (USE_TORCH ended with version 4): it only looks
    whether torch can be found.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # `import` fails then
    before = os.environ.get(SILENT)
    os.environ[SILENT] = "1"
    try:
        import transformers  # noqa: F401 - it warns once that torch is missing: silenced here
    except ModuleNotFoundError:  # the light installation: nothing here imports it
        return
    finally:
        if before is None:
            del os.environ[SILENT]


def targets_in_peft(model_type: str) -> list[str]:
    """Returns the modules that peft chooses for LoRA in an architecture; empty: peft lists none.

    For some it has a pattern in their place (gemma4). All linear layers are taken then.
    """
    table = _table("peft", "utils/constants.py", TARGETS) if is_installed("peft") else LORA_TARGETS
    known = table.get(model_type, [])
    return list(known) if isinstance(known, (list, tuple, set)) else []


def model_types(table: str) -> frozenset[str]:
    """Returns the model types of a table; without transformers, those of the copy in `runner`.

    Args:
        table: as in `MODEL_TYPES`: the part of the table's name that is the task.
    """
    if not is_installed("transformers"):
        return frozenset(MODEL_TYPES[table].split())
    return frozenset(models_in_transformers(f"MODEL_FOR_{table}_MAPPING_NAMES"))


def is_encoder(settings: Mapping[str, Any]) -> bool:
    """Returns whether a model's tokens see the ones after them, by its config.json."""
    return settings.get("model_type") in model_types("MASKED_LM") and not settings.get("is_decoder")


def models_in_transformers(table: str) -> dict[str, str]:
    """Returns model type -> class name, from a table in transformers' `modeling_auto.py`.

    Args:
        table: the name of the table.
    """
    classes = _table("transformers", "models/auto/modeling_auto.py", table)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in classes.items()}


def _table(package: str, file: str, name: str) -> dict[str, Any]:
    """Returns a dictionary that a source file contains as `{...}` or as `OrderedDict([...])`.

    Args:
        package: an importable package.
        file: path of the source file in the package.
        name: the variable that holds the dictionary.

    Returns:
        The dictionary; empty: the package is not installed.

    Raises:
        LookupError: this version of the package has no such table.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).parent / file
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and any(_is_named(target, name) for target in node.targets):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            return dict(ast.literal_eval(value))
    raise LookupError(f"{path} has no {name}")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_named(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name
