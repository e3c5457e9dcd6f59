"""Every remedy of the code with a command or a line of YAML in it, found in the syntax trees.

A remedy is the second argument, or `remedy=`, of an error, the third of a runner's finding, and
the second of `warning`, `usage_error` and `note`. A name stands for all that is assigned to it, in
the same function or in the module; a call for all that functions of that name return, if that is a
text. In a table of remedies (`REMEDIES`) each text is one.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_POSITIONS = {"Finding": 2, "warn": 1, "warning": 1, "usage_error": 1, "note": 1}
_WORDS = r"stage|runner|hf|git|pip|python3?|export|unset|chmod|mkdir|mv|rm|iconv|find|sed|ulimit"
_WORDS += r"|module|srun|sbatch|scancel|squeue|sinfo|mpirun|torchrun|ssh|scp|rsync|curl|tar|env"
_COMMAND = re.compile(
    rf"(?:^|[`:(,;] ?)(?:{_WORDS}) [\w~./{{$-]|(?<![\w-])--?[a-z][\w-]* |--set |-o "
)
_YAML = re.compile(
    r"`[a-z_.]+: |(?<![\w-])(?!are|has|it|one|columns|keys|tags|order|quotes)[a-z_.]+: [\[{\"'\d]|"
    r"(?:[Ss]et|[Ww]rite|[Aa]dd|or|instance:|entry:) [a-z_.]+: "
)
_TAKES_A_PATH = re.compile(
    r"(?:^|[`(:;, ])(?:(?:stage|runner) \w+|chmod \S+|ls -ld?|namei -l|rm -\w+|mv|git -C|sh|cp"
    r"|mkdir -p|--output|--bundle|-o) $"
)
_TABLES = re.compile(r"_?(?:[A-Z_]*REMED(?:Y|IES)|ADVICE|WORDS|WANTED)")
_AS_IT_IS = ("format", "strip", "rstrip")  # methods of a text that keep its words


@dataclass
class _Scope:
    """What a name may stand for: in a function, or in a module."""

    path: str
    names: dict[str, list[ast.expr]] = field(default_factory=dict)
    above: _Scope | None = None

    def find(self, name: str) -> list[tuple[ast.expr, _Scope]]:
        if name in self.names:
            return [(value, self) for value in self.names[name]]
        return self.above.find(name) if self.above else []

    def inside(self, node: ast.AST) -> _Scope:
        """The scope of a function or module, with its assignments."""
        scope = _Scope(self.path, {}, self)
        for one in ast.walk(node):
            match one:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    scope.names.setdefault(name, []).append(value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for target, value in zip(names, values, strict=False):
                        scope.names.setdefault(getattr(target, "id", ""), []).append(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    scope.names.setdefault(name, []).append(value)
        return scope


@cache
def remedies() -> set[tuple[str, str]]:
    """(file, remedy) of each; values that the code puts in are `{}`."""
    return {row for row in every() if _can_be_obeyed(row[1])}


@cache
def every() -> set[tuple[str, str]]:
    """Those that have neither a command nor a line of YAML, too."""
    return {*_all()}


@cache
def _trees() -> dict[str, ast.Module]:
    paths = [path for package in ("stage", "runner") for path in (ROOT / package).rglob("*.py")]
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text("utf-8")) for p in paths}


@cache
def _functions() -> dict[str, list[tuple[ast.FunctionDef, _Scope]]]:
    """Name -> the functions that return a text."""
    found: dict[str, list[tuple[ast.FunctionDef, _Scope]]] = {}
    for path, tree in _trees().items():
        module = _module(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _returns_text(node):
                found.setdefault(node.name, []).append((node, module.inside(node)))
    return found


def _returns_text(node: ast.FunctionDef) -> bool:
    return node.returns is not None and "str" in re.split(r"\W", ast.unparse(node.returns))


@cache
def _module(path: str) -> _Scope:
    tree = _trees()[path]
    top: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
    return _Scope(path).inside(ast.Module(top, []))


def _all() -> Iterator[tuple[str, str]]:
    for path, tree in _trees().items():
        module = _module(path)
        for name, values in module.names.items():
            if _TABLES.fullmatch(name):
                for value in values:
                    yield from ((path, t) for t in _of_table(value, module))
        yield from _in(tree, module)


def _in(node: ast.AST, scope: _Scope) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = scope.inside(child) if isinstance(child, ast.FunctionDef) else scope
        if isinstance(child, ast.Call) and (remedy := _remedy_of(child)) is not None:
            yield from _texts(remedy, scope, ())
        yield from _in(child, inner)


def _remedy_of(call: ast.Call) -> ast.expr | None:
    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if hasattr(builtins, called):
        return None  # OSError(errno, text)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    position = _POSITIONS.get(called, 1 if called.endswith(("Error", "NotReadable")) else None)
    if "remedy" in keywords:
        return keywords["remedy"]
    return call.args[position] if position is not None and len(call.args) > position else None


def _texts(node: ast.expr, scope: _Scope, seen: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(file, text) of each remedy that an expression may be."""
    match node:
        case ast.Name(id=name) if name not in seen and (values := scope.find(name)):
            for value, where in values:
                yield from _texts(value, where, (*seen, name))
        case ast.BoolOp(values=several):
            for one in several:
                yield from _texts(one, scope, seen)
        case ast.Call(func=ast.Attribute(attr=attr, value=text)) if attr in _AS_IT_IS:
            yield from _texts(text, scope, seen)
        case ast.Call(func=func) if (
            (name := getattr(func, "id", getattr(func, "attr", ""))) in _functions()
            and name not in seen
            and not name.startswith("suggest")
        ):
            for function, inside in _functions()[name]:
                for made in ast.walk(function):
                    if isinstance(made, ast.Return) and made.value is not None:
                        yield from _texts(made.value, inside, (*seen, name))
        case ast.Subscript(value=ast.Name(id=name)) if _TABLES.fullmatch(name):
            return  # they are there anyway
        case _:
            yield scope.path, " ".join(_text(node).split())


def _of_table(node: ast.expr, module: _Scope) -> Iterator[str]:
    """The texts in a table, also by a name; without those of regular expressions."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        yield " ".join(_text(node).split())
    elif isinstance(node, ast.Name):
        for value, _ in module.find(node.id):
            yield from _of_table(value, module)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _of_table(child, module)


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


def unquoted() -> Iterator[tuple[str, str]]:
    """(file, expression) of each value in a command that a shell may take for several words."""
    for path, tree in _trees().items():
        source = (ROOT / path).read_text("utf-8")
        for node in ast.walk(tree):
            before = ""
            for part in node.values if isinstance(node, ast.JoinedStr) else ():
                if isinstance(part, ast.FormattedValue) and _TAKES_A_PATH.search(before):
                    value = ast.unparse(part.value)
                    named = rf"\b{re.escape(value)}\b[^=\n]* = .*quote"
                    is_word = re.match(r"quoted?\(|shlex\.|.*remote\.inside\(", value)
                    if not is_word and not re.search(named, source):
                        yield path, value
                before += str(part.value) if isinstance(part, ast.Constant) else "{}"


def _can_be_obeyed(text: str) -> bool:
    return bool(_COMMAND.search(text) or _YAML.search(text))
