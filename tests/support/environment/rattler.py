"""py-rattler in its own process, for tests: solve specs against a channel and install the result.

Its runtime may crash when the interpreter exits normally, so the child process exits at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_CODE = """\
import asyncio, json, os, sys
import rattler
from rattler.exceptions import SolverError
from rattler.package import BuildString

async def main(asked):
    virtual = []
    for name, value in asked["virtual"].items():
        version, _, build = value.partition(" ")
        identity = rattler.PackageName(name), rattler.Version(version), BuildString(build or "0")
        virtual.append(rattler.GenericVirtualPackage(*identity))
    records = await rattler.solve(
        sources=[rattler.Channel(asked["channel"])],
        specs=asked["specs"],
        platforms=["linux-64", "noarch"],
        virtual_packages=virtual,
        gateway=rattler.Gateway(cache_dir=asked["cache"]),
    )
    if asked["prefix"]:
        await rattler.install(
            records, asked["prefix"], cache_dir=asked["cache"], platform=rattler.Subdir("linux-64"),
            show_progress=False, execute_link_scripts=False,
        )
    return sorted(f"{r.name.normalized}-{r.version}-{r.build}" for r in records)

asked = json.loads(sys.argv[1])
try:
    print(json.dumps({"packages": asyncio.run(main(asked))}), flush=True)
except SolverError as error:
    print(json.dumps({"conflict": str(error)}), flush=True)
os._exit(0)
"""


class ConflictError(Exception):
    """There is no solution; the message says why."""


def solve(
    channel: Path,
    specs: Sequence[str],
    virtual: Mapping[str, str],
    cache: Path,
    prefix: Path | None = None,
) -> list[str]:
    """`name-version-build` of each package of the solution; installs them if `prefix` is given.

    Raises:
        ConflictError: there is no solution.
    """
    asked = {
        "channel": channel.as_uri(),
        "specs": list(specs),
        "virtual": dict(virtual),
        "cache": str(cache),
        "prefix": prefix and str(prefix),
    }
    command = [sys.executable, "-c", _CODE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "conflict" in answer:
        raise ConflictError(answer["conflict"])
    packages: list[str] = answer["packages"]
    return packages
