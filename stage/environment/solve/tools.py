"""The tools that travel with an environment: py-rattler, installer and a static uv.

uv finds them in the user's index, for the cluster's platform, in the versions that are installed
here. So the packages give the same environment there as the image that is built here.
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

from stage.environment.solve.indexes import choose_indexes
from stage.environment.solve.uv import find_uv, uv_environment
from stage.environment.spec.pip_section import PipSection
from stage.environment.spec.profile import MACHINES
from stage.errors import IncompleteError, UsageError
from stage.installation import install_command
from stage.util.progress import Reporter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST_PYTHON = "3.10"  # airlift needs it, so the tools run with this or a newer one on the cluster


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


def index_options() -> list[str]:
    """uv's options for the index that the user has configured for uv or pip."""
    lines = choose_indexes(PipSection(), os.environ).lines
    return [part for line in lines for part in line.split(" ", 1)]


def _lock(names: list[str], platform: str) -> list[Tool]:
    with tempfile.TemporaryDirectory(prefix="airlift-tools-") as folder:
        wanted, found = Path(folder, "tools.in"), Path(folder, "pylock.toml")
        wanted.write_text("".join(f"{name}=={_version(name)}\n" for name in names))
        command = [find_uv(), "pip", "compile", "--quiet", "--no-config", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", OLDEST_PYTHON]
        command += ["--python-platform", platform, *index_options()]
        command += ["--format", "pylock.toml", "--output-file", str(found), str(wanted)]
        done = subprocess.run(command, capture_output=True, env=uv_environment(os.environ))
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise IncompleteError(
                f"The tools that travel with an environment ({', '.join(names)}) were not found: "
                f"{' / '.join(last)}",
                "Check that the index has them and can be reached.",
            )
        packages = tomllib.loads(found.read_text(encoding="utf-8"))["packages"]
    return [_tool(p["name"], p.get("wheels", []), found.parent) for p in packages]


def _tool(name: str, wheels: list[dict[str, object]], folder: Path) -> Tool:
    if not wheels:
        raise IncompleteError(
            f"{name}: the index has no wheel for the cluster's platform.", "Use another index."
        )
    wheel = wheels[0]
    url = str(wheel["url"]) if "url" in wheel else (folder / str(wheel["path"])).resolve().as_uri()
    hashes = wheel["hashes"]
    assert isinstance(hashes, dict)
    return Tool(unquote(urlsplit(url).path.rpartition("/")[2]), url, str(hashes["sha256"]))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise UsageError(f"{name} is not installed here.", install_command("env")) from None
