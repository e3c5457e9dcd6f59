"""Resolves a model or a metric: the files of a repository at a commit, and code that they name.

Each file has the Hub's evidence. The configs of a model name more: the base model of an adapter
(adapter_config.json of peft), and Python code, which a bundle contains only with permission of the
manifest (docs/adr/0004). A metric of `evaluate` is such code.

`auto_map` in config.json, tokenizer_config.json and the processors' configs, `custom_pipelines`,
and module types in sentence-transformers' modules.json name classes as `module.Class`, or as
`org/repo--module.Class` for code of another repository. transformers reads the first kind from the
model's own folder and the second from the Hub. So a bundle contains the modules of both kinds with
all that they import, each pinned by commit, and its configs name them as local. Of a metric's Space
`evaluate` reads `<name>.py` and the modules that it imports from its folder; the rest of a Space is
its web page.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage.errors import PolicyError, UsageError, about
from stage.hub.client import DEFAULT_ENDPOINT, Hub, Repository
from stage.hub.model_files import (
    RemoteFile,
    ingredient_of,
    is_document,
    locked_file,
    select_by_patterns,
    select_model,
    select_tokenizer,
    why_left,
)
from stage.lock.model import Base, Code, LeftOut, LockedAsset, Source
from stage.lock.requests import MetricRequest, ModelRequest, as_lock_request, way_without
from stage.paths import check_path, printable
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
    name: str,
    reporter: Reporter,
) -> list[Reference]:
    """The classes that will be loaded from code, of all that the configs name. `name`: the asset's.

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
                f"{name}: {reference.config} names {reference}, "
                f"but {repository.id} has no file for it"
            )
        elif request.tokenizer_only and reference.role not in roles:
            continue
        elif why_left(reference.path, request.include, request.exclude):
            reporter.note(
                f"{name}: the code {reference} ({reference.role}) is left out, "
                "because the manifest excludes it"
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
            f"loading it runs Python code {source}: "
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
            with about(f"code for {reference}"):
                other = hub.repository("model", id, "main")
                listings[id] = other, hub.files(other)
        source, files = listings[id]
        waiting = [(reference.path, reference.target)]
        while waiting:
            path, target = waiting.pop()
            if path not in files:
                raise UsageError(
                    f"{reference.config} names {reference} of {id}, "
                    f"which has no {printable(path)}.",
                    f"Try another revision{without}.",
                )
            if same := found.get(target):
                if same.file.upstream != files[path].upstream:
                    raise UsageError(
                        f"{printable(target)} of {same.repository.id} and "
                        f"{printable(path)} of {id} are different files, and both need the same "
                        "path in the bundle.",
                        f"Ask its author to use one of them{without}.",
                    )
                continue
            found[target] = CodeFile(source, files[path], target)
            text = hub.read(source, files[path])
            folder, beside = posixpath.dirname(path), posixpath.dirname(target)
            for module in _imported(text, f"{printable(path)} of {id}"):
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


ADAPTER_CONFIG = "adapter_config.json"


def resolve_model(
    name: str,
    request: ModelRequest,
    hub: Hub,
    reporter: Reporter,
    *,
    allow_pickle: bool = False,
) -> LockedAsset:
    """Pins the commit, lists the tree, chooses files, and reads the chosen configs.

    Args:
        name: the asset's name.
        allow_pickle: where the only weights are pickles, convert them to safetensors.

    Raises:
        UsageError: the repository, revision or file does not exist.
        PolicyError: there are only pickles, code that is not allowed, or a path that a bundle does
            not allow.
    """
    repository = hub.repository("model", request.repository, request.revision)
    listing = hub.files(repository)
    every, exclude, folder = list(listing.values()), request.exclude, f"data/models/{name}"
    pickles: list[str] = []
    if request.include:
        taken, left_out = select_by_patterns(
            every, request.include, exclude, allow_code=request.allow_code
        )
    elif request.tokenizer_only:
        taken, left_out = select_tokenizer(every, exclude)
    else:
        taken, left_out, pickles = select_model(every, exclude, allow_pickle=allow_pickle)
    if not taken:
        raise UsageError(
            f"no file of {repository.id} is left to take.",
            "Is it the right repository? A tokenizer has a tokenizer.json, vocab.txt, "
            "or the like at its top."
            if request.tokenizer_only
            else "Check `include` and `exclude`; or is it the wrong repository?",
        )
    texts = {
        file.path: hub.read(repository, file)
        for file in taken
        if may_name_code(file.path)
        or (file.path == ADAPTER_CONFIG and request.base and not request.tokenizer_only)
    }
    found = [r for path in texts if may_name_code(path) for r in references(path, texts[path])]
    needed = needed_references(request, repository, listing, found, name, reporter)
    code = find_code(needed, repository, listing, hub, request.tokenizer_only)
    foreign = {reference.config for reference in needed if reference.repository}
    rewritten = {path for path in foreign if made_local(path, texts[path]) != texts[path]}
    files = {f.path: locked_file(f, f"{folder}/{f.path}") for f in taken if f.path not in rewritten}
    files |= {c.target: locked_file(c.file, f"{folder}/{c.target}") for c in code}
    for file in files.values():
        check_path(file.path, way_without(as_lock_request(request)))
    made_from = [file for file in every if file.path in rewritten or file.path in pickles]
    base, elsewhere = base_of(texts[ADAPTER_CONFIG]) if ADAPTER_CONFIG in texts else (None, None)
    if elsewhere:
        reporter.warn(
            f"{name}: this adapter names its base model by a path on its author's machine "
            f"({elsewhere}): add that model to the manifest"
        )
    owners = {path: repository for path in files if path.endswith(".py")}
    owners |= {c.target: c.repository for c in code}
    return LockedAsset(
        name=name,
        kind="tokenizer" if request.tokenizer_only else "model",
        request=as_lock_request(request),
        source=Source(request.source_type, repository.id, request.revision, repository.commit),
        files=tuple(files.values()),
        left_out=tuple(o for o in left_out if o.path not in files and o.path not in pickles),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        made_from=tuple(ingredient_of(file) for file in made_from),
        base=base,
        code=tuple(
            Code(
                owner.id,
                owner.commit,
                owner.licence,
                tuple(f"{folder}/{path}" for path in owners if owners[path].id == owner.id),
            )
            for owner in {owner.id: owner for owner in owners.values()}.values()
        ),
    )


def base_of(text: bytes) -> tuple[Base | None, str | None]:
    """The base model that an adapter_config.json names.

    Returns:
        The Hub repository, or None; and the name where it is not a Hub repository (a path on its
        author's disk), or None.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):  # the load test reports it
        return None, None
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        return None, None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or ".." in name:
        return None, name
    revision = config.get("revision")
    return Base(name, revision if isinstance(revision, str) and revision else "main"), None


OWNERS = ("evaluate-metric", "evaluate-comparison", "evaluate-measurement")
"""The owners of the Spaces that `evaluate` asks for a name without an owner, in its order."""
REQUIREMENTS = "requirements.txt"
_GIVE_THE_NAME = "Give the name that your script gives to evaluate.load(...)."
_FROM_ELSEWHERE = re.compile(
    r"^(?:import|from)\s+\.[^#\r\n]*#\s+From:\s+(\S+)", re.MULTILINE | re.ASCII
)


def resolve_metric(name: str, request: MetricRequest, hub: Hub, reporter: Reporter) -> LockedAsset:
    """Pins the commit and finds the modules of a metric.

    Args:
        name: the asset's name.

    Raises:
        UsageError: no such Space or revision; it is no metric, or not one that loads offline.
        PolicyError: the manifest does not allow code.
    """
    space = _space(request, hub)
    listing = hub.files(space)
    main = f"{space.id.rpartition('/')[2]}.py"
    if main not in listing:
        raise UsageError(
            f"the Space {space.id} has no {main}, so it is no metric of `evaluate`.",
            _GIVE_THE_NAME,
        )
    if not request.allow_code:
        raise PolicyError(
            f"a metric is Python code, and your script runs it: {main} of {space.id}.",
            f"Read that code ({DEFAULT_ENDPOINT}/spaces/{space.id}/tree/{space.commit}); if it may "
            "run on your cluster: `allow_code: true`.",
        )
    text = hub.read(space, listing[main]).decode("utf-8", "replace")
    if match := _FROM_ELSEWHERE.search(text):
        raise UsageError(
            f"{space.id} downloads {match[1]} each time it is loaded, so it never loads "
            "without a network.",
            "Take another metric: sacrebleu for bleu, for example.",
        )
    loaded = Reference(main, "evaluate.load", None, main, space.id)
    modules = find_code([loaded], space, listing, hub, tokenizer_only=True)
    code = {module.target for module in modules}
    folder = f"data/metrics/{name}"
    taken = [f for p, f in listing.items() if p in code or p == REQUIREMENTS or is_document(p)]
    for file in taken:
        check_path(f"{folder}/{file.path}", way_without(as_lock_request(request)))
    if REQUIREMENTS in listing:  # the environment must have them
        lines = hub.read(space, listing[REQUIREMENTS]).decode("utf-8", "replace").split("\n")
        packages = [line.strip() for line in lines if not line.strip().startswith("#")]
        if others := ", ".join(p for p in packages if p and "evaluate" not in p):
            reporter.note(f"{name}: its {REQUIREMENTS} asks for: {others}")
    own = tuple(f"{folder}/{path}" for path in sorted(code))
    return LockedAsset(
        name=name,
        kind="metric",
        request=as_lock_request(request),
        source=Source(request.source_type, space.id, request.revision, space.commit),
        files=tuple(locked_file(file, f"{folder}/{file.path}") for file in taken),
        left_out=tuple(
            LeftOut(file.path, file.size, "not read by evaluate.load")
            for file in listing.values()
            if file not in taken
        ),
        licence=space.licence,
        code=(Code(space.id, space.commit, space.licence, own),),
    )


def _space(request: MetricRequest, hub: Hub) -> Repository:
    """The Space of a name; a name without an owner is looked up as `evaluate` does.

    Raises:
        UsageError: there is none.
    """
    if "/" in request.repository:
        return hub.repository("space", request.repository, request.revision)
    tried = [f"{owner}/{request.repository}" for owner in OWNERS]
    refusals = []
    for id in tried:
        try:
            return hub.repository("space", id, request.revision)
        except UsageError as refusal:
            refusals.append(refusal)
    raise UsageError(
        f"`{request.repository}` is no metric of `evaluate` (looked for "
        f"{', '.join(tried)}): {refusals[0].message}",
        f"{_GIVE_THE_NAME[:-1]}; one of another owner is `metric: owner/name`.",
    )
