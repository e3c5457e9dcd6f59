"""Python code that a model's configs refer to: pure rules on their text.

`auto_map` in config.json, tokenizer_config.json and the processors' configs, `custom_pipelines`, and module types in
sentence-transformers' modules.json name classes as `module.Class`, or `org/repo--module.Class` for code of another
repository. transformers reads the first kind from the model's own folder and the second from the Hub, so what travels
has its references made local.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_CONFIGS = re.compile(
    r"(.*/)?(config|tokenizer_config|processor_config|preprocessor_config|video_preprocessor_config|modules)\.json"
)
_REFERENCE = re.compile(r"(?:(?P<repository>[\w.-]+(?:/[\w.-]+)?)--)?(?P<module>[\w/.-]+)\.(?P<name>\w+)")


@dataclass(frozen=True)
class Reference:
    """A class that a config names.

    Attributes:
        config: the file that names it.
        role: what it is for (`AutoModel`, `AutoTokenizer`, ...).
        repository: the other repository its code is in; None: the model's own.
        path: of its module, in the repository it is in.
    """

    config: str
    role: str
    repository: str | None
    path: str
    name: str

    @property
    def lands_at(self) -> str:
        """The module's path below the asset: code of another repository lies beside the config that names it."""
        return posixpath.join(posixpath.dirname(self.config), self.path) if self.repository else self.path

    def __str__(self) -> str:
        return f"{self.path.removesuffix('.py').replace('/', '.')}.{self.name}"


def may_name_code(path: str) -> bool:
    """Whether a file of a model repository is one that libraries look into for code."""
    return _CONFIGS.fullmatch(path) is not None


def references(path: str, text: bytes) -> list[Reference]:
    """The classes that a config names; none if it is no JSON (which the load test will say)."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = []
    for role, value in _named(document, path.rpartition("/")[2]):
        match = _REFERENCE.fullmatch(value)
        if match and not value.startswith("sentence_transformers."):
            module = f"{match['module']}.py"
            folder = "" if match["repository"] else posixpath.dirname(path)
            found.append(Reference(path, role, match["repository"], posixpath.join(folder, module), match["name"]))
    return found


def _named(document: Any, name: str) -> Iterator[tuple[str, str]]:
    """(role, class reference) of every class that a config names."""
    if name == "modules.json":
        for module in document if isinstance(document, list) else []:
            if isinstance(module, dict) and isinstance(module.get("type"), str):
                yield "a module of sentence-transformers", module["type"]
        return
    for key, value in document.items() if isinstance(document, dict) else ():
        if key == "auto_map":
            entries = value if isinstance(value, dict) else {"AutoTokenizer": value}  # as older tokenizers have it
            for role, classes in entries.items():
                for item in classes if isinstance(classes, list) else [classes]:
                    if isinstance(item, str):
                        yield role, item
        elif key == "custom_pipelines" and isinstance(value, dict):
            for task, pipeline in value.items():
                if isinstance(pipeline, dict) and isinstance(pipeline.get("impl"), str):
                    yield f"the pipeline {task}", pipeline["impl"]
        elif isinstance(value, dict):
            yield from _named(value, name)


def relative_imports(source: bytes) -> set[str]:
    """Modules beside this one that it imports, wherever in it: `from .x import y`, `from . import x`.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {node.module.replace(".", "/")} if node.module else {alias.name for alias in node.names}
    return names


def made_local(path: str, text: bytes) -> bytes:
    """A config whose references to other repositories are references to what lies beside it; else byte for byte."""
    for reference in references(path, text):
        if reference.repository:
            local = f"{reference.path.removesuffix('.py')}.{reference.name}"
            for slash in ("/", "\\/"):  # as JSON may write it
                foreign = f"{reference.repository}--{local}".replace("/", slash)
                text = text.replace(f'"{foreign}"'.encode(), f'"{local}"'.encode())
    return text
