"""A `conda` for a user without one: py-rattler answers the few calls that conda-lock makes.

    --version | info --json
    create --dry-run --json [--override-channels] --channel C... --prefix P SPEC...   solve
    create --file EXPLICIT --yes --prefix P                         install the solved packages
    run --prefix P pip ...                                          in the installed environment
    matches < [[SPEC, NAME, VERSION, BUILD]...]                     airlift's: whether each matches

The target platform and the virtual packages are in conda's variables, CONDA_SUBDIR and
CONDA_OVERRIDE_*; the URLs of packages to keep where possible in the file AIRLIFT_LOCKED. It is
always a child process: py-rattler's runtime may crash while the interpreter shuts down, so the
process ends by os._exit.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from stage.environment.spec.urls import without_secrets

LOCKED = "AIRLIFT_LOCKED"
KERNEL, MACOS = "4.18", "11.0"  # conda-lock's defaults
DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")


@dataclass
class _Call:
    """A command line of conda, the parts that are used here."""

    command: str
    channels: list[str] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    prefix: str = ""
    file: str = ""

    @staticmethod
    def parse(arguments: list[str]) -> _Call:
        call = _Call(arguments[0])
        rest = iter(arguments[1:])
        for argument in rest:
            if argument in ("--channel", "-c"):
                call.channels.append(next(rest))
            elif argument in ("--prefix", "-p"):
                call.prefix = next(rest)
            elif argument == "--file":
                call.file = next(rest)
            elif argument.startswith("-"):
                call.flags.add(argument)
            else:
                call.specs.append(argument)
        return call


def main(arguments: list[str]) -> int:
    """Answers one call; returns the exit status."""
    if arguments[:1] == ["--version"]:
        print("conda 24.11.0")  # conda-lock makes the calls above to this version
        return 0
    call = _Call.parse(arguments)
    match call.command:
        case "info":
            print(json.dumps({"pkgs_dirs": [os.environ.get("CONDA_PKGS_DIRS", "")]}))
        case "create" if call.file:
            return asyncio.run(_install(call))
        case "create" if "--dry-run" in call.flags:
            return asyncio.run(_solve(call))
        case "matches":
            print(json.dumps(_matches(json.load(sys.stdin))))
        case "run":
            module = arguments[arguments.index(call.prefix) + 1 :]
            return subprocess.call([f"{call.prefix}/bin/python", "-I", "-m", *module])
        case _:
            print(f"not supported here: conda {' '.join(arguments)}", file=sys.stderr)
            return 2
    return 0


async def _solve(call: _Call) -> int:
    import rattler

    platform = os.environ["CONDA_SUBDIR"]
    # Not conda-lock's channel of virtual packages: they come from environment variables here.
    named = [c for c in call.channels if "conda-lock-fake-repodata" not in c]
    channels = [
        rattler.Channel(url) for c in named for url in (DEFAULTS if c == "defaults" else (c,))
    ]
    gateway = rattler.Gateway()
    try:
        records = await rattler.solve(
            sources=channels,
            specs=[exact(spec) for spec in call.specs],
            platforms=[rattler.Subdir(platform), rattler.Subdir("noarch")],
            virtual_packages=_virtual_packages(platform),
            gateway=gateway,
            locked_packages=await _still_there(gateway, channels, platform),
        )
    except Exception as error:  # noqa: BLE001 - py-rattler raises many kinds; the caller prints them
        print(json.dumps({"success": False, "error": type(error).__name__, "message": str(error)}))
        return 1
    found = [_action(record) for record in records]
    actions = {"FETCH": found, "LINK": found, "PREFIX": call.prefix}
    print(json.dumps({"success": True, "actions": actions}))
    return 0


def exact(spec: str) -> str:
    """`name 1.2.3 build`, which conda reads as exactly that version, in py-rattler's spelling.

    >>> exact("python 3.11.7 h0_0"), exact("python 3.11.*"), exact("python >=3.11")
    ('python ==3.11.7 h0_0', 'python 3.11.*', 'python >=3.11')
    """
    return re.sub(r"^(\S+) (\w[\w.!+-]*)(?= |$)", r"\1 ==\2", spec)


async def _still_there(gateway: Any, channels: list[Any], platform: str) -> list[Any]:
    """The channels' records of the packages to keep; a package that no channel has is dropped."""
    path = os.environ.get(LOCKED)
    urls = set(json.loads(Path(path).read_text())) if path else set()
    if not urls:
        return []
    files = {unquote(urlsplit(url).path).rpartition("/")[2] for url in urls}
    names = sorted({file.rsplit("-", 2)[0] for file in files})
    found = await gateway.query(channels, [platform, "noarch"], names, recursive=False)
    # URLs of a private channel's records have its token or password; those of a lock do not.
    return [r for records in found for r in records if without_secrets(r.url) in urls]


def _matches(questions: list[list[str]]) -> list[bool]:
    import rattler
    from rattler.package import BuildString

    return [
        rattler.MatchSpec(spec).matches(
            rattler.PackageRecord(name, version, BuildString(build), 0, "linux-64")
        )
        for spec, name, version, build in questions
    ]


def _virtual_packages(platform: str) -> list[Any]:
    import rattler
    from rattler.package import BuildString

    def virtual(name: str, version: str, build: str = "0") -> Any:
        return rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), BuildString(build)
        )

    def asked(name: str) -> str | None:
        return os.environ.get(f"CONDA_OVERRIDE_{name}")

    packages = [virtual("__unix", "0")]
    if platform.startswith("osx"):
        packages.append(virtual("__osx", asked("OSX") or MACOS))
    else:
        packages.append(virtual("__linux", asked("LINUX") or KERNEL))
    for name in ("GLIBC", "CUDA"):
        packages += [virtual(f"__{name.lower()}", version)] if (version := asked(name)) else []
    if machine := asked("ARCHSPEC"):
        packages.append(virtual("__archspec", "1", machine))
    return packages


def _action(record: Any) -> dict[str, Any]:
    """A record in the form of conda's `--json`, with the sha256, which conda does not print."""
    document: dict[str, Any] = json.loads(record.to_json())
    return {
        **document,
        "url": record.url,
        "fn": record.file_name,
        "channel": record.url.rpartition("/")[0],
        "base_url": record.url.rsplit("/", 2)[0],
        "platform": record.subdir,
        "dist_name": f"{document['name']}-{document['version']}-{document['build']}",
        "md5": record.md5.hex() if record.md5 else None,
        "sha256": record.sha256.hex() if record.sha256 else None,
    }


async def _install(call: _Call) -> int:
    """Installs an explicit list (`url#digest` per line); compares each package with its digest."""
    import rattler
    from rattler.package_streaming import download_to_path

    client = rattler.Client.default_client()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for line in _explicit(Path(call.file)):
            url, _, digest = line.partition("#")
            parts = urlsplit(url)
            path = Path(unquote(parts.path))
            if parts.scheme != "file":
                path = Path(folder) / path.name
                await download_to_path(client, url, path)
            # conda-lock writes md5 into explicit lists; every installer of such a list compares it.
            algorithm = "md5" if len(digest) == 32 else "sha256"
            found = hashlib.new(algorithm, path.read_bytes(), usedforsecurity=False).hexdigest()
            if found != digest:
                problem = f"{url}: digest {found}, the lock says {digest or 'nothing'}"
                print(problem, file=sys.stderr)
                return 1
            record = await rattler.RepoDataRecord.from_package_archive(path)
            record.url, record.channel = url, url.rsplit("/", 2)[0]
            records.append(record)
        cache, subdir = os.environ.get("CONDA_PKGS_DIRS"), os.environ.get("CONDA_SUBDIR")
        await rattler.install(
            records,
            call.prefix,
            cache_dir=Path(cache) if cache else None,
            platform=rattler.Subdir(subdir or str(rattler.Subdir.current())),
            show_progress=False,
            execute_link_scripts=False,
        )
    return 0


def _explicit(path: Path) -> Iterable[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith(("#", "@"))]


def run_and_exit(child: Callable[[], int]) -> NoReturn:
    """Runs the work of a child process and ends at once, with the status that it returns.

    py-rattler's runtime is not shut down.
    """
    status = 1
    try:
        status = child()
    except Exception:  # noqa: BLE001 - the parent process reads the traceback
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
