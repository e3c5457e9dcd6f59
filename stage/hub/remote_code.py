"""Finds the Python code that a model's configs name, and checks that the manifest allows it.

`auto_map` in config.json, tokenizer_config.json and the processors' configs, `custom_pipelines`,
and module types in sentence-transformers' modules.json name classes as `module.Class`, or as
`org/repo--module.Class` for code of another repository. transformers reads the first kind from the
model's own folder and the second from the Hub. So a bundle contains the modules of both kinds with
all that they import, each pinned by commit, and its configs name them as local (docs/adr/0004).
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage.errors import PolicyError, UsageError
from stage.hub.client import Hub, Repository
from stage.hub.errors import DEFAULT_ENDPOINT
from stage.hub.model_files import RemoteFile, why_left
from stage.lock.requests import ModelRequest
from stage.paths import printable
from stage.progress import Reporter

_CONFIGS = re.compile(
    r"(.*/)?(config|tokenizer_config|processor_config|preprocessor_config|"
    r"video_preprocessor_config|modules)\.json"
)
_REFERENCE = re.compile(
    r"(?:(?P<repository>[\w.-]+(?:/[\w.-]+)?)--)?(?P<module>[\w/.-]+)\.(?P<name>\w+)"
)


@dataclass(frozen=True)
class Reference:
    """A class that a config names.

    Attributes:
        config: the file that names it.
        role: the class it is loaded as (`AutoModel`, `AutoTokenizer`, ...).
        repository: the other repository that has its code; None: the model's own.
        path: of its module in that repository.
        name: of the class.
    """

    config: str
    role: str
    repository: str | None
    path: str
    name: str

    @property
    def target(self) -> str:
        """The module's path below the asset.

        Code of another repository is placed beside the config that names it.
        """
        return (
            posixpath.join(posixpath.dirname(self.config), self.path)
            if self.repository
            else self.path
        )

    def __str__(self) -> str:
        return f"{self.path.removesuffix('.py').replace('/', '.')}.{self.name}"


def may_name_code(path: str) -> bool:
    """Whether libraries read class names from this file of a model repository."""
    return _CONFIGS.fullmatch(path) is not None


def references(path: str, text: bytes) -> list[Reference]:
    """The classes that a config names; none if it is not JSON (the load test reports that)."""
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
            found.append(
                Reference(
                    path, role, match["repository"], posixpath.join(folder, module), match["name"]
                )
            )
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
            # Older tokenizers have the classes without a role.
            entries = value if isinstance(value, dict) else {"AutoTokenizer": value}
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
    """Modules of its own folder that a module imports: `from .x import y`, `from . import x`.

    Imports inside functions count too.

    Raises:
        SyntaxError, ValueError: the source is not Python.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= (
                {node.module.replace(".", "/")}
                if node.module
                else {alias.name for alias in node.names}
            )
    return names


def made_local(path: str, text: bytes) -> bytes:
    """A config with its references to other repositories made local; other bytes stay.

    Args:
        path: the config's path in the repository.
    """
    for reference in references(path, text):
        if reference.repository:
            local = f"{reference.path.removesuffix('.py')}.{reference.name}"
            for slash in ("/", "\\/"):  # JSON allows both
                foreign = f"{reference.repository}--{local}".replace("/", slash)
                text = text.replace(f'"{foreign}"'.encode(), f'"{local}"'.encode())
    return text


@dataclass(frozen=True)
class CodeFile:
    """A module, the repository it comes from, and its path below the asset (`target`)."""

    repository: Repository
    file: RemoteFile
    target: str


def needed_references(
    request: ModelRequest,
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    found: Iterable[Reference],
    reporter: Reporter,
    what: str,
) -> list[Reference]:
    """The classes that will be loaded from code, of all that the configs name.

    Omitted are classes whose module the manifest's patterns exclude, and classes of the repository
    itself without a file: they belong to an installed package, or the repository is a copy
    without code.

    Raises:
        PolicyError: there are some, and the manifest does not allow code.
    """
    roles = {"AutoTokenizer", "AutoConfig"} if request.allow_code else {"AutoTokenizer"}
    needed = []
    for reference in found:
        if not reference.repository and reference.path not in listing:
            reporter.detail(
                f"{what}: {reference.config} names {reference}, "
                f"but {repository.id} has no file for it"
            )
        elif request.tokenizer_only and reference.role not in roles:
            continue
        elif why_left(reference.path, request.include, request.exclude):
            reporter.note(
                f"{what}: goes without its code {reference} ({reference.role}), "
                "as the manifest says"
            )
        else:
            needed.append(reference)
    if needed and not request.allow_code:
        raise _code_error(needed, repository, request, what)
    return needed


def find_code(
    references: Sequence[Reference],
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    hub: Hub,
    request: ModelRequest,
    what: str,
) -> list[CodeFile]:
    """The modules of these classes and all modules that they import from their folders.

    Each repository is pinned to its current commit.

    Raises:
        UsageError: a repository or module does not exist or is not Python, or two different
            modules have the same path in the bundle.
    """
    listings = {repository.id: (repository, listing)}
    found: dict[str, CodeFile] = {}
    for reference in references:
        id = reference.repository or repository.id
        if id not in listings:
            other = hub.repository(f"{what}: code for {reference}", "model", id, "main")
            listings[id] = other, hub.files(what, other)
        source, files = listings[id]
        waiting = [(reference.path, reference.target)]
        while waiting:
            path, target = waiting.pop()
            if path not in files:
                raise UsageError(
                    f"{what}: {reference.config} names {reference} of {id}, "
                    f"which has no {printable(path)}.",
                    f"Try another revision{_or_without(request)}.",
                )
            new = CodeFile(source, files[path], target)
            if (there := found.setdefault(target, new)) is not new:
                _check_same(there, new, request, what)
                continue
            text = hub.read(source, files[path], what)
            waiting += _imported(text, path, target, files, f"{what}: {printable(path)} of {id}")
    return list(found.values())


def _imported(
    text: bytes, path: str, target: str, files: Mapping[str, RemoteFile], where: str
) -> list[tuple[str, str]]:
    """What a module imports from its folder: (path in the repository, path below the asset)."""
    try:
        names = relative_imports(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: not Python: {error}.", "Try another revision.") from None
    return [
        (
            posixpath.join(posixpath.dirname(path), module),
            posixpath.join(posixpath.dirname(target), module),
        )
        for name in sorted(names)
        for module in (f"{name}.py", f"{name}/__init__.py")
        if posixpath.join(posixpath.dirname(path), module) in files
    ]


def _check_same(one: CodeFile, other: CodeFile, request: ModelRequest, what: str) -> None:
    if one.file.upstream != other.file.upstream:
        raise UsageError(
            f"{what}: {printable(one.target)} of {one.repository.id} and "
            f"{printable(other.file.path)} of {other.repository.id} are different files, "
            "and both need the same path in the bundle.",
            f"Ask its author to use one of them{_or_without(request)}.",
        )


def _or_without(request: ModelRequest) -> str:
    """The advice to exclude code; empty for a tokenizer, whose entry has no `exclude`."""
    return "" if request.tokenizer_only else '; or exclude the code: `exclude: ["*.py"]`'


def _code_error(
    needed: Sequence[Reference], own: Repository, request: ModelRequest, what: str
) -> PolicyError:
    first = needed[0]
    id = first.repository or own.id
    source = (
        f"of another repository, {id}"
        if first.repository and first.repository != own.id
        else f"of {id}"
    )
    more = f" (and {len(needed) - 1} more such classes)" if len(needed) > 1 else ""
    revision = "main" if first.repository else own.commit
    without = (
        ""
        if request.tokenizer_only
        else (
            " If transformers has this kind of model built in, exclude the code: "
            '`exclude: ["*.py"]`.'
        )
    )
    return PolicyError(
        f"{what}: loading it runs Python code {source}: "
        f"{first.config} names the class {first} ({first.role}){more}.",
        f"Read that code ({DEFAULT_ENDPOINT}/{id}/tree/{revision}); if it may run on your cluster: "
        f"`allow_code: true`.{without}",
    )
