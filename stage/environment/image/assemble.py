"""Writes the files of an environment's asset, from its lock and packages.

    image.tar.gz                the environment, with a placeholder for its prefix
    env.json                    its description
    bootstrap.sh                creates the environment; it needs nothing installed
    env-check.sh env-probe.sh   check whether a node can run it; they need nothing installed
    node-local.sh               copies it to a node's local disk before the ranks start

The bytes depend only on the lock and on airlift's version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from stage.digests import hash_file
from stage.environment.check.needs import Needs
from stage.environment.image import image
from stage.environment.image.case import folder_that_keeps_case
from stage.environment.image.own_wheel import airlift_wheel
from stage.environment.spec.conda_lock import EnvironmentLock
from stage.environment.spec.profile import MACHINES
from stage.installation import DISTRIBUTION

SCRIPTS = ("env-check.sh", "env-probe.sh", "node-local.sh")
IMAGE, ENV, BOOTSTRAP = "image.tar.gz", "env.json", "bootstrap.sh"
FILES = (IMAGE, ENV, BOOTSTRAP, *SCRIPTS)


def assemble(
    asset: str,
    lock: EnvironmentLock,
    lock_sha256: str,
    files: Mapping[str, Path],
    virtual_packages: Mapping[str, str],
    out: Path,
    check: Callable[[Path], None],
) -> tuple[dict[str, Any], list[str]]:
    """Writes `FILES`.

    Args:
        files: URL of each package -> its file; of an sdist, the wheel built from it.
        out: a folder.
        check: called with the folder of the finished environment, which it does not change.

    Returns:
        The contents of `env.json`, and notes for the user.

    Raises:
        UsageError: the packages cannot be one environment, or no disk here keeps their names apart.
        IncompleteError: py-rattler or installer failed.
    """
    wheels = [files[package.url] for package in lock.of("pip")]
    conda = [files[package.url] for package in lock.of("conda")]
    with folder_that_keeps_case(out) as work:
        root = work / "root"
        if not any(canonicalize_name(package.name) == DISTRIBUTION for package in lock.of("pip")):
            wheels.append(airlift_wheel(work / "own"))
        site_python = lock.provides.get("python", "")
        answer = image.lay_out(
            root, conda=conda, wheels=wheels, platform=lock.platform, python=site_python
        )
        facts = image.describe_tree(
            root,
            {
                "platform": lock.platform,
                "python": lock.python,
                "virtual_packages": dict(virtual_packages),
                "lock_sha256": lock_sha256,
                **({"provides": dict(lock.provides)} if lock.provides else {}),
                **Needs.of(lock.packages, MACHINES[lock.platform]).facts(),
            },
        )
        image.pack(root, out / IMAGE)
        check(root)
    (out / ENV).write_bytes(image.to_json(facts))
    text = bootstrap(asset, facts, hash_file(out / IMAGE).sha256)
    (out / BOOTSTRAP).write_text(text, encoding="utf-8")
    for name in SCRIPTS:
        (out / name).write_bytes((image.TEMPLATES / name).read_bytes())
    return facts, answer["notes"]


def bootstrap(asset: str, facts: Mapping[str, Any], image_sha256: str) -> str:
    """The text of `bootstrap.sh`: the template with the values of one environment."""
    text = (image.TEMPLATES / BOOTSTRAP).read_text(encoding="utf-8")
    for key, value in {
        "ASSET": asset,
        "IMAGE_SHA256": image_sha256,
        "TREE": facts["tree"],
        "LONGEST_PREFIX": str(image.LONGEST_PREFIX),
        "SIZE_KIB": str(facts["size"] // 1024),
        "FILES": str(facts["files"] + facts["modules"]),
        "GLIBC": facts["glibc"] or "",
        "MACHINE": MACHINES[facts["platform"]],
        "PROVIDES": " ".join(f"{n}=={v}" for n, v in facts.get("provides", {}).items()),
    }.items():
        text = text.replace(f"@{key}@", value)
    return text
