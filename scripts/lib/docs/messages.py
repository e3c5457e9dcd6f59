"""Every error message that a user can meet, found in the source of `stage` and `runner`.

It walks the syntax trees: a call of `StageError`, or of a class made from it, is a message. So are
`fail` and `wrong` of the readers of documents. A value in a message becomes a word in capitals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from scripts.lib.docs.links import ROOT

Scope = Mapping[str, list[ast.expr]]

_BASE = {"StageError": 2}
_OF_READERS = ("fail", "wrong")
"""Methods of `Fields` that raise a UsageError."""
_READERS = ("self", "fields", "entry", "found", "inner", "item", "document")
_TEXTS = (ast.Constant, ast.JoinedStr, ast.IfExp, ast.BinOp)
_FEW = 4  # texts that a function can return
_SUGGESTIONS = {"suggest": 2, "suggest_path": 1, "suggest_relative": 3}
"""Functions that ask for the nearest name: the position of the rest of the remedy."""
_WORDS = {
    "place": "FILE:LINE",
    "join": "LIST",
    "len": "NUMBER",
    "human_size": "SIZE",
    "human_count": "COUNT",
    "install_command": "pip install ...",
    "shown": "VALUE",
    "_show": "VALUE",
    "dotted": "KEY",
    "quote": "PATH",
    "error": "REASON",
    "where": "PLACE",
    "strerror": "REASON",
    "what": "PLACE",
    "printable": "NAME",
    "repr": "VALUE",
    "here": "PLACE",
    "reason_of": "REASON",
    "exc": "REASON",
    "self": "PLACE",
}


@dataclass(frozen=True, order=True)
class Message:
    """One message. `folder` is where its source is, such as `stage/fetch`."""

    folder: str
    code: int
    text: str
    remedy: str


@cache
def messages() -> tuple[Message, ...]:
    """All messages, sorted, each once."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for package in ("stage", "runner")
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    codes, texts = _codes(trees.values()), _functions(trees.values())
    constants = {path: _assigned(tree.body) for path, tree in trees.items()}
    found: set[Message] = set()
    for path, tree in trees.items():
        shared = texts | _imported(tree, constants) | constants[path]
        found.update(_messages(_folder(path), tree, codes, shared))
    return tuple(sorted(found))


def _imported(
    tree: ast.Module, constants: Mapping[str, dict[str, list[ast.expr]]]
) -> dict[str, list[ast.expr]]:
    """The constants that a file imports from the others."""
    found: dict[str, list[ast.expr]] = {}
    for line in (node for node in tree.body if isinstance(node, ast.ImportFrom)):
        source = constants.get(f"{(line.module or '').replace('.', '/')}.py", {})
        found |= {name.asname or name.name: source.get(name.name, []) for name in line.names}
    return {name: values for name, values in found.items() if values}


def _folder(path: str) -> str:
    """The folder two levels deep: `stage/environment` for `stage/environment/solve/uv.py`."""
    return "/".join(path.split("/")[:-1][:2])


def _codes(trees: Collection[ast.Module]) -> dict[str, int]:
    """Each error class and its exit code."""
    codes = dict(_BASE)
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    for _ in range(3):  # classes of classes of classes
        for node in classes:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            for base in [name for name in bases if name in codes]:
                codes.setdefault(node.name, _own_code(node) or codes[base])
    return codes


def _functions(trees: Collection[ast.Module]) -> dict[str, list[ast.expr]]:
    """Each function that returns a text, as `NAME()`: what it returns."""
    found: dict[str, list[ast.expr]] = {}
    for function in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(function, ast.FunctionDef) and _is_text(function.returns):
            values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
            found.setdefault(f"{function.name}()", []).extend(v for v in values if v)
    return found


def _is_text(returns: ast.expr | None) -> bool:
    return isinstance(returns, ast.Name) and returns.id == "str"


def _assigned(lines: Collection[ast.stmt]) -> dict[str, list[ast.expr]]:
    """The values that some lines give to each variable."""
    found: dict[str, list[ast.expr]] = {}
    for line in lines:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            found.setdefault(line.targets[0].id, []).append(line.value)
    return found


def _own_code(node: ast.ClassDef) -> int:
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            value = line.value
            if line.targets[0].id == "exit_code" and isinstance(value, ast.Constant):
                return int(str(value.value))
    return 0


def _messages(
    folder: str, tree: ast.Module, codes: Mapping[str, int], shared: Scope
) -> Iterator[Message]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        own = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        scope = {**shared, **_defaults(function), **_assigned(own)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (call := _parts(node, codes)):
                text, remedy, code = call
                for variant in _variants(text, scope):
                    if re.search(r"[a-z]{2}", variant):  # else it is another error, passed on
                        last = _remedy(remedy, scope)
                        yield Message(folder, code, variant, last)


def _defaults(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The parameters of a function: the default of each that has one, which is no empty text."""
    arguments = function.args.posonlyargs + function.args.args
    pairs = zip(reversed(arguments), reversed(function.args.defaults), strict=False)
    known = {argument.arg: [value] for argument, value in pairs if _unparsed(value)}
    return {argument.arg: [] for argument in arguments} | known


def _unparsed(value: ast.expr) -> bool:
    return not isinstance(value, ast.Constant) or bool(value.value)


def _parts(
    call: ast.Call, codes: Mapping[str, int]
) -> tuple[ast.expr, ast.expr | None, int] | None:
    """The message, the remedy and the exit code of a call; None: it is no error."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if isinstance(call.func, ast.Name) and call.func.id in codes:
        text = call.args[0] if call.args else named.get("message")
        remedy = call.args[1] if len(call.args) > 1 else named.get("remedy")
        own = call.args[2] if len(call.args) > 2 else named.get("exit_code")
        code = codes[call.func.id]
        if isinstance(own, ast.Constant):
            code = int(str(own.value))
        return None if text is None else (text, remedy, code)
    if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_READERS and call.args:
        if isinstance(call.func.value, ast.Name) and call.func.value.id not in _READERS:
            return None  # another `fail`
        is_wrong = call.func.attr == "wrong"
        text = call.args[1 if is_wrong and len(call.args) > 1 else 0]
        remedy = named.get("remedy") or (call.args[2] if is_wrong and len(call.args) > 2 else None)
        values = [ast.Constant("FILE: `KEY` "), text]
        values += [ast.Constant(", found VALUE")] if is_wrong else []
        return (
            ast.JoinedStr(values),
            remedy or ast.Constant("Correct that line, or make the file again."),
            2,
        )
    return None


def _variants(text: ast.expr, scope: Scope) -> list[str]:
    """The texts of a message: of a variable, of each value that the function gives it."""
    if isinstance(text, ast.Name):
        return [_tidy(_render(value, scope)) for value in scope.get(text.id, [])]
    return [_tidy(_render(text, scope))]


def _remedy(remedy: ast.expr | None, scope: Scope) -> str:
    if isinstance(remedy, ast.Name):
        texts = [_tidy(_render(value, scope)) for value in scope.get(remedy.id, [])]
        return " Or: ".join(dict.fromkeys(filter(None, texts))) or _word(remedy)
    return "" if remedy is None else _tidy(_render(remedy, scope))


def _render(node: ast.AST, scope: Scope) -> str:
    """An expression as text, with a word in capitals for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_render(value, scope) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _render(node.left, scope) + _render(node.right, scope)
    if isinstance(node, ast.IfExp):
        return _render(node.body, scope) or _render(node.orelse, scope)
    if isinstance(node, ast.FormattedValue):
        return _render(node.value, scope)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in _SUGGESTIONS:
            position = _SUGGESTIONS[node.func.id]
            rest = _render(node.args[position], scope) if len(node.args) > position else ""
            return f"Did you mean `NAME`? {rest}"
        if node.func.id == "str" and node.args:
            return _render(node.args[0], scope)
        if node.func.id not in _WORDS:
            return _value(f"{node.func.id}()", node, scope)
    if isinstance(node, ast.Name) and node.id not in _WORDS:
        return _value(node.id, node, scope)
    return _word(node)


def _value(name: str, node: ast.AST, scope: Scope) -> str:
    """The texts of a variable or of a function, if they are few; else a word."""
    values = scope.get(name, [])
    most = _FEW if name.endswith("()") else 1
    if 0 < len(values) <= most:
        rest = {key: value for key, value in scope.items() if key != name}
        texts = [_render(v, rest) for v in values if isinstance(v, _TEXTS)]
        if texts and all(re.search("[a-z]{2}", text) for text in filter(None, texts)):
            return " Or: ".join(dict.fromkeys(filter(None, map(_tidy, texts))))
    return _word(node)


def _word(node: ast.AST) -> str:
    """The word for a value: PATH for `path`, SIZE for `human_size(n)`."""
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name in _WORDS:
            return _WORDS[name]
        inner = [_word(argument) for argument in node.args]
        return inner[0] if inner else _capitals(name)
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    if isinstance(node, ast.BinOp):
        return "PATH" if isinstance(node.op, ast.Div) else "NUMBER"
    return _capitals(_name(node))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "value"


def _capitals(name: str) -> str:
    return _WORDS.get(name, name.strip("_").upper().replace("_", "-"))


def _tidy(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
