"""A `conda` for who has none: the few calls conda-lock makes of it, answered by py-rattler.

    --version | info --json
    create --dry-run --json [--override-channels] --channel C... --prefix P SPEC...     solve
    create --file EXPLICIT --yes --prefix P                                             install what was solved
    run --prefix P pip ...                                                              in what was installed
    matches < [[SPEC, NAME, VERSION, BUILD]...]                                         ours: which of them do

Target platform and virtual packages come as conda takes them, in CONDA_SUBDIR and CONDA_OVERRIDE_*; packages to keep
where that is possible as addresses in the file AIRLIFT_LOCKED. Always a process of its own: py-rattler's runtime may
crash while the interpreter goes down, so the process ends without going down.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from stage.environment.addresses import without_secrets

LOCKED = "AIRLIFT_LOCKED"
KERNEL, MACOS = "4.18", "11.0"  # what conda-lock assumes where nobody says
DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")


@dataclass
class _Call:
    """A command line of conda's, as far as it is known here."""

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
        for word in rest:
            if word in ("--channel", "-c"):
                call.channels.append(next(rest))
            elif word in ("--prefix", "-p"):
                call.prefix = next(rest)
            elif word == "--file":
                call.file = next(rest)
            elif word.startswith("-"):
                call.flags.add(word)
            else:
                call.specs.append(word)
        return call


def main(arguments: list[str]) -> int:
    """Answers one call; returns the exit status."""
    if arguments[:1] == ["--version"]:
        print("conda 24.11.0")  # conda-lock reads it; the calls above are those it makes of this version
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
            python = Path(call.prefix, "bin", "python")
            return subprocess.call([str(python), "-m", *arguments[arguments.index(call.prefix) + 1 :]])
        case _:
            print(f"not known here: conda {' '.join(arguments)}", file=sys.stderr)
            return 2
    return 0


async def _solve(call: _Call) -> int:
    import rattler
    from rattler.exceptions import SolverError

    platform = os.environ["CONDA_SUBDIR"]
    # conda-lock's own channel of virtual packages: they come from the environment here.
    named = [c for c in call.channels if "conda-lock-fake-repodata" not in c]
    channels = [rattler.Channel(url) for c in named for url in (DEFAULTS if c == "defaults" else (c,))]
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
    except SolverError as error:
        print(json.dumps({"success": False, "error": "SolverError", "message": str(error)}))
        return 1
    except Exception as error:  # noqa: BLE001 - py-rattler raises many kinds; the caller tells them to the user
        print(json.dumps({"success": False, "error": type(error).__name__, "message": str(error)}))
        return 1
    actions = [_action(record) for record in records]
    print(json.dumps({"success": True, "actions": {"FETCH": actions, "LINK": actions, "PREFIX": call.prefix}}))
    return 0


def exact(spec: str) -> str:
    """`name 1.2.3 build`, which conda reads as that very version, as py-rattler spells it.

    >>> exact("python 3.11.7 h0_0"), exact("python 3.11.*"), exact("python >=3.11")
    ('python ==3.11.7 h0_0', 'python 3.11.*', 'python >=3.11')
    """
    return re.sub(r"^(\S+) (\w[\w.!+-]*)(?= |$)", r"\1 ==\2", spec)


async def _still_there(gateway: Any, channels: list[Any], platform: str) -> list[Any]:
    """The channels' records of the packages to keep; what a channel no longer has is not kept."""
    if LOCKED not in os.environ:
        return []
    urls = set(json.loads(Path(os.environ[LOCKED]).read_text()))
    names = sorted({unquote(urlsplit(url).path).rpartition("/")[2].rsplit("-", 2)[0] for url in urls})
    found = await gateway.query(channels, [platform, "noarch"], names, recursive=False) if names else []
    # A lock has addresses without a token or a password; a private channel's records have them with.
    return [record for records in found for record in records if without_secrets(record.url) in urls]


def _matches(questions: list[list[str]]) -> list[bool]:
    import rattler
    from rattler.package import BuildString

    return [
        rattler.MatchSpec(spec).matches(rattler.PackageRecord(name, version, BuildString(build), 0, "linux-64"))
        for spec, name, version, build in questions
    ]


def _virtual_packages(platform: str) -> list[Any]:
    import rattler
    from rattler.package import BuildString

    def virtual(name: str, version: str, build: str = "0") -> Any:
        return rattler.GenericVirtualPackage(rattler.PackageName(name), rattler.Version(version), BuildString(build))

    def asked(name: str) -> str | None:
        return os.environ.get(f"CONDA_OVERRIDE_{name}")

    packages = [virtual("__unix", "0")]
    if platform.startswith("osx"):
        packages.append(virtual("__osx", asked("OSX") or MACOS))
    else:
        packages.append(virtual("__linux", asked("LINUX") or KERNEL))
    packages += [virtual(f"__{name.lower()}", version) for name in ("GLIBC", "CUDA") if (version := asked(name))]
    if machine := asked("ARCHSPEC"):
        packages.append(virtual("__archspec", "1", machine))
    return packages


def _action(record: Any) -> dict[str, Any]:
    """A record as conda's `--json` has it, with the sha256 that conda leaves to the repodata."""
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
    """Installs an explicit list (`url#digest` a line), each package checked against its digest."""
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
            # conda-lock writes md5 into explicit lists; it is compared as any installer of such a list would.
            algorithm = "md5" if len(digest) == 32 else "sha256"
            found = hashlib.new(algorithm, path.read_bytes(), usedforsecurity=False).hexdigest()
            if found != digest:
                print(f"{url}: digest {found}, the lock says {digest or 'nothing'}", file=sys.stderr)
                return 1
            record = await rattler.RepoDataRecord.from_package_archive(path)
            record.url, record.channel = url, url.rsplit("/", 2)[0]
            records.append(record)
        await rattler.install(
            records,
            call.prefix,
            cache_dir=Path(os.environ["CONDA_PKGS_DIRS"]) if "CONDA_PKGS_DIRS" in os.environ else None,
            platform=rattler.Subdir(os.environ.get("CONDA_SUBDIR") or str(rattler.Subdir.current())),
            show_progress=False,
            execute_link_scripts=False,
        )
    return 0


def _explicit(path: Path) -> Iterable[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith(("#", "@"))]


def leave(code: int) -> NoReturn:
    """Ends the process at once: nothing of py-rattler's runtime is torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run() -> NoReturn:
    status = 1
    try:
        status = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 - told to whoever called; then the end, in either case
        traceback.print_exc()
    leave(status)


if __name__ == "__main__":
    _run()
