"""Whether this node can run the environments of a bundle, and makes one: shell scripts do both.

The Python of most clusters is too old for anything else. The scripts are in `stage/templates`, need
only `sh`, and print for people; the exit code is the answer. They also travel in the bundle, for
nodes without `stage`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.errors import DamageError, IncompleteError, StageError, UsageError, quoted
from stage.files import hash_file
from stage.installation import TEMPLATES
from stage.lock.model import LockedAsset

PROBE, CHECK = TEMPLATES / "env-probe.sh", TEMPLATES / "env-check.sh"
_BOOTSTRAP = "bootstrap.sh"


def run_script(script: Path, *arguments: str | Path) -> int:
    """Runs a script to its end, on the stdout of this process; returns its exit code.

    Raises:
        UsageError: there is no `sh`.
    """
    try:
        return subprocess.run(["sh", script, *arguments], check=False).returncode
    except FileNotFoundError:
        raise UsageError(
            "There is no `sh` on PATH.", "PATH=$PATH:/usr/bin:/bin, then the same command again."
        ) from None


def check_environments(
    bundle_path: Path, asset: str | None = None, prefix: Path | None = None
) -> bool:
    """Checks one environment of a bundle, or all; prints what `env-check.sh` prints.

    Args:
        prefix: the folder where it would be created; None: space and quota are not checked.

    Returns:
        Whether this node can run them.

    Raises:
        UsageError: no bundle, no such environment in it, no `sh`.
        DamageError: the environment's description is missing.
        IncompleteError: the check script failed.
    """
    bundle = Bundle.open(bundle_path)
    there = [_of(bundle, asset).name] if asset is not None else _environments(bundle)
    if not there:
        raise UsageError(
            f"{bundle_path}: there is no environment in this bundle.", "stage show lists what is."
        )
    codes = set()
    for name in there:
        folder = bundle.asset_path(name).absolute()
        if not (folder / "env.json").is_file():
            raise DamageError(f"{folder / 'env.json'} is missing.", remedy_for_damage(bundle.root))
        if len(there) > 1:
            print(f"{name}:", flush=True)
        code = run_script(CHECK, "--environment", folder, *([prefix.absolute()] if prefix else []))
        if code not in (0, 1):
            raise IncompleteError(
                f"The check of `{name}` ended with exit code {code}; its output is above.",
                f"Run the script itself: sh {quoted(CHECK)} --environment {quoted(folder)}",
            )
        codes.add(code)
    return codes == {0}


def create(root: Path, name: str, prefix: Path) -> None:
    """Creates the environment `name` of the bundle at `prefix`, by its `bootstrap.sh`. No network.

    The script is compared with `stage.lock` first; it compares the image. A failure leaves no
    files.

    Raises:
        UsageError: no such environment.
        DamageError: its script differs from the fetched one.
        StageError: the message, remedy and exit code of `bootstrap.sh`.
    """
    bundle = Bundle.open(root)
    asset = _of(bundle, name)
    script = (root / asset.folder).absolute() / _BOOTSTRAP
    locked = [file.sha256 for file in asset.files if file.path == f"{asset.folder}/{_BOOTSTRAP}"]
    if not script.is_file() or hash_file(script).sha256 not in locked:
        raise DamageError(
            f"{root}: {asset.folder}/{_BOOTSTRAP} is missing, or is not the file that was fetched. "
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


def _environments(bundle: Bundle) -> list[str]:
    return [asset.name for asset in bundle.lock.assets.values() if asset.kind == "environment"]


def _of(bundle: Bundle, name: str) -> LockedAsset:
    asset = bundle.asset(name)
    if asset.kind != "environment":
        raise UsageError(
            f"{bundle.root}: `{name}` is a {asset.kind}, not an environment.",
            f"Its environments: {', '.join(_environments(bundle)) or 'none'}.",
        )
    return asset
