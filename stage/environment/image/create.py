"""A bundle's environment -> a prefix on the cluster, by its `bootstrap.sh`. No network.

The script is compared with `stage.lock` first; it compares the image. A failure leaves no files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.digests import hash_file
from stage.errors import DamageError, StageError, UsageError

_SCRIPT = "bootstrap.sh"


def create(root: Path, name: str, prefix: Path) -> None:
    """Creates the environment `name` of the bundle at `prefix`.

    Raises:
        UsageError: no such environment.
        DamageError: its script differs from the fetched one.
        StageError: the message, remedy and exit code of `bootstrap.sh`.
    """
    bundle = Bundle.open(root)
    asset = bundle.asset(name)
    if asset.environment is None:
        there = ", ".join(n for n, a in bundle.lock.assets.items() if a.environment) or "none"
        raise UsageError(
            f"{root}: `{name}` is no environment, but a {asset.kind}.",
            f"Environments in it: {there}.",
        )
    script = (root / asset.folder).absolute() / _SCRIPT
    locked = [file.sha256 for file in asset.files if file.path == f"{asset.folder}/{_SCRIPT}"]
    if not script.is_file() or hash_file(script).sha256 not in locked:
        raise DamageError(
            f"{root}: {asset.folder}/{_SCRIPT} is missing, or is not the file that was fetched. "
            "Nothing was created.",
            remedy_for_damage(root),
        )
    done = subprocess.run(
        ["/bin/sh", script, prefix.absolute()], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        message, _, remedy = done.stderr.strip().partition("\n  -> ")
        code = done.returncode if done.returncode in (1, 2, 5) else 5
        raise StageError(message, remedy, exit_code=code)
