"""Finds the Python distributions inside conda packages, which pip must not install a second time.

There is no table of names: each package lists its files, and a distribution has a
`NAME-VERSION.dist-info` (or `.egg-info`) among them. So conda's `pytorch` is found to be pip's
`torch`. Only that list is read from a remote package (range requests). py-rattler runs in a child
process, see `run_and_exit`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import Version

from stage.environment.spec.conda_lock import Package
from stage.errors import IncompleteError, Place, without_secrets
from stage.sandbox import ask_child, last_words, run_and_exit

_METADATA = re.compile(
    r"(?:^|/)site-packages/(?P<name>[^/]+?)-(?P<version>[0-9][^/]*?)"
    r"(?:\.dist-info/METADATA|(?:-py[0-9.]+)?\.egg-info(?:/PKG-INFO)?)$"
)
_AT_ONCE = 16  # requests: an environment has hundreds of packages, and each answer is small


@dataclass(frozen=True)
class Provided:
    """A Python distribution inside a conda package, or of the site's own Python.

    Attributes:
        name: normalised (PEP 503).
        conda: the package's name; empty: it is the site's.
        url: the address to ask for the package, perhaps with a token: kept out of `repr`.
        metadata: path of its METADATA inside the package.
        place: file:line of the profile that names it.
    """

    name: str
    version: str
    conda: str = ""
    url: str = field(default="", repr=False)
    metadata: str = ""
    place: Place | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, in a sentence."""
        if self.conda:
            return f"{self.name} {self.version} (`{self.conda}`) comes from conda."
        found = Version(self.version)
        early = f" By PEP 440 it comes before {found.base_version}." if found.is_prerelease else ""
        return f"{self.name} {self.version} is the site's ({self.place}).{early}"


def provided_by_conda(packages: Iterable[Package], addresses: Mapping[str, str]) -> list[Provided]:
    """The Python distributions in those conda packages that need Python, sorted by name.

    Args:
        addresses: locked URL -> URL to fetch from, where the two differ (see `indexes`).

    Raises:
        IncompleteError: a package cannot be reached.
    """
    wanted = {p.sha256: p for p in packages if {"python", "python_abi"} & p.dependencies.keys()}
    urls = {sha: addresses.get(p.url, p.url) for sha, p in wanted.items()}
    answers = _ask({sha: {"url": url, "read": []} for sha, url in urls.items()})
    found = [
        Provided(canonicalize_name(m["name"]), m["version"], p.name, urls[sha256], path)
        for sha256, answer in answers.items()
        for p, path in ((wanted[sha256], path) for path in answer["paths"])
        if (m := _METADATA.search(path))
    ]
    return sorted(found, key=lambda d: d.name)


def metadata_of(distribution: Provided) -> str:
    """The METADATA of a distribution in a conda package; streams the package up to that file.

    Empty for one of the site.

    Raises:
        IncompleteError: the package cannot be reached.
    """
    if not distribution.conda:
        return ""
    answer = _ask({"one": {"url": distribution.url, "read": [distribution.metadata]}})
    return str(answer["one"]["texts"].get(distribution.metadata) or "")


def _ask(asked: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if not asked:
        return {}
    answer, done = ask_child(__name__, json.dumps(asked))
    if answer is None:
        raise IncompleteError(
            f"Reading conda packages failed: {last_words(done)}", "Run the same command again."
        )
    if problem := answer.get("problem"):
        raise IncompleteError(
            f"{without_secrets(answer['url'])}: its list of files cannot be read: {problem}.",
            "Run the same command again.",
        )
    found: Mapping[str, Any] = answer
    return found


# ---- the child process


async def _answer(asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    import rattler

    client = rattler.Client.default_client()  # it tries again by itself
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(question: Mapping[str, Any]) -> dict[str, Any]:
        async with gate:
            try:
                return await _look(client, question["url"], question["read"])
            except Exception as error:  # noqa: BLE001 - py-rattler raises many kinds
                return {"problem": " ".join(str(error).split()), "url": question["url"]}

    answers = dict(zip(asked, await asyncio.gather(*map(one, asked.values())), strict=True))
    return next((a for a in answers.values() if "problem" in a), answers)


async def _look(client: Any, url: str, read: list[str]) -> dict[str, Any]:
    from rattler.package_streaming import PackageArchive

    parts = urlsplit(url)
    if parts.scheme == "file":
        archive = await PackageArchive.from_path(unquote(parts.path))
    else:
        archive = await PackageArchive.from_url(client, url)
    paths = [str(entry.relative_path) for entry in (await archive.paths_json()).paths]
    texts = await archive.read_files(read) if read else {}
    decoded = {path: t.decode("utf-8", "replace") for path, t in texts.items() if t is not None}
    return {"paths": sorted(path for path in paths if _METADATA.search(path)), "texts": decoded}


if __name__ == "__main__":
    run_and_exit(lambda: print(json.dumps(asyncio.run(_answer(json.load(sys.stdin))))))
