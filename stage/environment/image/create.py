"""A bundle's environment -> a prefix on the cluster, by its `bootstrap.sh`. No network.

The script and the image are compared with `stage.lock` first. A failure leaves no files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.digests import hash_file
from stage.errors import DamageError, StageError, UsageError
from stage.lock.model import LockedAsset

_READ = ("bootstrap.sh", "image.tar.gz")


def create(root: Path, name: str, prefix: Path) -> None:
    """Creates the environment `name` of the bundle at `prefix`.

    Raises:
        UsageError: no such environment.
        DamageError: a file of the bundle differs from the fetched one.
        StageError: the message, remedy and exit code of `bootstrap.sh`.
    """
    asset = _find_environment(root, name)
    _check_files(root, asset)
    script = (root / asset.folder).absolute() / "bootstrap.sh"
    done = subprocess.run(
        ["/bin/sh", script, prefix.absolute()], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        message, _, remedy = done.stderr.strip().partition("\n  -> ")
        code = done.returncode if done.returncode in (1, 2, 5) else 5
        raise StageError(message, remedy, exit_code=code)


def _find_environment(root: Path, name: str) -> LockedAsset:
    bundle = Bundle.open(root)
    asset = bundle.asset(name)
    if asset.environment is None:
        there = ", ".join(n for n, a in bundle.lock.assets.items() if a.environment) or "none"
        raise UsageError(
            f"{root}: `{name}` is no environment, but a {asset.kind}.",
            f"Environments in it: {there}.",
        )
    return asset


def _check_files(root: Path, asset: LockedAsset) -> None:
    """Compares the files that `bootstrap.sh` reads, and itself, with the lock."""
    for file in asset.files:
        if file.path.removeprefix(f"{asset.folder}/") not in _READ:
            continue
        path = root / file.path
        if not path.is_file():
            problem = f"{file.path} is missing"
        elif hash_file(path).sha256 != file.sha256:
            problem = f"{file.path} is not the file that was fetched"
        else:
            continue
        raise DamageError(f"{root}: {problem}. Nothing was created.", remedy_for_damage(root))
