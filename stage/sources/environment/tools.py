"""The tools that travel with an environment, for its other routes: py-rattler and installer, and a static uv.

Found by uv in the user's own index, for the cluster's platform, in the versions that are installed here: those that
make the image make the same environment of the packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stage.environment.pipsection import PipSection
from stage.environment.profile import MACHINES
from stage.errors import IncompleteError, UsageError
from stage.progress import Reporter
from stage.sources.environment.indexes import choose_indexes
from stage.sources.environment.uv import uv_environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST_PYTHON = "3.10"  # what airlift itself needs, and so what runs the tools on the cluster


@dataclass(frozen=True)
class Tool:
    """A wheel that travels: its file name, address and sha256."""

    file: str
    url: str
    sha256: str


def lock_tools(platform: str, reporter: Reporter) -> list[Tool]:
    """Finds the tools for a platform.

    Raises:
        UsageError: one of them is not installed here.
        IncompleteError: the index cannot be reached or does not have them.
    """
    machine = MACHINES[platform]
    reporter.detail("looking up the tools that travel along: py-rattler, installer, uv")
    linkers = _lock(["py-rattler", "installer"], f"{machine}-manylinux2014")
    return [*linkers, *_lock(["uv"], f"{machine}-unknown-linux-musl")]


def uv() -> str:
    """The uv that is installed with airlift's `env` extra.

    Raises:
        UsageError: it is not.
    """
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise UsageError("uv is not installed here.", "pip install 'airlift[env]'") from None


def index_options() -> list[str]:
    """uv's options for the index the user has set up, for uv or for pip."""
    return [word for line in choose_indexes(PipSection(), os.environ).lines for word in line.split(" ", 1)]


def _lock(names: list[str], platform: str) -> list[Tool]:
    with tempfile.TemporaryDirectory(prefix="airlift-tools-") as folder:
        wanted, found = Path(folder, "tools.in"), Path(folder, "pylock.toml")
        wanted.write_text("".join(f"{name}=={_version(name)}\n" for name in names), encoding="utf-8")
        command = [uv(), "pip", "compile", "--quiet", "--no-config", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", OLDEST_PYTHON, "--python-platform", platform, *index_options()]
        command += ["--format", "pylock.toml", "--output-file", str(found), str(wanted)]
        done = subprocess.run(command, capture_output=True, env=uv_environment(os.environ))
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise IncompleteError(
                f"The tools that travel with an environment ({', '.join(names)}) were not found: {' / '.join(words)}",
                "Look whether the index has them and can be reached.",
            )
        document = tomllib.loads(found.read_text(encoding="utf-8"))
    return [_tool(package["name"], package.get("wheels", []), found.parent) for package in document["packages"]]


def _tool(name: str, wheels: list[dict[str, object]], folder: Path) -> Tool:
    if not wheels:
        raise IncompleteError(f"{name}: the index has no wheel of it for the cluster's platform.", "Use another index.")
    wheel = wheels[0]
    url = str(wheel["url"]) if "url" in wheel else (folder / str(wheel["path"])).resolve().as_uri()
    hashes = wheel["hashes"]
    assert isinstance(hashes, dict)
    return Tool(unquote(urlsplit(url).path.rpartition("/")[2]), url, str(hashes["sha256"]))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise UsageError(f"{name} is not installed here.", "pip install 'airlift[env]'") from None
