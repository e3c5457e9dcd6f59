"""Reads the request for an environment: `environment.yml` -> `EnvironmentSpec`.

The file is conda's own, so `conda env create` accepts it too. A mistake is reported with file:line.
Nothing is looked up.
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

from stage.environment.spec.conda_lock import lock_beside
from stage.environment.spec.pip_section import PipSection, read_pip_section
from stage.environment.spec.profile import Profile
from stage.environment.spec.urls import expand
from stage.errors import Place, UsageError, about, without_secrets
from stage.file_kinds import ENVIRONMENT
from stage.lock.reader import Lines, Reader, setting
from stage.lock.yaml_lines import reading_yaml

HASH_FORMAT = 1
"""A new number makes older locks stale: for a change of how a spec and profile are locked."""

_CONDA_NAME = re.compile(r"^(?:\S+::)?([A-Za-z0-9_.-]+?)(?=$|[\s=<>!~\[])")


@dataclass(frozen=True, kw_only=True)
class CondaDependency:
    """A requirement of the conda half: a match spec (`python=3.11`, `conda-forge::openmpi >=4`)."""

    text: str
    name: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class _EnvironmentKeys:
    """The keys of an `environment.yml`."""

    name: Any = None
    channels: tuple[str, ...] = setting((), is_one=True)
    dependencies: Any = None
    platforms: Any = ()
    prefix: Any = None
    variables: Any = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """The contents of an `environment.yml`.

    Attributes:
        channels: in order of priority, with `${NAME}` replaced, so perhaps with secrets: kept out
            of `repr`.
        platforms: the platforms that it names; empty: any.
        variables: names in conda's `variables:`, which only activation sets, so they do not travel.
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
        """The default path of its lock."""
        return lock_beside(self.path)

    @staticmethod
    def load(path: Path | str, variables: Mapping[str, str] | None = None) -> EnvironmentSpec:
        """Reads an `environment.yml`.

        Args:
            variables: for `${NAME}` in URLs; None: the environment of this process.

        Raises:
            UsageError: with file:line: entries that cannot be read or locked.
            PolicyError: with file:line: an entry that cannot travel, see `pip_section`.
        """
        path = Path(path)
        variables = os.environ if variables is None else variables
        with reading_yaml(path, ENVIRONMENT) as (data, lines):
            found = Reader(lines).read(_EnvironmentKeys, data)
            conda, pip = _dependencies(data, lines)
            channels = []
            for index, channel in enumerate(found.channels):
                if channel != "nodefaults":
                    with about(lines.place("channels", index)):
                        channels.append(expand(channel, variables))
            return EnvironmentSpec(
                path=path,
                name=str(data.get("name") or path.stem),
                channels=tuple(channels),
                conda=tuple(conda),
                pip=read_pip_section(pip, path.parent, variables),
                platforms=tuple(str(platform) for platform in data.get("platforms") or ()),
                variables=tuple(str(name) for name in data.get("variables") or ()),
                lines=lines,
            )

    def place(self, *keys: str | int) -> Place:
        """The line of a key."""
        return self.lines.place(*keys)


def content_hash(spec: EnvironmentSpec, profile: Profile, own_requirements: Iterable[str]) -> str:
    """sha256 of everything that a lock depends on, without secrets and comments.

    Args:
        own_requirements: the requirements of airlift, which are locked with the rest.
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
        **({"provides": profile.provides} if profile.provides else {}),
        # Until 0.3 the last of several requirements on one package was asked for alone.
        **({"joined": True} if len({d.name for d in spec.conda}) < len(spec.conda) else {}),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _dependencies(
    data: Mapping[str, Any], lines: Lines
) -> tuple[list[CondaDependency], list[tuple[str, Place]]]:
    """The conda half, and the lines of the pip section, each with its file:line."""
    value = data.get("dependencies")
    if not isinstance(value, list) or not value:
        raise UsageError(
            "`dependencies` should be a list of packages.",
            "For example dependencies: [python=3.11, pip, {pip: [torch]}]",
            place=lines.place("dependencies"),
        )
    conda: list[CondaDependency] = []
    pip: list[tuple[str, Place]] = []
    for index, item in enumerate(value):
        place = lines.place("dependencies", index)
        with lines.mistakes, about(place):
            if isinstance(item, str):
                conda.append(_conda_dependency(item, place))
            elif isinstance(item, dict) and set(item) == {"pip"}:
                pip += _pip_lines(item["pip"], index, lines)
            else:
                shown = f"`{next(iter(item), '')}:`" if isinstance(item, dict) else f"{item!r}"
                remedy = "Write `name`, `name=1.2` or a `pip:` section."
                raise UsageError(f"{shown} is no package.", remedy)
    return conda, pip


def _conda_dependency(text: str, place: Place) -> CondaDependency:
    text = text.strip()
    match = _CONDA_NAME.match(text)
    if match is None:
        raise UsageError(f"`{text}` is no conda package.", "Write name, name=1.2 or name>=1,<2.")
    return CondaDependency(text=text, name=match[1].lower(), place=place)


def _pip_lines(value: Any, index: int, lines: Lines) -> list[tuple[str, Place]]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        place = lines.place("dependencies", index, "pip")
        remedy = "Write pip: [torch, transformers]"
        raise UsageError("`pip` should be a list of requirements.", remedy, place=place)
    keys = ("dependencies", index, "pip")
    return [(item, lines.place(*keys, number)) for number, item in enumerate(value)]
