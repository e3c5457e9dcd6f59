"""The formats, from the code: keys of manifests and run files, lock, exit codes, Python API."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator

import runner
import stage
from runner.config.run_config import RunConfig
from scripts.lib.docs.commands import plain
from scripts.lib.docs.links import ROOT
from stage import errors
from stage.lock import model
from stage.lock.reader import REQUIRED, keys_of
from stage.lock.requests import KINDS

_LOCK = (
    model.LockedAsset,
    model.Source,
    model.LockedFile,
    model.Ingredient,
    model.Part,
    model.Base,
    model.Code,
    model.LeftOut,
    model.LockedSplit,
    model.Column,
    model.LockedEnvironment,
    model.PackageEntry,
)


def manifest_keys() -> str:
    """Which keys an entry of each kind can have."""
    kinds = {kind: list(keys_of(entry)) for kind, entry in KINDS.items()}
    keys = list(dict.fromkeys(key for own in kinds.values() for key in own if key not in kinds))
    rows = [
        f"| `{kind}` | " + " | ".join("yes" if key in own else "" for key in keys) + " |"
        for kind, own in kinds.items()
    ]
    head = "| entry | " + " | ".join(f"`{key}`" for key in keys) + " |"
    return "\n".join([head, "|---" * (len(keys) + 1) + "|", *rows])


def run_file_keys() -> str:
    """Each key of a run file: its values, its default, and the reason for the default."""
    head = ["| key | takes | default | why |", "|---|---|---|---|"]
    return "\n".join([*head, *_rows(RunConfig, "")])


def _rows(component: type, where: str) -> Iterator[str]:
    for key in keys_of(component).values():
        name = where + key.name
        if key.component is not None:
            is_list = typing.get_origin(key.options[0]) is tuple
            yield from _rows(key.component, f"{name}[]." if is_list else f"{name}.")
            continue
        default = "required" if key.default is REQUIRED else f"`{_default(key.default)}`"
        yield f"| `{name}` | {key.takes.replace('|', 'or')} | {default} | {plain(key.why)} |"


def _default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "[]" if value == () else str(value)


def lock() -> str:
    """The parts of a lock, with their fields."""
    return "\n\n".join(_part(part) for part in _LOCK)


def _part(part: type) -> str:
    documented = inspect.cleandoc(part.__doc__ or "")
    about, _, attributes = documented.partition("Attributes:\n")
    meanings = _attributes(attributes)
    rows = [
        f"| `{field.name}` | {plain(meanings.get(field.name, ''))} |"
        for field in dataclasses.fields(part)
    ]
    about = plain(" ".join(about.split()))
    return "\n".join(
        [f"### {part.__name__}", "", about, "", "| field | meaning |", "|---|---|", *rows]
    )


def _attributes(text: str) -> dict[str, str]:
    """The entries of a docstring's `Attributes:`; "a, b: ..." is for both."""
    found: dict[str, str] = {}
    entries = re.split(r"\n(?= {4}\S)", f"\n{text}")
    for entry in filter(str.strip, entries):
        names, _, meaning = entry.partition(":")
        for name in names.split(","):
            found[name.strip()] = " ".join(meaning.split())
    return found


def exit_codes() -> str:
    """The classes of errors, with their exit codes."""
    rows = [
        f"| {kind.exit_code} | `{name}` | {plain((kind.__doc__ or '').partition(chr(10))[0])} |"
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
        and issubclass(kind, errors.StageError)
        and kind is not errors.StageError
    ]
    head = ["| exit code | Python class | meaning |", "|---|---|---|"]
    return "\n".join([*head, *sorted(rows)])


def python_api() -> str:
    """The public functions with their signatures and docstrings."""
    return "\n\n".join(
        _function(f"{package.__name__}.{name}", getattr(package, name))
        for package in (stage, runner)
        for name in package.__all__
        if callable(getattr(package, name)) and not inspect.isclass(getattr(package, name))
    )


def _function(name: str, function: typing.Any) -> str:
    signature = str(inspect.signature(function)).replace("pathlib.", "")
    signature = re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", signature)
    described = function if inspect.isfunction(function) else type(function).__call__
    text = inspect.getdoc(described) or ""
    code = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"### {name}\n\n    {name}{signature}\n\n{code}"


def decisions() -> str:
    """The decisions, with what each is about."""
    lines = []
    for page in sorted((ROOT / "docs/adr").glob("0*.md")):
        text = page.read_text("utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}](../adr/{page.name})")
    return "\n".join(lines)
