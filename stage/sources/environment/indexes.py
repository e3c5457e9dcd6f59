"""Where the pip half comes from: what the spec says, on top of what this machine's uv or pip is set up for.

A laptop behind a mirror has it in pip's configuration, which uv does not read; so we do, by asking pip. Folders of this
machine that pip is set up for are left out: a lock should be good on any machine. A spec may name one itself.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stage.environment.addresses import without_secrets
from stage.environment.pipsection import PipSection

_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")
_ENTRY = re.compile(r"^(global|install|:env:)\.([\w-]+)=(.*)$")


@dataclass(frozen=True)
class Indexes:
    """Options for uv's requirements file, and where they are from.

    Attributes:
        lines: `--index-url ...` and so on, perhaps with secrets: kept out of `repr`.
        constraints: files.
        origin: for the user, without secrets; None: nothing to tell.
    """

    lines: tuple[str, ...] = field(default=(), repr=False)
    constraints: tuple[str, ...] = ()
    origin: str | None = None


def choose_indexes(section: PipSection, environment: Mapping[str, str]) -> Indexes:
    """Puts together the indexes of the pip half, as pip would for a requirements file."""
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
    named = [name for name in _UV_VARIABLES if environment.get(name)]
    if named:
        return {}, f"uv's own settings ({', '.join(named)})"
    if file := _uv_file(environment):
        return {}, f"uv's own settings ({file})"
    found = _pip_configuration(environment)
    kept: dict[str, str] = {}
    left_out: list[str] = []
    for key in ("index-url", "extra-index-url", "find-links", "constraint"):
        words = found.get(key, "").split()
        if key in ("extra-index-url", "find-links"):
            left_out += [word for word in words if _is_local(word)]
            words = [word for word in words if not _is_local(word)]
        if words:
            kept[key] = " ".join(words)
    shown = [f"{key} {' '.join(map(without_secrets, value.split()))}" for key, value in kept.items()]
    if left_out:
        shown.append(f"{'but ' if shown else ''}not its folders of this machine ({', '.join(left_out)})")
    return kept, f"pip's configuration: {', '.join(shown)}" if shown else None


def _is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file:")


def _uv_file(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    for path in (Path(home) / "uv" / "uv.toml", Path("/etc/uv/uv.toml")):
        if path.is_file() and re.search(r"index|find-links", path.read_text(encoding="utf-8", errors="replace")):
            return path
    return None


def _pip_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """pip's settings for `pip install`, by key; empty where this Python has no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    by_scope: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        if match := _ENTRY.match(line):
            by_scope[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {**by_scope["global"], **by_scope["install"], **by_scope[":env:"]}
