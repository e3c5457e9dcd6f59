"""What a file of Python says, read from its syntax tree: nothing of it is run.

`read_source` lists what the file imports and mentions: repositories of a Hub, paths of one machine,
variables, uploads. Each has its line, and how sure it is that this line runs.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 2**20  # a larger file of Python is data
OF_LAPTOP = re.compile(r"(?:/home/|/Users/)[^\s/{}<>*$]+/[^\s{}<>*$]+|[A-Z]:\\[^\s{}<>*$]+")
"""A path that exists on the machine of one person."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_READ = r"(?!.*(?:out|save|hub|log|wandb|push|type|meta))(?:\w+_)?"
_END = r"(?:_(?:name|id|name_or_path|path|mixer))?"
_KEYS = {
    "models": re.compile(f"{_NOT_READ}(?:model|tokenizer|processor){_END}"),
    "datasets": re.compile(f"{_NOT_READ}datasets?{_END}"),
}
"""Kind of repository -> the keys of configs and options that may name one."""
_LOADERS = {
    "from_pretrained": ("models", "pretrained_model_name_or_path"),
    "SentenceTransformer": ("models", "model_name_or_path"),
    "CrossEncoder": ("models", "model_name"),
    "LLM": ("models", "model"),
    "load_dataset": ("datasets", "path"),
    "snapshot_download": ("", "repo_id"),  # `repo_type` says the kind
    "hf_hub_download": ("", "repo_id"),
    "evaluate.load": ("spaces", "path"),
}
"""What is called -> the kind of repository that it loads, and the name of its first argument."""
_BUILDERS = (
    *("json", "csv", "text", "parquet", "arrow", "pandas", "xml", "sql", "generator", "webdataset"),
    *("imagefolder", "audiofolder", "videofolder", "pdffolder", "spark", "cache", "hdf5"),
)
"""What `load_dataset` reads by itself: files, and no repository."""
_CHANGES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.Lambda, ast.match_case, ast.Try),
    *(ast.With, ast.Expr, ast.Compare, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Call, ast.AnnAssign),
)
"""Parts of a file whose children stand elsewhere; see `_Reader.inside`."""
_OTHER_OPTIONS = re.compile(
    r"parse_known_args|add_subparsers|parents=|fromfile_prefix|REMAINDER|BooleanOptional|sys\.argv"
    r"|HfArgumentParser|class \w+\(.*ArgumentParser|nargs='\.\.\.'|prefix_chars|\.parse_args\([^)]"
    # A parser that another function gets; options of a mapping.
    r"|\(\w*parser\w*[,)]|(?:add_argument|ArgumentParser|add_argument_group)\([^)]*\*\*"
)
"""Signs that a script takes options which it does not name itself."""


class Said(NamedTuple):
    """One thing that a file, a config or the command says.

    Attributes:
        what: `import`; `models`, `datasets`, `spaces`: a repository; `path`: of one machine;
            `sets`: a variable; `report_to`: a logger; `needs_hub`: an upload or a login;
            `folder`: is added to `sys.path`.
        text: the module, with a dot for each level; the name, the path, the variable.
        path: of the file, relative to the project; empty: the command.
        sure: 2: it runs whenever the file runs; 1: when a function of the script is called; 0:
            perhaps never, or a failure is caught.
        option: of the command, which wins over it; empty: nothing does.
        owner: the function or class of the file in which it stands; empty: none.
        more: what is imported from the module; the value of a variable, where it is known; parts
            of a folder.
        in_branch: it stands in a branch that may not be taken.
    """

    what: str
    text: str
    path: str = ""
    line: int = 0
    sure: int = 2
    option: str = ""
    owner: str = ""
    more: tuple[str, ...] = ()
    in_branch: bool = False

    @property
    def place(self) -> str:
        """Where it stands, for a message."""
        return f"{self.path}:{self.line}" if self.path else "the command"


class Source(NamedTuple):
    """A file of Python.

    Attributes:
        said: what it says.
        problem: the line and the message, if this Python cannot read it.
        flags: the options that a script gives to argparse; empty: not all are known.
        calls: functions and classes that it calls, and classes on which its own are built.
    """

    said: tuple[Said, ...] = ()
    problem: tuple[int, str] | None = None
    flags: tuple[str, ...] = ()
    calls: frozenset[str] = frozenset()


def read_source(root: Path, path: str, *, is_script: bool) -> Source:
    """Reads one file. It raises nothing, whatever is in the file.

    Args:
        is_script: the command starts it, so `__name__` is `__main__`.
    """
    try:
        text = (root / path).read_bytes()[: MAX_BYTES + 1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d", which are no errors
            tree = ast.parse(text if len(text) <= MAX_BYTES else "")
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        return Source(problem=(getattr(error, "lineno", 1) or 1, getattr(error, "msg", str(error))))
    except (OSError, RecursionError, MemoryError):
        return Source()  # the Python of the job says what it thinks of such a file
    reader = _Reader(_constants(tree), is_script=is_script)
    # A deep expression, such as a sum of a thousand texts: what comes after it is not read.
    is_whole = False
    with suppress(RecursionError):
        reader.read(tree, Said("", "", path))
        is_whole = is_script and {"ArgumentParser", "parse_args"} <= reader.calls
    is_whole = is_whole and "" not in reader.flags and not _OTHER_OPTIONS.search(ast.unparse(tree))
    flags = tuple(sorted(reader.flags)) if is_whole else ()
    return Source(tuple(reader.said), None, flags, frozenset(reader.calls))


def kind_of_key(key: str) -> str:
    """The kind of repository that a key of a config, or an option, names; empty: none."""
    plain = key.rpartition(".")[2].replace("-", "_").lower()
    return next((kind for kind, pattern in _KEYS.items() if pattern.fullmatch(plain)), "")


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` of an expression; what is not a name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


class _Reader:
    """Reads one file. Where a part of it stands is a `Said` that says nothing yet.

    Args:
        texts: the names that are texts.
    """

    def __init__(self, texts: dict[str, str], *, is_script: bool) -> None:
        self.texts, self.is_script = texts, is_script
        self.said: list[Said] = []
        self.calls, self.flags = set[str](), set[str]()

    def read(self, node: ast.AST, where: Said) -> None:
        """Reads a part of the file, with all that is in it."""
        self.said += self.say(node, where)
        for child in ast.iter_child_nodes(node):
            self.read(child, self.inside(node, child, where))

    def inside(self, node: ast.AST, child: ast.AST, where: Said) -> Said:
        """Where a child of a node stands."""
        if not isinstance(node, _CHANGES):  # most are not: a quick answer for a million of nodes
            return where
        maybe = where._replace(sure=0, in_branch=True)
        match node:
            case ast.If(test=test):
                is_main = self.is_script and ast.unparse(test) == "__name__ == '__main__'"
                return where if is_main or child is test else maybe
            case ast.Expr(value=ast.Constant()) | ast.Compare():  # a docstring; what is no value
                return maybe
            case ast.IfExp() | ast.BoolOp() | ast.ExceptHandler() | ast.Lambda() | ast.match_case():
                return maybe
            case ast.Try(body=body) if child in body:  # its failure may be caught
                return maybe
            case ast.ClassDef(name=name):
                return where._replace(owner=where.owner or name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if child in node.body:
                sure = min(1, where.sure) if self.is_script else 0
                return where._replace(sure=sure, owner=where.owner or node.name)
            case ast.With(items=items) if any("suppress" in ast.unparse(item) for item in items):
                return maybe
            case ast.Call(args=names) if dotted(node.func).endswith(".add_argument"):
                flags = [self.text(name) for name in names]
                self.flags.update(flags)
                flag = max(flags, key=len, default="")
                is_default = getattr(child, "arg", "") == "default"
                option = flag.lstrip("-").replace("-", "_") if is_default else ""
                return where._replace(option=option)
            case ast.AnnAssign(target=ast.Name(id=name)):
                return where._replace(option=name)
        return where

    def say(self, node: ast.AST, where: Said) -> Iterator[Said]:
        """What one part of a file says."""
        line, option = getattr(node, "lineno", 1), where.option

        def said(what: str, text: str, *more: str) -> Said:
            return where._replace(what=what, text=text, line=line, more=more)

        match node:
            case ast.Import(names=names):
                yield from (said("import", name.name) for name in names)
            case ast.ImportFrom(level=level, module=module, names=names):
                yield said("import", "." * level + (module or ""), *(name.name for name in names))
            case ast.Constant(value=str(text)) if OF_LAPTOP.fullmatch(text) and not where.in_branch:
                yield said("path", text)
            case ast.Constant(value=str(text)) if REPOSITORY.fullmatch(text) and option:
                yield said(kind_of_key(option), text)
            case ast.Assign(targets=[ast.Subscript(value=of, slice=name)], value=value):
                if dotted(of) in ("os.environ", "environ"):
                    is_known = isinstance(value, ast.Constant) and not where.in_branch
                    yield said("sets", self.text(name), *([self.text(value)] if is_known else []))
            case ast.keyword(arg="push_to_hub", value=ast.Constant(value=True)):
                yield said("needs_hub", "push_to_hub=True")._replace(option="push_to_hub")
            case ast.keyword(arg="report_to", value=value) if not where.in_branch:
                several = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                for logger in filter(None, map(self.text, several)):
                    yield said("report_to", logger)._replace(option="report_to")
            case ast.ClassDef(bases=bases):
                self.calls.update(dotted(base).rpartition(".")[2] for base in bases)
            case ast.Call(args=arguments) if not where.in_branch:
                self.calls.add(dotted(node.func).rpartition(".")[2])
                yield from (said(*found) for found in self.call(node, dotted(node.func), arguments))

    def call(
        self, node: ast.Call, called: str, arguments: Sequence[ast.expr]
    ) -> Iterator[tuple[str, ...]]:
        """What a call says: the first words of a `Said`."""
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        last = called.rpartition(".")[2]
        kind, first = _LOADERS.get(called) or _LOADERS.get(last) or ("models", "model")
        if called in _LOADERS or last in _LOADERS or last.endswith(("Trainer", "pipeline")):
            is_first = arguments and first != "model"
            name = self.text(arguments[0] if is_first else named.get(first))
            kind = kind or f"{self.text(named.get('repo_type')) or 'model'}s"
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and name not in _BUILDERS:
                yield kind, name
        elif called.endswith("environ.setdefault") and len(arguments) == 2:
            yield "sets", self.text(arguments[0]), self.text(arguments[1])
        elif called in ("sys.path.append", "sys.path.insert"):
            parts = [n for argument in arguments for n in ast.walk(argument)]
            yield "folder", "", *filter(None, (*map(self.text, parts), *map(dotted, parts)))
        elif not self.is_script:
            return  # other files may be those of a library, copied
        elif last == "push_to_hub" or called in ("login", "huggingface_hub.login"):
            yield "needs_hub", f"{last}(...)"

    def text(self, node: ast.AST | None) -> str:
        """The text that an expression is: a literal, or a name that is assigned once."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return self.texts.get(dotted(node), "")


def _constants(tree: ast.Module) -> dict[str, str]:
    """The names that are assigned once in the file, and are texts."""
    nodes = list(ast.walk(tree))
    stored = Counter(
        n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )
    stored.update(node.arg for node in nodes if isinstance(node, ast.arg))
    found = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                if stored[name] == 1:
                    found[name] = text
    return found
