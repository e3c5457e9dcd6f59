"""Whether this node can run the environments of a bundle: runs `env-check.sh`, reads its findings.

The checks are shell scripts, because the Python of most clusters is too old for anything else. They
are in `stage/templates`, need only `sh`, and print for people; the exit code is the answer. The
same scripts travel in the bundle, for nodes without `stage`.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from stage.bundle.advice import remedy_for_damage
from stage.bundle.bundle import Bundle
from stage.errors import DamageError, IncompleteError, UsageError

PROBE = "env-probe.sh"
CHECK = "env-check.sh"

_FOLDER = Path(__file__).resolve().parents[2] / "templates"


def script_path(name: str) -> Path:
    """The path of a script."""
    return _FOLDER / name


def read_script(name: str) -> str:
    """The text of a script."""
    return script_path(name).read_text(encoding="utf-8")


def run_script(
    name: str, *arguments: str | Path, read: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end.

    Args:
        read: its stdout is in the result; False: it goes to the stdout of this process.

    Raises:
        UsageError: there is no `sh`.
    """
    command = ["sh", str(script_path(name)), *map(str, arguments)]
    stdout = subprocess.PIPE if read else None
    try:
        return subprocess.run(command, stdout=stdout, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise UsageError(
            "There is no `sh` on PATH.", "PATH=$PATH:/usr/bin:/bin, then the same command again."
        ) from None


STATUSES = ("ok", "note", "bad")
_REMEDY = "      -> "


@dataclass(frozen=True)
class NodeFinding:
    """One line of the check.

    Attributes:
        status: `ok`; `note`: it runs, and this is good to know; `bad`: it would not run.
    """

    asset: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        first = f"{self.status:<5} {self.text}"
        return f"{first}\n{_REMEDY}{self.remedy}" if self.remedy else first


def check_environments(
    bundle_path: Path, asset: str | None = None, prefix: Path | None = None
) -> list[NodeFinding]:
    """Checks one environment of a bundle, or all.

    Args:
        prefix: the folder where it would be created; None: space and quota are not checked.

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
    return [
        finding
        for name in ([asset] if asset else there)
        for finding in _check(bundle, name, prefix)
    ]


def _check(bundle: Bundle, asset: str, prefix: Path | None) -> list[NodeFinding]:
    folder = bundle.asset_path(asset)
    if not (folder / "env.json").is_file():
        problem = f"{folder / 'env.json'} is missing."
        raise DamageError(problem, remedy_for_damage(bundle.root))
    prefixes = [prefix.absolute()] if prefix else []
    done = run_script(CHECK, "--environment", folder.absolute(), *prefixes, read=True)
    findings: list[NodeFinding] = []
    for line in done.stdout.splitlines():
        status, _, text = line.partition(" ")
        if status in STATUSES:
            findings.append(NodeFinding(asset, status, text.strip()))
        elif line.startswith(_REMEDY) and findings:
            last = findings.pop()
            findings.append(NodeFinding(asset, last.status, last.text, line.removeprefix(_REMEDY)))
    bad = any(finding.status == "bad" for finding in findings)
    if done.returncode != (1 if bad else 0) or not findings:
        raise IncompleteError(
            f"The check of `{asset}` ended with exit code {done.returncode}; its output is above.",
            f"Run the script itself: sh {script_path(CHECK)} --environment {folder.absolute()}",
        )
    return findings
