"""Whether this node can run the environments of a bundle: `env-check.sh` says.

The checks are shell scripts, because the Python of most clusters is too old for anything else. They
are in `stage/templates`, need only `sh`, and print for people; the exit code is the answer. The
same scripts travel in the bundle, for nodes without `stage`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.errors import DamageError, IncompleteError, UsageError

PROBE = Path(__file__).resolve().parents[2] / "templates/env-probe.sh"
CHECK = PROBE.with_name("env-check.sh")


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
    there = [locked.name for locked in bundle.lock.assets.values() if locked.kind == "environment"]
    if asset is not None and bundle.asset(asset).kind != "environment":
        raise UsageError(
            f"{bundle_path}: `{asset}` is a {bundle.asset(asset).kind}, not an environment.",
            f"Its environments: {', '.join(there) or 'none'}.",
        )
    if not there:
        raise UsageError(
            f"{bundle_path}: there is no environment in this bundle.", "stage show lists what is."
        )
    codes = set()
    for name in [asset] if asset else there:
        folder = bundle.asset_path(name).absolute()
        if not (folder / "env.json").is_file():
            problem = f"{folder / 'env.json'} is missing."
            raise DamageError(problem, remedy_for_damage(bundle.root))
        if len(there) > 1:
            print(f"{name}:", flush=True)
        code = run_script(CHECK, "--environment", folder, *([prefix.absolute()] if prefix else []))
        if code not in (0, 1):
            raise IncompleteError(
                f"The check of `{name}` ended with exit code {code}; its output is above.",
                f"Run the script itself: sh {CHECK} --environment {folder}",
            )
        codes.add(code)
    return codes == {0}
