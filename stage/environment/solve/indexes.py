"""The indexes of the pip half: those of the spec, and those that this machine's uv or pip has.

A laptop behind a mirror has it in pip's configuration. uv does not read that, so `pip config list`
is run here. Local folders in pip's configuration are ignored: a lock should work on every machine.
A spec may name one.

Also the URLs to fetch from. A lock has no secrets; those of private channels and indexes are put
back from `environment.yml` (best as `${NAME}`) or from pip's configuration.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from stage.download.http import origin_of
from stage.environment.spec.environment_yml import EnvironmentSpec, PipSection, userinfo
from stage.errors import without_secrets
from stage.sandbox import isolated

_UV_VARIABLES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_NO_INDEX",
)
_ENTRY = re.compile(r"^(global|install|:env:)\.([\w-]+)=(.*)$")


@dataclass(frozen=True)
class Indexes:
    """Options for uv's requirements file, and their origin.

    Attributes:
        lines: `--index-url ...` and so on, perhaps with secrets: kept out of `repr`.
        constraints: paths of files.
        origin: for the user, without secrets; None: nothing to print.
    """

    lines: tuple[str, ...] = field(default=(), repr=False)
    constraints: tuple[str, ...] = ()
    origin: str | None = None


def index_names(indexes: Indexes) -> set[str]:
    """The last part of each index's address. PyTorch's own, and mirrors of them, end in a build.

    >>> index_names(Indexes(("--extra-index-url https://download.pytorch.org/whl/cu118/",)))
    {'cu118'}
    """
    lines = [*indexes.lines, *(os.environ.get(name, "") for name in _UV_VARIABLES)]
    words = [word for line in lines for word in line.split() if "/" in word]
    return {word.rstrip("/").rpartition("/")[2] for word in words}


def choose_indexes(section: PipSection, environment: Mapping[str, str]) -> Indexes:
    """Joins the indexes of the spec and of this machine, like pip does for a requirements file."""
    configured, origin = _configured(environment) if not section.no_index else ({}, None)
    lines = []
    if section.no_index:
        lines.append("--no-index")
    elif index := section.index_url or configured.get("index-url"):
        lines.append(f"--index-url {index}")
    extra = (*section.extra_index_urls, *configured.get("extra-index-url", "").split())
    links = (*section.find_links, *configured.get("find-links", "").split())
    lines += [f"--extra-index-url {url}" for url in extra]
    lines += [f"--find-links {place}" for place in links]
    return Indexes(tuple(lines), tuple(configured.get("constraint", "").split()), origin)


def _configured(environment: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The settings of this machine's pip, and the line to print; uv has its own if it is set.

    Folders of this machine are left out.
    """
    own = [name for name in _UV_VARIABLES if environment.get(name)] or _uv_files(environment)
    if own:
        return {}, f"uv's own settings ({', '.join(own)})"
    found = _pip_configuration(environment)
    kept: dict[str, str] = {}
    ignored: list[str] = []
    for key in ("index-url", "extra-index-url", "find-links", "constraint"):
        values = found.get(key, "").split()
        if key in ("extra-index-url", "find-links"):
            ignored += filter(_is_local, values)
            values = [value for value in values if not _is_local(value)]
        if values:
            kept[key] = " ".join(values)
    shown = [f"{key} {' '.join(map(without_secrets, v.split()))}" for key, v in kept.items()]
    if ignored:
        shown.append(f"without its folders of this machine ({', '.join(ignored)})")
    return kept, f"pip's configuration: {', '.join(shown)}" if shown else None


def _is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file:")


def _uv_files(environment: Mapping[str, str]) -> list[str]:
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    files = [path for path in (Path(home, "uv/uv.toml"), Path("/etc/uv/uv.toml")) if path.is_file()]
    texts = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in files}
    return [path for path, text in texts.items() if re.search(r"index|find-links", text)][:1]


def _pip_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """pip's settings for `pip install`, by key; empty where this Python has no pip."""
    command = isolated("pip", "config", "list")
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    by_scope: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        if match := _ENTRY.match(line):
            by_scope[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {**by_scope["global"], **by_scope["install"], **by_scope[":env:"]}


def private_address(url: str, spec_path: Path) -> tuple[str, str | None]:
    """The URL to fetch a package from, perhaps with a channel's token in it, and `user:password`.

    It is the locked one if the environment file is not here. Never to be shown.

    Raises:
        UsageError: the file cannot be read, or names a variable that is not set.
    """
    known = _read(spec_path)
    if known is None:
        return url, None
    asked = address_to_ask(url, *known)
    login, parts = userinfo(asked), urlsplit(asked)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return bare, unquote(login) if login else None


@lru_cache
def _read(spec_path: Path) -> tuple[EnvironmentSpec, Indexes] | None:
    if not spec_path.is_file():
        return None
    spec = EnvironmentSpec.load(spec_path)
    return spec, choose_indexes(spec.pip, os.environ)


def address_to_ask(url: str, spec: EnvironmentSpec, indexes: Indexes) -> str:
    """The URL to fetch a locked package from, with the token or password of its channel or index.

    A password goes only to the scheme, host and port that it was written for.
    """
    for channel in spec.channels:
        clean = without_secrets(channel).rstrip("/")
        if clean != channel.rstrip("/") and url.startswith(f"{clean}/"):
            return channel.rstrip("/") + url.removeprefix(clean)
    parts = urlsplit(url)
    for index in (line.partition(" ")[2] for line in indexes.lines if "://" in line):
        login = userinfo(index)
        if login and origin_of(index) == origin_of(url):
            netloc = f"{login}@{parts.netloc}"
            return urlunsplit((parts.scheme, netloc, parts.path, parts.query, ""))
    return url
