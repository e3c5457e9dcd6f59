"""What libraries of torch say in their source: it is read and not run, so a launcher needs no torch.

(task, model type) -> the classes of layers that can be reached from the task's model class through the names its code
uses. What is not among them is no layer of the model; whether one that is occurs in this very model, the ranks see.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config import RunConfig
from runner.errors import UsageError

SILENT = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
TARGETS = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


@dataclass(frozen=True)
class LayerClasses:
    """What a model's source says of its layers.

    Attributes:
        names: every class it may be made of; torch's, and those of other files, too.
        repeated: those that transformers itself keeps in one piece; where it does not say, what is called a layer.
    """

    names: frozenset[str]
    repeated: tuple[str, ...]


def check_wrap(config: RunConfig, task_classes: Mapping[str, str], model_type: str) -> str | None:
    """Refuses `engine.wrap: {layer: ...}` of a class that the model cannot have.

    Args:
        task_classes: model type -> class of the model for the task.

    Returns:
        What was looked at; None: there was nothing to check.

    Raises:
        UsageError: with the layers there are.
    """
    layer = (config.engine.wrap or {}).get("layer")
    if config.engine.name != "fsdp" or layer is None:
        return None
    source = _source_of(model_type)
    found = source and layers_in(source.read_text(encoding="utf-8"), task_classes[model_type])
    if not source or not found:
        return f"engine.wrap: {layer} is looked for by the ranks: what `{model_type}` is made of is not to be read here"
    if layer not in found.names:
        near = difflib.get_close_matches(str(layer), sorted(found.names), n=1)
        raise UsageError(
            f"{config.path}: engine.wrap: the model `{config.model.asset}` ({model_type}) has no layer `{layer}` to "
            f"wrap (by {source.name} of transformers)." + (f" Did you mean `{near[0]}`?" if near else ""),
            f"Its repeated layers: {', '.join(found.repeated) or 'not named there'}. Or give min_params: 1000000.",
        )
    return f"engine.wrap: {layer} is in {source.name}"


def layers_in(source: str, root: str) -> LayerClasses | None:
    """What can be reached from the class `root` in the source of a file; None: there is no such class. Pure.

    A name stands for a class if it is called, inherited, or listed in a table of classes that is; so all names count.
    """
    tree = ast.parse(source)
    uses: dict[str, set[str]] = {}
    repeated: list[str] = []
    top = list(_top_level(tree.body))
    for node in top:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            uses[node.name] = _names(ast.walk(node))
        elif isinstance(node, ast.Assign):
            uses |= {target.id: _names(ast.walk(node.value)) for target in node.targets if isinstance(target, ast.Name)}
    if root not in uses:
        return None
    reached, left = {root}, [root]
    while left:
        new = uses.get(left.pop(), set()) - reached
        reached |= new
        left += new
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Assign) and any(_is_named(t, "_no_split_modules") for t in inner.targets):
            texts = [c.value for c in ast.walk(inner.value) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            repeated += [text for text in texts if text in reached and text not in repeated]
    # Composite models take their parts from other files: what is in those cannot be told from here.
    if any(name.startswith("AutoModel") for name in reached):
        return None
    classes = [node.name for node in top if isinstance(node, ast.ClassDef) and node.name in reached]
    return LayerClasses(
        frozenset(reached), tuple(repeated or (name for name in classes if name.endswith(("Layer", "Block"))))
    )


def leave_torch_alone() -> None:
    """transformers, imported after this, does without torch: seconds less, and minutes on a slow shared disk.

    For processes that only look: a launcher, and what tokenises. Where somebody has imported torch it stays. `None` in
    sys.modules is Python's own way to say that a module cannot be imported (Language Reference, 5.3.1); transformers 5
    has no way of its own (USE_TORCH is gone with version 4) and only looks whether torch can be found.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # what `import` takes for "not installed"
    told = os.environ.get(SILENT)
    os.environ[SILENT] = "1"
    try:
        import transformers  # noqa: F401 - says once that torch is not there, and that is no news
    finally:
        if told is None:
            del os.environ[SILENT]


def targets_in_peft(model_type: str) -> list[str]:
    """The modules that peft itself puts LoRA on in an architecture; empty: it has none for it."""
    known = _table("peft", "utils/constants.py", TARGETS).get(model_type, [])
    return list(known) if isinstance(known, (list, tuple, set)) else []


def models_in_transformers(table: str) -> dict[str, str]:
    """Model type -> class of the model, for the tasks of one of the tables in transformers' `modeling_auto.py`."""
    classes = _table("transformers", "models/auto/modeling_auto.py", table)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in classes.items()}


def _table(package: str, file: str, name: str) -> dict[str, Any]:
    """A dictionary that a file of a package has written out, as `{...}` or as `OrderedDict([...])`.

    Raises:
        LookupError: this version of the package has no such table.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).parent / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(_is_named(target, name) for target in node.targets):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            return dict(ast.literal_eval(value))
    raise LookupError(f"{path} has no {name}")


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside of `if` and `try` too: some classes are only there without a package."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _top_level([*node.body, *node.orelse])


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def _is_named(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _source_of(model_type: str) -> Path | None:
    """The file of transformers that has a model's classes."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    module = str(model_type_to_module_name(model_type))
    path = Path(spec.origin).parent / "models" / module / f"modeling_{module}.py"
    return path if path.is_file() else None
