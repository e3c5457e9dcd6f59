"""Writes the files of an environment's asset that are not downloaded, from its lock and packages.

    wheels/                     built from sdists (`stage.environment.solve.sdists`), and airlift's
    image.tar.gz                the environment, with a placeholder for its prefix
    env.json                    its description
    bootstrap.sh                creates the environment; it needs nothing installed
    env-check.sh env-probe.sh   check whether a node can run it; they need nothing installed
    node-local.sh               copies it to a node's local disk before the ranks start

The bytes depend only on the lock and on airlift's version.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from stage.digests import hash_file, sha256_of_bytes
from stage.environment.check.needs import Needs
from stage.environment.image import image
from stage.environment.image.own_wheel import airlift_wheel, unmet_requirements
from stage.environment.spec.packages import LOCK_NAME, LockedPackages, Package
from stage.environment.spec.profile import MACHINES
from stage.errors import DamageError, UsageError
from stage.installation import DISTRIBUTION

SCRIPTS = ("env-check.sh", "env-probe.sh", "node-local.sh")
IMAGE, ENV = "image.tar.gz", "env.json"
BOOTSTRAP = "bootstrap.sh"
BUILT, ASSEMBLED = "wheel", "environment"
"""Values of `made_by`: a wheel of an sdist or of airlift; any other file."""


@dataclass(frozen=True)
class Made:
    """A file that was made.

    Attributes:
        path: in the asset's folder.
        file: its current path.
        origin: its source, for the lock.
    """

    path: str
    file: Path
    origin: str
    made_by: str


@dataclass(frozen=True)
class Assembly:
    """The files that were made, the facts of the environment, and notes for the user."""

    made: tuple[Made, ...]
    facts: image.EnvironmentFacts
    notes: tuple[str, ...]


def check_holds_airlift(locked: LockedPackages, where: str) -> None:
    """Checks that a lock has the requirements of airlift, before anything is downloaded.

    Without them `stage` does not start on the cluster.

    Raises:
        UsageError: with the requirements to add.
    """
    packages = [(package.name, package.version) for package in locked.packages]
    if unmet := unmet_requirements(packages, locked.python, locked.platform):
        raise UsageError(
            f"{where}: `stage` and `runner` will be in the environment, and the lock does not meet "
            f"their requirements: {', '.join(unmet)}.",
            "stage env lock adds them; with another tool, add them to the pip section and lock "
            "again.",
        )


def assemble(
    asset: str,
    folder: Path,
    locked: LockedPackages,
    built: Mapping[str, Path],
    virtual_packages: Mapping[str, str],
    out: Path,
    check: Callable[[Path], None],
) -> Assembly:
    """Writes all files.

    Args:
        folder: the asset's folder, with the lock and all packages.
        built: path of an sdist in the asset -> the wheel built from it.
        out: an empty folder.
        check: called with the folder of the finished environment, which it does not change.

    Raises:
        UsageError: the packages cannot be one environment.
        DamageError: a conda package is another one than its file's name says.
        IncompleteError: py-rattler or installer failed.
    """
    has_airlift = any(canonicalize_name(p.name) == DISTRIBUTION for p in locked.pip)
    own = None if has_airlift else airlift_wheel(out / "wheels")
    wheels = {package: built.get(package.path) or folder / package.path for package in locked.pip}
    answer = image.lay_out(
        out / "root",
        conda={folder / package.path: package.url for package in locked.conda},
        wheels=[*wheels.values(), *([own] if own else [])],
        platform=locked.platform,
    )
    _check_names(locked, answer["indexes"])
    facts = image.describe_tree(
        out / "root",
        platform=locked.platform,
        python=locked.python,
        needs=_needs(locked, wheels, answer["indexes"].values()).facts(),
        virtual_packages=virtual_packages,
        lock_sha256=sha256_of_bytes((folder / LOCK_NAME).read_bytes()),
    )
    image.pack(out / "root", out / IMAGE)
    check(out / "root")
    shutil.rmtree(out / "root")
    for left in ("root.cache", "root.cache.aside"):
        shutil.rmtree(out / left, ignore_errors=True)
    (out / ENV).write_bytes(facts.to_json())
    text = bootstrap(asset, facts, hash_file(out / IMAGE).sha256, answer["twins"])
    (out / BOOTSTRAP).write_text(text, encoding="utf-8")
    made = [
        Made(f"wheels/{path.name}", path, next(p.url for p in locked.pip if p.path == sdist), BUILT)
        for sdist, path in sorted(built.items())
    ]
    if own:
        made.append(Made(f"wheels/{own.name}", own, DISTRIBUTION, BUILT))
    for name in SCRIPTS:
        (out / name).write_bytes((image.TEMPLATES / name).read_bytes())
    for name in (IMAGE, ENV, BOOTSTRAP, *SCRIPTS):
        made.append(Made(name, out / name, LOCK_NAME, ASSEMBLED))
    return Assembly(tuple(made), facts, tuple(answer["notes"]))


def bootstrap(asset: str, facts: image.EnvironmentFacts, image_sha256: str, twins: int) -> str:
    """The text of `bootstrap.sh`: the template with the values of one environment.

    Args:
        twins: number of pairs of its names that are one on a disk that ignores case.
    """
    text = (image.TEMPLATES / BOOTSTRAP).read_text(encoding="utf-8")
    for key, value in {
        "ASSET": asset,
        "IMAGE_SHA256": image_sha256,
        "TREE": facts.tree,
        "LONGEST_PREFIX": str(image.LONGEST_PREFIX),
        "SIZE_KIB": str(facts.size // 1024),
        "FILES": str(facts.files + facts.modules),
        "GLIBC": facts.glibc or "",
        "MACHINE": MACHINES[facts.platform],
        "TWINS": str(twins),
    }.items():
        text = text.replace(f"@{key}@", value)
    return text


def _needs(
    locked: LockedPackages, wheels: Mapping[Package, Path], indexes: Iterable[Mapping[str, Any]]
) -> Needs:
    """The needs of the environment, from its wheels and the `depends` of its conda packages."""
    packages = [
        replace(p, url=wheels[p].absolute().as_uri()) if p.is_sdist else p for p in locked.packages
    ]
    depends = [text for index in indexes for text in index.get("depends", ())]
    return Needs.of(packages, MACHINES[locked.platform], depends)


def _check_names(locked: LockedPackages, indexes: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that each conda package is the one that its file's name says.

    Args:
        indexes: file name -> the package's `index.json`.

    Raises:
        DamageError: one is another package or version.
    """
    for package in locked.conda:
        name = package.path.rpartition("/")[2]
        index = indexes[name]
        if (index["name"], index["version"]) != (package.name, package.version):
            raise DamageError(
                f"{name}: inside it is {index['name']} {index['version']}.", "Lock again."
            )
