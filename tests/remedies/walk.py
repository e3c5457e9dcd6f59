"""Every remedy of the code with a command or a line of YAML in it, found in the syntax trees.

A remedy is the second argument, or `remedy=`, of an error, and the third of a runner's finding.
Texts that stand in a name (`_REPAIR`) are taken from where they are assigned in the same file.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_POSITIONS = {"Finding": 2}
_WORDS = r"stage|runner|hf|git|pip|python3?|export|unset|chmod|mkdir|mv|rm|iconv|find|sed|ulimit"
_WORDS += r"|module|srun|sbatch|scancel|squeue|sinfo|mpirun|torchrun|ssh|scp|rsync|curl|tar|env"
_COMMAND = re.compile(
    rf"(?:^|[`:(,;] ?)(?:{_WORDS}) [\w~./{{$-]|(?<![\w-])--?[a-z][\w-]* |--set |-o "
)
_YAML = re.compile(
    r"`[a-z_.]+: |(?<![\w-])(?!are|has|it|one|columns|keys|tags|order|quotes)[a-z_.]+: [\[{\"'\d]|"
    r"(?:[Ss]et|[Ww]rite|[Aa]dd|or|instance:|entry:) [a-z_.]+: "
)


def remedies() -> set[tuple[str, str]]:
    """(file, remedy) of each; values that the code puts in are `{}`."""
    found = set()
    for package in ("stage", "runner"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            found |= {(name, text) for text in _of_file(path) if _can_be_obeyed(text)}
    return found


def _of_file(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        remedy = keywords.get("remedy")
        if hasattr(builtins, called):
            continue  # OSError(errno, text)
        position = _POSITIONS.get(called, 1 if called.endswith(("Error", "NotReadable")) else None)
        if remedy is None and position is not None and len(node.args) > position:
            remedy = node.args[position]
        if isinstance(remedy, ast.Name):
            remedy = named.get(remedy.id, remedy)
        if remedy is not None:
            yield " ".join(_text(remedy).split())


def _text(node: ast.expr) -> str:
    """The literal parts of an expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body)} | {_text(other)}"
        case ast.Call(args=arguments) if getattr(node.func, "id", "").startswith("suggest"):
            return "".join(map(_text, arguments))
    return "{}"


def _can_be_obeyed(text: str) -> bool:
    return bool(_COMMAND.search(text) or _YAML.search(text))
