"""Looks at the code of a task of one's own without running it."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from runner.errors import PolicyError, UsageError, suggest
from runner.resolved import CodeInput

METHODS = {
    "__init__": "(self, tokenizer, length)",
    "model": "(self)",
    "sample": "(self, row)",
    "batch": "(self, samples, random)",
    "loss": "(self, model, batch)",
}
"""The five methods of a task, and what they are called with."""
_PAGE = "docs/howto/training/own-task.md has an example."


def check_allowed(code: CodeInput) -> None:
    """Refuses to run code that the run file does not allow.

    Raises:
        PolicyError: it does not.
    """
    if not code.allowed:
        raise PolicyError(
            f"task {code.task}: it is Python code of the asset `{code.asset}` "
            f"({code.path / code.file}), and the run file does not allow it to run.",
            f"Read it; then write code: {{asset: {code.asset}, allow: true}}",
        )


def check_code(code: CodeInput, *, runs_here: bool) -> str:
    """Finds what a task lacks, from its source alone.

    Args:
        code: the task's.
        runs_here: whether the ranks have the packages of this Python.

    Returns:
        A line for the user.

    Raises:
        UsageError: it is no Python, or it lacks the class, a method or a package.
        PolicyError: the run file does not allow it to run.
    """
    path = code.path / code.file
    tree = _parsed(path)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if code.name not in classes:
        raise UsageError(
            f"{path}: there is no class `{code.name}`.",
            suggest(code.name, classes, f"Its classes: {', '.join(classes) or 'none'}."),
        )
    _check_methods(classes[code.name], path)
    if runs_here:
        _check_imports(tree, path, code)
    check_allowed(code)
    return f"task {code.task}: code of the asset `{code.asset}`, allowed by code.allow"


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        where = f"{path}:{getattr(error, 'lineno', None) or 1}"
        raise UsageError(
            f"{where}: not Python {sys.version_info.major}.{sys.version_info.minor}: {error}.",
            "Correct the line, and stage the file again.",
        ) from None


def _check_methods(found: ast.ClassDef, path: Path) -> None:
    """A class that has bases may inherit some: then Python says at the start what is missing."""
    own = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in METHODS if name not in own]
    if missing and not found.bases:
        words = ", ".join(f"`{name}{METHODS[name]}`" for name in missing)
        others = [name for name in own if name not in METHODS]
        raise UsageError(
            f"{path}:{found.lineno}: the task `{found.name}` has no {words}.",
            suggest(missing[0], others, f"A task has five methods; {_PAGE}"),
        )
    for name, node in own.items():
        wanted = METHODS.get(name)
        given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        number = wanted.count(",") + 1 if wanted else 0
        optional = len(node.args.defaults)
        fits = len(given) - optional <= number <= len(given) or node.args.vararg is not None
        if wanted and not fits:
            raise UsageError(
                f"{path}:{node.lineno}: `{name}({', '.join(given)})` is called as "
                f"`{name}{wanted}`.",
                _PAGE,
            )


def _check_imports(tree: ast.Module, path: Path, code: CodeInput) -> None:
    own = {Path(name).parts[0].removesuffix(".py") for name in code.digests}
    for node in tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in (name.partition(".")[0] for name in names):
            known = name in sys.stdlib_module_names or name in own
            if not known and PathFinder.find_spec(name) is None:
                raise UsageError(
                    f"{path}:{node.lineno}: it imports `{name}`, which is not installed for "
                    f"{sys.executable}.",
                    f"Install it (pip install {name}), or add it to the environment of the bundle.",
                )
