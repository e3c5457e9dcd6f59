"""The Python files that a model's configs refer to: refused, or found with all they import, each pinned by commit."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stage.errors import PolicyError, UsageError
from stage.names import printable
from stage.progress import Reporter
from stage.request import ModelRequest
from stage.sources.code import Reference, relative_imports
from stage.sources.hub import Hub, Repository
from stage.sources.refusals import DEFAULT_ENDPOINT
from stage.sources.selection import RemoteFile, why_left
from stage.sources.smallfiles import SmallFiles


@dataclass(frozen=True)
class CodeFile:
    """A module, the repository it comes from, and its path below the asset."""

    repository: Repository
    file: RemoteFile
    lands_at: str


def needed_references(
    request: ModelRequest,
    repository: Repository,
    listing: Sequence[RemoteFile],
    found: Iterable[Reference],
    reporter: Reporter,
    what: str,
) -> list[Reference]:
    """The classes that will be loaded from code, of all that configs name.

    Out are those whose module the manifest's patterns leave out, and those of the repository itself that it has no
    file for: the name of an installed package, or what a copy without code still says.

    Raises:
        PolicyError: there are some, and the manifest does not allow code.
    """
    paths = {file.path for file in listing}
    roles = {"AutoTokenizer", "AutoConfig"} if request.allow_code else {"AutoTokenizer"}
    needed = []
    for reference in found:
        if not reference.repository and reference.path not in paths:
            reporter.detail(f"{what}: {reference.config} names {reference}, which {repository.id} has no file for")
        elif request.tokenizer_only and reference.role not in roles:
            continue
        elif why_left(reference.path, request.include, request.exclude):
            reporter.note(f"{what}: goes without its code {reference} ({reference.role}), as the manifest says")
        else:
            needed.append(reference)
    if needed and not request.allow_code:
        raise _refused(needed, repository, request, what)
    return needed


def gather(
    references: Sequence[Reference],
    repository: Repository,
    listing: Sequence[RemoteFile],
    hub: Hub,
    small: SmallFiles,
    request: ModelRequest,
    what: str,
) -> list[CodeFile]:
    """The modules of these classes and all they import beside them, from the commit each repository is at now.

    Raises:
        UsageError: a repository or module that is not there, is no Python, or would lie where another does.
    """
    listings = {repository.id: (repository, {file.path: file for file in listing})}
    gathered: dict[str, CodeFile] = {}
    for reference in references:
        id = reference.repository or repository.id
        if id not in listings:
            other = hub.repository(f"{what}: code for {reference}", "model", id, "main")
            listings[id] = other, {file.path: file for file in hub.files(what, other)}
        source, files = listings[id]
        waiting = [(reference.path, reference.lands_at)]
        while waiting:
            path, lands_at = waiting.pop()
            if path not in files:
                raise UsageError(
                    f"{what}: {reference.config} names {reference} of {id}, which has no {printable(path)}.",
                    f"Try another revision{_or_without(request)}.",
                )
            new = CodeFile(source, files[path], lands_at)
            if (there := gathered.setdefault(lands_at, new)) is not new:
                _check_same(there, new, request, what)
                continue
            text = small.read(source, files[path], what)
            waiting += _imported(text, path, lands_at, files, f"{what}: {printable(path)} of {id}")
    return list(gathered.values())


def _imported(text: bytes, path: str, lands_at: str, files: dict[str, RemoteFile], where: str) -> list[tuple[str, str]]:
    """What a module imports from beside it: (path in the repository, path below the asset)."""
    try:
        names = relative_imports(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: no Python: {error}.", "Try another revision.") from None
    return [
        (posixpath.join(posixpath.dirname(path), module), posixpath.join(posixpath.dirname(lands_at), module))
        for name in sorted(names)
        for module in (f"{name}.py", f"{name}/__init__.py")
        if posixpath.join(posixpath.dirname(path), module) in files
    ]


def _check_same(one: CodeFile, other: CodeFile, request: ModelRequest, what: str) -> None:
    if one.file.evidence != other.file.evidence:
        raise UsageError(
            f"{what}: {printable(one.lands_at)} of {one.repository.id} and {printable(other.file.path)} of "
            f"{other.repository.id} are different files, and both would have to lie at the same place.",
            f"Ask its author to settle on one of them{_or_without(request)}.",
        )


def _or_without(request: ModelRequest) -> str:
    """A tokenizer's entry takes no `exclude`."""
    return "" if request.tokenizer_only else '; or leave the code: `exclude: ["*.py"]`'


def _refused(needed: Sequence[Reference], own: Repository, request: ModelRequest, what: str) -> PolicyError:
    first = needed[0]
    id = first.repository or own.id
    source = f"of another repository, {id}" if first.repository and first.repository != own.id else f"of {id}"
    more = f" (and {len(needed) - 1} more such classes)" if len(needed) > 1 else ""
    revision = "main" if first.repository else own.commit
    without = (
        ""
        if request.tokenizer_only
        else (' If transformers knows this kind of model by itself, it can go without: `exclude: ["*.py"]`.')
    )
    return PolicyError(
        f"{what}: loading it runs Python code {source}: {first.config} names the class {first} ({first.role}){more}.",
        f"Read that code ({DEFAULT_ENDPOINT}/{id}/tree/{revision}); if it may run on your cluster: "
        f"`allow_code: true`.{without}",
    )
