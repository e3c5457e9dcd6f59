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
from stage.hub.model_files import RemoteFile, why_left
from stage.hub.refusals import DEFAULT_ENDPOINT
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
    for role, value in _named(document):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match and not value.startswith("sentence_transformers."):
            folder = "" if match["repository"] else posixpath.dirname(path)
            module = posixpath.join(folder, f"{match['module']}.py")
            found.append(Reference(path, role, match["repository"], module, match["name"]))
    return found


def _named(document: Any) -> Iterator[tuple[str, Any]]:
    """(role, class reference) of every class that a config names."""
    if isinstance(document, list):  # modules.json
        for module in document:
            if isinstance(module, dict):
                yield "a module of sentence-transformers", module.get("type")
        return
    for key, value in document.items() if isinstance(document, dict) else ():
        if key == "auto_map":
            # Older tokenizers have the classes without a role.
            roles = value if isinstance(value, dict) else {"AutoTokenizer": value}
            for role, classes in roles.items():
                for item in classes if isinstance(classes, list) else [classes]:
                    yield role, item
        elif key == "impl":  # below `custom_pipelines`
            yield "a pipeline", value
        elif isinstance(value, dict):
            yield from _named(value)


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
        first = needed[0]
        id = first.repository or repository.id
        revision = "main" if first.repository else repository.commit
        source = f"of {id}" if id == repository.id else f"of another repository, {id}"
        more = f" (and {len(needed) - 1} more such classes)" if len(needed) > 1 else ""
        without = (
            " If transformers has this kind of model built in, exclude the code: "
            '`exclude: ["*.py"]`.'
        )
        raise PolicyError(
            f"{what}: loading it runs Python code {source}: "
            f"{first.config} names the class {first} ({first.role}){more}.",
            f"Read that code ({DEFAULT_ENDPOINT}/{id}/tree/{revision}); if it may run on your "
            f"cluster: `allow_code: true`.{'' if request.tokenizer_only else without}",
        )
    return needed


def find_code(
    references: Sequence[Reference],
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    hub: Hub,
    what: str,
    tokenizer_only: bool,
) -> list[CodeFile]:
    """The modules of these classes and all modules that they import from their folders.

    Each repository is pinned to its current commit.

    Args:
        tokenizer_only: the entry has no `exclude`, so no message advises it.

    Raises:
        UsageError: a repository or module does not exist or is not Python, or two different
            modules have the same path in the bundle.
    """
    without = "" if tokenizer_only else '; or exclude the code: `exclude: ["*.py"]`'
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
                    f"Try another revision{without}.",
                )
            if same := found.get(target):
                if same.file.upstream != files[path].upstream:
                    raise UsageError(
                        f"{what}: {printable(target)} of {same.repository.id} and "
                        f"{printable(path)} of {id} are different files, and both need the same "
                        "path in the bundle.",
                        f"Ask its author to use one of them{without}.",
                    )
                continue
            found[target] = CodeFile(source, files[path], target)
            text = hub.read(source, files[path], what)
            folder, beside = posixpath.dirname(path), posixpath.dirname(target)
            for module in _imported(text, f"{what}: {printable(path)} of {id}"):
                if posixpath.join(folder, module) in files:
                    waiting.append((posixpath.join(folder, module), posixpath.join(beside, module)))
    return list(found.values())


def _imported(text: bytes, where: str) -> list[str]:
    """The files beside a module that it may import."""
    try:
        names = sorted(relative_imports(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: not Python: {error}.", "Try another revision.") from None
    return [file for name in names for file in (f"{name}.py", f"{name}/__init__.py")]
