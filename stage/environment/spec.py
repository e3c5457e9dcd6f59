"""Reads what a person asks for of an environment: `environment.yml` -> `EnvironmentSpec`.

The file is conda's own, so `conda env create` still takes it. A mistake is told with file:line; nothing is looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage.environment.addresses import expand, without_secrets
from stage.environment.pipsection import PipSection, read_pip_section
from stage.environment.profile import Profile
from stage.errors import UsageError
from stage.yamlfile import Lines, check_keys, load_yaml_with_lines

HASH_FORMAT = 1
"""Raised when the same spec and profile would be locked differently, so that older locks count as stale."""

_KEYS = ("name", "channels", "dependencies", "platforms", "prefix", "variables")
_CONDA_NAME = re.compile(r"^(?:\S+::)?([A-Za-z0-9_.-]+?)(?=$|[\s=<>!~\[])")


@dataclass(frozen=True, kw_only=True)
class CondaDependency:
    """A requirement of the conda half: a match spec (`python=3.11`, `conda-forge::openmpi >=4`)."""

    text: str
    name: str
    place: str


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """What is asked for.

    Attributes:
        channels: in order of priority, `${NAME}` filled in, so perhaps with secrets: kept out of `repr`.
        platforms: those it says it is for; empty: any.
        variables: `variables:` of conda, which are set by activation alone and so do not travel.
    """

    path: Path
    name: str
    channels: tuple[str, ...] = field(repr=False)
    conda: tuple[CondaDependency, ...]
    pip: PipSection
    platforms: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    lines: Lines

    @property
    def lock_path(self) -> Path:
        """`environment.yml` -> `conda-lock.yml`, `x.yml` -> `x.conda-lock.yml`, beside it."""
        stem = "" if self.path.stem == "environment" else f"{self.path.stem}."
        return self.path.with_name(f"{stem}conda-lock.yml")

    @staticmethod
    def load(path: Path | str, variables: Mapping[str, str] | None = None) -> EnvironmentSpec:
        """Reads an `environment.yml`.

        Args:
            variables: for `${NAME}` in addresses; None: the process's environment.

        Raises:
            UsageError: with file:line, for anything that cannot be read or honoured.
            PolicyError: with file:line, for what cannot travel: see `pipsection`.
        """
        path = Path(path)
        variables = os.environ if variables is None else variables
        data, lines = load_yaml_with_lines(path)
        check_keys(data, _KEYS, (), lines)
        conda, pip = _dependencies(data, lines)
        return EnvironmentSpec(
            path=path,
            name=str(data.get("name") or path.stem),
            channels=_channels(data, lines, variables),
            conda=tuple(conda),
            pip=read_pip_section(pip, path.parent, variables),
            platforms=tuple(str(platform) for platform in data.get("platforms") or ()),
            variables=tuple(str(name) for name in data.get("variables") or ()),
            lines=lines,
        )

    def place(self, *keys: str | int) -> str:
        """`file:line` of a key."""
        return self.lines.place(*keys)


def content_hash(spec: EnvironmentSpec, profile: Profile, own_requirements: Iterable[str]) -> str:
    """sha256 of everything a lock depends on, secrets and comments left out. Equal: the lock still answers.

    Args:
        own_requirements: airlift's own, which are locked with the rest.
    """
    document = {
        "format": HASH_FORMAT,
        "channels": [without_secrets(channel) for channel in spec.channels],
        "conda": [dependency.text for dependency in spec.conda],
        "pip": spec.pip.as_document(spec.path.parent.resolve()),
        "airlift": sorted(own_requirements),
        "platform": profile.platform,
        "virtual_packages": profile.virtual_packages(),
        "compute_capability": profile.compute_capability,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _channels(data: Mapping[str, Any], lines: Lines, variables: Mapping[str, str]) -> tuple[str, ...]:
    value = data.get("channels")
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(
            f"{lines.place('channels')}: `channels` should be a list of channels.",
            "For example channels: [conda-forge]",
        )
    found = tuple(
        expand(channel, variables, lines.place("channels", index))
        for index, channel in enumerate(value)
        if channel != "nodefaults"
    )
    if not found:
        raise UsageError(f"{lines.place('channels')}: no channels.", "For example channels: [conda-forge]")
    return found


def _dependencies(data: Mapping[str, Any], lines: Lines) -> tuple[list[CondaDependency], list[tuple[str, str]]]:
    """The conda half, and the lines of the pip section with their places."""
    value = data.get("dependencies")
    if not isinstance(value, list) or not value:
        raise UsageError(
            f"{lines.place('dependencies')}: `dependencies` should be a list of packages.",
            "For example dependencies: [python=3.11, pip, {pip: [torch]}]",
        )
    conda: list[CondaDependency] = []
    pip: list[tuple[str, str]] = []
    for index, item in enumerate(value):
        place = lines.place("dependencies", index)
        if isinstance(item, str):
            conda.append(_conda_dependency(item, place))
        elif isinstance(item, dict) and set(item) == {"pip"}:
            pip += _pip_lines(item["pip"], index, lines)
        else:
            shown = f"`{item}:`" if isinstance(item, dict) else f"{item!r}"
            raise UsageError(f"{place}: {shown} is no package.", "Write `name`, `name=1.2` or a `pip:` section.")
    return conda, pip


def _conda_dependency(text: str, place: str) -> CondaDependency:
    text = text.strip()
    match = _CONDA_NAME.match(text)
    if match is None:
        raise UsageError(f"{place}: `{text}` is no conda package.", "Write name, name=1.2 or name>=1,<2.")
    return CondaDependency(text=text, name=match[1].lower(), place=place)


def _pip_lines(value: Any, index: int, lines: Lines) -> list[tuple[str, str]]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        place = lines.place("dependencies", index, "pip")
        raise UsageError(f"{place}: `pip` should be a list of requirements.", "Write pip: [torch, transformers]")
    return [(item, lines.place("dependencies", index, "pip", number)) for number, item in enumerate(value)]
