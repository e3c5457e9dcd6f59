"""Reads the request for an environment: `environment.yml` -> `EnvironmentSpec`.

The file is conda's own, so `conda env create` accepts it too. A mistake is reported with file:line.
Nothing is looked up. Its `pip:` section, with the requirements files that it names, is a
`PipSection`: requirements that cannot travel (editable installs, local paths, repositories of a
version control system) are refused, with an alternative.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from stage.environment.spec.conda_lock import lock_beside
from stage.environment.spec.profile import Profile
from stage.errors import (
    Mistakes,
    Place,
    PolicyError,
    StageError,
    UsageError,
    about,
    quoted,
    without_secrets,
)
from stage.file_kinds import ENVIRONMENT, REQUIREMENTS, check_kind
from stage.files import is_hex, sha256_of_bytes
from stage.installation import DISTRIBUTION
from stage.lock.reader import Lines, Reader, setting
from stage.lock.yaml_lines import reading_yaml
from stage.text import save_as_utf8

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `${NAME}`, as pip and conda do.

    Raises:
        UsageError: a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UsageError(
                f"the variable {match[1]} is not set.",
                f"export {match[1]}=..., then again.",
            )
        return variables[match[1]]

    return _VARIABLE.sub(value, text)


def userinfo(url: str) -> str | None:
    """`user:password` of a URL, as written there; None if it has none."""
    before, at, _ = urlsplit(url).netloc.rpartition("@")
    return before if at else None


_OURS = (DISTRIBUTION, "airlift")
_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")
_INDEXES = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host")
_FLAGS = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_WITH_VALUE = (*_FILES, *_INDEXES, "--no-binary", "--only-binary")
_OPTIONS = {**dict.fromkeys(_WITH_VALUE, 1), **dict.fromkeys(_FLAGS, 0)}
"""Known options -> number of their values."""

SDISTS = ("deepspeed",)
"""Packages that come as source: their newest wheels on PyPI are years older than their sources.

`--no-binary NAME` in the pip section adds to them. Other packages that are published as source only
are found while resolving.
"""

_VCS = re.compile(r"^(git|hg|svn|bzr)\+|^git@|^git://|^ssh://")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?=$|[\[(<>=!~;@])")
_EGG = re.compile(r"[#&]egg=([\w.-]+)")
_REPOSITORY = "a repository is no package: its build differs from day to day"
_EDITABLE = "an editable install points at a folder of this machine"
_PER_REQUIREMENT = re.compile(r"\s--(hash|config-settings?|global-option|install-option)\b")
_ANYTHING_BUT_HASH = re.compile(r"--(?!hash)[\w-]+")


@dataclass(frozen=True, kw_only=True)
class PipRequirement:
    """One requirement.

    Attributes:
        text: in the notation of PEP 508.
        name: normalised (PEP 503).
        url: of a direct reference (`name @ https://...`).
        sha256: the digests of its permitted files; empty: any file.
        place: file:line, for messages.
    """

    text: str
    name: str
    place: Place
    url: str | None = None
    sha256: tuple[str, ...] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether it permits one version only."""
        exact = any(s.operator in ("==", "===") for s in Requirement(self.text).specifier)
        return bool(self.url) or exact


@dataclass(kw_only=True)
class PipSection:
    """The requirements and options for pip.

    Attributes:
        index_url, extra_index_urls, find_links: with `${NAME}` replaced, so perhaps with secrets:
            kept out of `repr`. A local folder of `find_links` is absolute.
        sdists: names that may come as source distributions.
    """

    requirements: list[PipRequirement] = field(default_factory=list)
    constraints: list[PipRequirement] = field(default_factory=list)
    index_url: str | None = field(default=None, repr=False)
    extra_index_urls: list[str] = field(default_factory=list, repr=False)
    find_links: list[str] = field(default_factory=list, repr=False)
    no_index: bool = False
    prereleases: bool = False
    insecure_hosts: list[str] = field(default_factory=list)
    sdists: list[str] = field(default_factory=lambda: list(SDISTS))

    def as_document(self, folder: Path) -> dict[str, object]:
        """The inputs of a lock, without secrets; local folders relative to `folder`."""
        return {
            "requirements": [[r.text, *sorted(r.sha256)] for r in self.requirements],
            "constraints": [r.text for r in self.constraints],
            "index": without_secrets(self.index_url) if self.index_url else None,
            "extra_indexes": [without_secrets(url) for url in self.extra_index_urls],
            "find_links": [
                without_secrets(p) if "://" in p else os.path.relpath(p, folder)
                for p in self.find_links
            ],
            "no_index": self.no_index,
            "prereleases": self.prereleases,
            "sdists": sorted(set(self.sdists)),
        }


def read_pip_section(
    lines: Iterable[tuple[str, Place]], folder: Path, variables: Mapping[str, str]
) -> PipSection:
    """Reads the lines of a pip section.

    Args:
        lines: each with its place.
        folder: of the file, for relative paths.
        variables: for `${NAME}`.

    Raises:
        UsageError: an invalid line, an option that a lock cannot have, a requirements file that
            does not exist.
        PolicyError: an editable install, a local path, a version control system.
    """
    reader = _RequirementsReader(variables)
    for text, place in lines:
        with reader.mistakes, about(place):
            reader.line(text, place, folder)
    reader.mistakes.check(str(folder))
    return reader.section


class _RequirementsReader:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.section, self.mistakes = PipSection(), Mistakes()
        self._open_files: list[Path] = []

    def line(self, text: str, place: Place, folder: Path, *, constraint: bool = False) -> None:
        text = expand(re.sub(r"(^|\s+)#.*$", "", text).strip(), self._variables)
        if not text:
            return
        if text.startswith("-"):
            self._option(text, folder)
        else:
            if not constraint:
                _check_not_ours(_NAME.match(text), text)
            requirement = _requirement(text, place)
            known = self.section.constraints if constraint else self.section.requirements
            known.append(requirement)

    def _option(self, text: str, folder: Path) -> None:
        flag, value = _split_option(text)
        section = self.section
        match flag:
            case "-r" | "--requirement":
                self._file(folder / value, constraint=False)
            case "-c" | "--constraint":
                self._file(folder / value, constraint=True)
            case "-i" | "--index-url":
                section.index_url = value
            case "--extra-index-url":
                section.extra_index_urls.append(value)
            case "-f" | "--find-links":
                section.find_links.append(
                    value if "://" in value else str((folder / value).resolve())
                )
            case "--no-binary" if value.startswith(":"):
                raise PolicyError(
                    f"`--no-binary {value}` would have every package built from source.",
                    "Name those that have no wheel: --no-binary NAME",
                )
            case "--no-binary":
                section.sdists += [canonicalize_name(name) for name in value.split(",") if name]
            case "--no-index":
                section.no_index = True
            case "--pre":
                section.prereleases = True
            case "--trusted-host":
                section.insecure_hosts.append(value)
            case "--only-binary" | "--prefer-binary" | "--require-hashes":
                pass  # always so
            case "-e" | "--editable":
                _check_not_ours(_EGG.search(value), text)
                is_remote = _VCS.match(value)
                raise _cannot_travel(value, _REPOSITORY if is_remote else _EDITABLE)
            case _:
                raise UsageError(
                    f"the option `{flag}` has no effect in a lock.",
                    "Known are -r, -c, --index-url, --extra-index-url, --find-links, --no-index, "
                    "--pre, --trusted-host and --no-binary NAME.",
                )

    def _file(self, path: Path, *, constraint: bool) -> None:
        if path.resolve() in self._open_files:
            raise UsageError(f"{path} includes itself.", "Take one of the two `-r` lines out.")
        try:
            data = path.read_bytes()
            with about(str(path)):
                check_kind(path, data, REQUIREMENTS)
            lines = data.decode("utf-8-sig").splitlines()
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read: {error.strerror}.", "Check the path."
            ) from None
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} cannot be read: not UTF-8 text.", save_as_utf8(path, error.object)
            ) from None
        self._open_files.append(path.resolve())
        pending, first = "", 0
        for number, line in enumerate([*lines, ""], start=1):  # the last line may end in `\`
            first = first if pending else number
            if line.endswith("\\"):
                pending += line[:-1] + " "
                continue
            place = Place(str(path), first)
            with self.mistakes, about(place):
                self.line(pending + line, place, path.parent, constraint=constraint)
            pending = ""
        self._open_files.pop()


def _check_not_ours(name: re.Match[str] | None, text: str) -> None:
    """Refuses airlift itself, from wherever a line takes it (`pip freeze` names a folder).

    Raises:
        UsageError: group 1 of `name` is airlift.
    """
    if name and canonicalize_name(name[1]) in _OURS:
        problem = f"`{without_secrets(text)}`: airlift is always included."
        if name[1] == "airlift":
            problem += " The index has another program of that name."
        raise UsageError(problem, "Remove this line.")


def _split_option(text: str) -> tuple[str, str]:
    """`--flag value`, `--flag=value` or `-rvalue` -> flag, value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"`{text}`: {error}.", "Close the quote.") from None
    flag, equals, value = words[0].partition("=")
    if not flag.startswith("--"):
        flag, equals, value = words[0][:2], "", words[0][2:]
    values = ([value] if value or equals else []) + words[1:]
    wanted = _OPTIONS.get(flag)
    if wanted is not None and len(values) != wanted:
        raise UsageError(
            f"`{without_secrets(text)}`: one option per line, with its value.",
            "Split it into several lines.",
        )
    return flag, values[0] if values else ""


def _requirement(text: str, place: Place) -> PipRequirement:
    match = _PER_REQUIREMENT.search(text)
    text, tail = (text[: match.start()].strip(), text[match.start() :]) if match else (text, "")
    text = _with_name_of_wheel(text)
    if refusal := _refusal(text):
        raise refusal
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        single = re.fullmatch(r"([A-Za-z0-9._-]+)=([^=].*)", text)
        remedy = "Write it in pip's notation: name, name==1.2, name>=1,<2"
        remedy = f"pip wants two: {single[1]}=={single[2]}" if single else remedy
        if (bare := text.strip("'\", ")) != text:
            remedy = f"Omit quotes and commas: {bare}"
        raise UsageError(f"`{text}`: {str(error).splitlines()[0]}.", remedy) from None
    if requirement.url and (refusal := _refusal(requirement.url, direct=True)):
        raise refusal
    return PipRequirement(
        text=str(requirement),
        name=canonicalize_name(requirement.name),
        place=place,
        url=requirement.url,
        sha256=_hashes(tail, text),
    )


def _with_name_of_wheel(text: str) -> str:
    """`https://.../NAME-1.0-py3-none-any.whl` -> `NAME @ https://...`; else the text as it is."""
    address = text.partition(" ")[0]
    if not address.startswith(("https://", "http://")):
        return text
    try:
        name = parse_wheel_filename(unquote(urlsplit(address).path).rpartition("/")[2])[0]
    except (InvalidWheelFilename, ValueError):
        return text
    return f"{name} @ {text}"


def _hashes(tail: str, text: str) -> tuple[str, ...]:
    found = re.findall(r"--hash[= ](\w+):(\S+)", tail)
    if other := _ANYTHING_BUT_HASH.search(tail):
        raise UsageError(f"`{text}`: `{other[0]}` has no effect in a lock.", "Take it out.")
    for algorithm, value in found:
        if algorithm != "sha256" or not is_hex(value, 64):
            raise UsageError(
                f"`{text}`: `--hash {algorithm}:{value}` is not a sha256.",
                "Write --hash=sha256:64 hex digits.",
            )
    return tuple(value for _, value in found)


def _refusal(text: str, *, direct: bool = False) -> StageError | None:
    """Why a requirement, or the URL of a direct one, cannot be locked; None if it can be."""
    if _VCS.match(text):
        return _cannot_travel(text, _REPOSITORY)
    bare = re.match(r"[./~\\]", text) or (
        "://" not in text
        and "@" not in text
        and ("/" in text.partition(";")[0] or text.endswith((".whl", ".tar.gz")))
    )
    if bare or text.startswith("file:"):
        return _cannot_travel(text, "a local path means nothing on another machine")
    if "://" in text.partition("@")[0] and not direct:
        return UsageError(
            f"`{without_secrets(text)}` does not say which package it is.",
            "Write NAME @ URL.",
        )
    return None


def _cannot_travel(what: str, reason: str) -> PolicyError:
    shown = without_secrets(what)
    if shown.endswith(".whl"):
        return PolicyError(
            f"`{shown}` cannot be locked: {reason}.",
            "Name the package and the folder of its wheel: `--find-links FOLDER` and "
            "`NAME==VERSION`.",
        )
    return PolicyError(
        f"`{shown}` cannot be locked: {reason}.",
        f"Make a wheel of it: pip wheel --no-deps {quoted(shown)} -w wheels; and write "
        "instead: `--find-links ./wheels` and `NAME==VERSION`. It is better to omit code that "
        "you still change: `runner exec` runs it beside the environment.",
    )


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
    return sha256_of_bytes(json.dumps(document, sort_keys=True).encode())


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
                raise UsageError(
                    f"{shown} is no package.", "Write `name`, `name=1.2` or a `pip:` section."
                )
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
        raise UsageError(
            "`pip` should be a list of requirements.",
            "Write pip: [torch, transformers]",
            place=place,
        )
    keys = ("dependencies", index, "pip")
    return [(item, lines.place(*keys, number)) for number, item in enumerate(value)]
