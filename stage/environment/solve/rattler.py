"""A `conda` for a user without one: py-rattler answers the few calls that `conda-lock lock` makes.

    --version | info --json
    create --dry-run --json [--override-channels] --channel C... --prefix P SPEC...   solve
    matches < [[SPEC, NAME, VERSION, BUILD]...]                     airlift's: whether each matches
    join < [[SPEC...]...]             airlift's: [one spec for each list, why there is none] of each
    contents < [[URL, FILE...]...]    airlift's: the distributions in each package, and those files

The target platform and the virtual packages are in conda's variables, CONDA_SUBDIR and
CONDA_OVERRIDE_*. It is always a child process, see `run_and_exit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

import rattler
from rattler.package import BuildString
from rattler.package_streaming import PackageArchive

from stage.sandbox import run_and_exit

KERNEL = "4.18"  # conda-lock's default
DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_METADATA = re.compile(
    r"(?:^|/)site-packages/(?P<name>[^/]+?)-(?P<version>[0-9][^/]*?)"
    r"(?:\.dist-info/METADATA|(?:-py[0-9.]+)?\.egg-info(?:/PKG-INFO)?)$"
)
_AT_ONCE = 16  # requests: an environment has hundreds of packages, and each answer is small


def main(arguments: list[str]) -> int:
    """Answers one call; returns the exit status."""
    if arguments == ["--version"]:
        print("conda 24.11.0")  # conda-lock makes the calls above to this version
        return 0
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=("info", "create", *_ANSWERS))
    parser.add_argument("--channel", "-c", action="append", default=[], dest="channels")
    parser.add_argument("--prefix", "-p", default="")
    call, rest = parser.parse_known_args(arguments)
    if call.command == "create":
        specs = [word for word in rest if not word.startswith("-")]
        return asyncio.run(_solve(call.channels, specs, call.prefix))
    if call.command == "info":
        print(json.dumps({"pkgs_dirs": [os.environ.get("CONDA_PKGS_DIRS", "")]}))
    else:
        print(json.dumps(_ANSWERS[call.command](json.load(sys.stdin))))
    return 0


async def _solve(named: list[str], specs: list[str], prefix: str) -> int:
    platform = os.environ["CONDA_SUBDIR"]
    # Not conda-lock's channel of virtual packages: they come from environment variables here.
    named = [name for name in named if "conda-lock-fake-repodata" not in name]
    channels = [url for name in named for url in (DEFAULTS if name == "defaults" else (name,))]
    try:
        records = await rattler.solve(
            sources=[rattler.Channel(url) for url in channels],
            specs=[exact(spec) for spec in specs],
            platforms=[rattler.Subdir(platform), rattler.Subdir("noarch")],
            virtual_packages=_virtual_packages(),
            gateway=rattler.Gateway(),
        )
    except Exception as error:  # noqa: BLE001 - py-rattler raises many kinds; the caller prints them
        print(json.dumps({"success": False, "error": type(error).__name__, "message": str(error)}))
        return 1
    found = [_action(record) for record in records]
    actions = {"FETCH": found, "LINK": found, "PREFIX": prefix}
    print(json.dumps({"success": True, "actions": actions}))
    return 0


def exact(spec: str) -> str:
    """`name 1.2.3 build`, which conda reads as exactly that version, in py-rattler's spelling.

    >>> exact("python 3.11.7 h0_0"), exact("python 3.11.*"), exact("python >=3.11")
    ('python ==3.11.7 h0_0', 'python 3.11.*', 'python >=3.11')
    """
    return re.sub(r"^(\S+) (\w[\w.!+-]*)(?= |$)", r"\1 ==\2", spec)


def _matches(questions: list[list[str]]) -> list[bool]:
    def matches(spec: str, name: str, version: str, build: str) -> bool:
        record = rattler.PackageRecord(name, version, BuildString(build), 0, "linux-64")
        try:
            return rattler.MatchSpec(spec).matches(record)
        except Exception:  # noqa: BLE001 - of many kinds: no spec. The solver says so
            return False

    return [matches(*question) for question in questions]


def _join(several: list[list[str]]) -> list[list[str]]:
    # conda's own rule, which conda-lock has for the dependencies of packages. It is private there
    # (`_vendor`): pyproject.toml keeps conda-lock below 5, and test_env_lock.py joins two specs.
    from conda_lock._vendor.conda.models import match_spec

    spec_class: Any = match_spec.MatchSpec
    answers = []
    for specs in several:
        try:
            (joined,) = spec_class.merge([spec_class(spec) for spec in specs])
            answers.append([str(joined), ""])
        except Exception as error:  # noqa: BLE001 - conda raises many kinds
            answers.append(["", " ".join(str(error).split())])
    return answers


def _contents(questions: list[list[str]]) -> list[dict[str, Any]]:
    async def answer() -> list[dict[str, Any]]:
        client = rattler.Client.default_client()  # it tries again by itself
        gate = asyncio.Semaphore(_AT_ONCE)
        return await asyncio.gather(*(_look(client, gate, *question) for question in questions))

    return asyncio.run(answer())


async def _look(client: Any, gate: asyncio.Semaphore, url: str, *read: str) -> dict[str, Any]:
    parts = urlsplit(url)
    async with gate:
        try:
            if parts.scheme == "file":
                archive = await PackageArchive.from_path(unquote(parts.path))
            else:
                archive = await PackageArchive.from_url(client, url)
            paths = sorted(str(entry.relative_path) for entry in (await archive.paths_json()).paths)
            texts = await archive.read_files(list(read)) if read else {}
        except Exception as error:  # noqa: BLE001 - py-rattler raises many kinds
            return {"problem": " ".join(str(error).split())}
    found = [m for path in paths if (m := _METADATA.search(path))]
    return {
        "distributions": [[m.string, m["name"], m["version"]] for m in found],
        "texts": {path: t.decode("utf-8", "replace") for path, t in texts.items() if t is not None},
    }


_ANSWERS = {"matches": _matches, "join": _join, "contents": _contents}


def _virtual_packages() -> list[Any]:
    def virtual(name: str, version: str, build: str = "0") -> Any:
        return rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), BuildString(build)
        )

    def asked(name: str) -> str | None:
        return os.environ.get(f"CONDA_OVERRIDE_{name}")

    packages = [virtual("__unix", "0"), virtual("__linux", asked("LINUX") or KERNEL)]
    for name in ("GLIBC", "CUDA"):
        if version := asked(name):
            packages.append(virtual(f"__{name.lower()}", version))
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


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
