"""Writes the files of an environment's asset that are not downloaded, from its lock and packages.

    wheels/                     built from sdists (`stage.environment.solve.sdists`), and airlift's
    requirements.lock           for pip and uv: name==version --hash
    channel/.../repodata.json   for conda and micromamba, to install from file://
    image.tar.gz                the environment, with a placeholder for its prefix
    env.json                    its description
    bootstrap.sh relocate.py    create the environment; they need nothing installed
    env-check.sh env-probe.sh   check whether a node can run it; they need nothing installed
    node-local.sh               copies it to a node's local disk before the ranks start

The bytes depend only on the lock and on airlift's version.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

from stage.environment.compat.needs import Needs
from stage.environment.image import image, relocate
from stage.environment.image.own_wheel import airlift_wheel, unmet_requirements
from stage.environment.spec.packages import CONDA_ENDINGS, LOCK_NAME, LockedPackages, Package
from stage.environment.spec.profile import MACHINES
from stage.errors import DamageError, UsageError
from stage.installation import DISTRIBUTION
from stage.util.digests import hash_file, sha256_of_bytes

SCRIPTS = ("env-check.sh", "env-probe.sh", "node-local.sh")
IMAGE, ENV = "image.tar.gz", "env.json"
BOOTSTRAP, REQUIREMENTS = "bootstrap.sh", "requirements.lock"
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
    (out / "relocate.py").write_bytes(Path(relocate.__file__).read_bytes())
    (out / REQUIREMENTS).write_text(_requirements(wheels, own), encoding="utf-8")
    made = [
        Made(f"wheels/{path.name}", path, next(p.url for p in locked.pip if p.path == sdist), BUILT)
        for sdist, path in sorted(built.items())
    ]
    if own:
        made.append(Made(f"wheels/{own.name}", own, DISTRIBUTION, BUILT))
    for name in SCRIPTS:
        (out / name).write_bytes((image.TEMPLATES / name).read_bytes())
    for name in (IMAGE, ENV, BOOTSTRAP, "relocate.py", REQUIREMENTS, *SCRIPTS):
        made.append(Made(name, out / name, LOCK_NAME, ASSEMBLED))
    for path in write_channels(folder, locked, answer["indexes"], out):
        made.append(Made(path, out / path, LOCK_NAME, ASSEMBLED))
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


def _requirements(wheels: Mapping[Package, Path], own: Path | None) -> str:
    lines = [
        f"{package.name}=={package.version} --hash=sha256:{hash_file(path).sha256}\n"
        for package, path in wheels.items()
    ]
    if own is not None:
        version = parse_wheel_filename(own.name)[1]
        lines.append(f"{DISTRIBUTION}=={version} --hash=sha256:{hash_file(own).sha256}\n")
    return "".join(sorted(lines))


def write_channels(
    folder: Path, locked: LockedPackages, indexes: Mapping[str, Mapping[str, Any]], out: Path
) -> list[str]:
    """Writes each channel's `repodata.json`, for the platform and for `noarch` (conda needs both).

    Args:
        indexes: file name -> the package's `index.json`.

    Returns:
        Their paths in the asset's folder.
    """
    channels: dict[str, dict[str, list[Package]]] = defaultdict(
        lambda: {locked.platform: [], "noarch": []}
    )
    for package in locked.conda:
        _, channel, subdir, _ = package.path.split("/")
        channels[channel][subdir].append(package)
    written: list[str] = []
    for channel, subdirs in sorted(channels.items()):
        for subdir, packages in subdirs.items():
            path = f"channel/{channel}/{subdir}/repodata.json"
            target = out / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_repodata(subdir, packages, folder, indexes), encoding="utf-8")
            written.append(path)
    return written


def _repodata(
    subdir: str, packages: Iterable[Package], folder: Path, indexes: Mapping[str, Mapping[str, Any]]
) -> str:
    entries: dict[str, dict[str, Any]] = {ending: {} for ending in CONDA_ENDINGS}
    for package in packages:
        name = package.path.rpartition("/")[2]
        index = indexes[name]
        if (index["name"], index["version"]) != (package.name, package.version):
            raise DamageError(
                f"{name}: inside it is {index['name']} {index['version']}.", "Lock again."
            )
        file = {"sha256": package.sha256, "size": (folder / package.path).stat().st_size}
        ending = ".conda" if name.endswith(".conda") else ".tar.bz2"
        entries[ending][name] = {**index, "subdir": subdir, **file}
    document = {
        "info": {"subdir": subdir},
        "packages": entries[".tar.bz2"],
        "packages.conda": entries[".conda"],
        "removed": [],
        "repodata_version": 1,
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
