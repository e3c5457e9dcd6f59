"""Whether this node can run the environments of a bundle: what `env-check.sh` finds, as data.

There is one set of checks, in sh, because most clusters' own Python is too old for anything else; here it is run and
read. Bundle -> its environments -> `env-check.sh` -> `Finding`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stage.bundle import Bundle
from stage.environment.scripts import CHECK, run_script
from stage.errors import DamageError, IncompleteError, UsageError

STATUSES = ("ok", "note", "bad")
_REMEDY = "      -> "


@dataclass(frozen=True)
class Finding:
    """One line of the check.

    Attributes:
        status: `ok`; `note`: it runs, but this should be known; `bad`: it would not.
    """

    asset: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        first = f"{self.status:<5} {self.text}"
        return f"{first}\n{_REMEDY}{self.remedy}" if self.remedy else first


def check_environments(bundle_path: Path, asset: str | None = None, prefix: Path | None = None) -> list[Finding]:
    """Checks one environment of a bundle, or all.

    Args:
        prefix: where it would be created; None: space and quota are not asked.

    Raises:
        UsageError: no bundle, no such environment in it, no `sh`.
        DamageError: the environment's description is missing.
        IncompleteError: the check itself broke.
    """
    bundle = Bundle.open(bundle_path)
    there = [locked.name for locked in bundle.lock.assets.values() if locked.kind == "environment"]
    if asset is not None and bundle.asset(asset).kind != "environment":
        raise UsageError(
            f"{bundle_path}: `{asset}` is a {bundle.asset(asset).kind}, not an environment.",
            f"Its environments: {', '.join(there) or 'none'}.",
        )
    if not there:
        raise UsageError(f"{bundle_path}: there is no environment in this bundle.", "stage show lists what is.")
    return [finding for name in ([asset] if asset else there) for finding in _check(bundle, name, prefix)]


def _check(bundle: Bundle, asset: str, prefix: Path | None) -> list[Finding]:
    folder = bundle.asset_path(asset)
    if not (folder / "env.json").is_file():
        raise DamageError(f"{folder / 'env.json'} is missing.", f"stage verify {bundle.root}")
    done = run_script(CHECK, "--environment", folder.absolute(), *([prefix.absolute()] if prefix else []), read=True)
    findings: list[Finding] = []
    for line in done.stdout.splitlines():
        status, _, text = line.partition(" ")
        if status in STATUSES:
            findings.append(Finding(asset, status, text.strip()))
        elif line.startswith(_REMEDY) and findings:
            last = findings.pop()
            findings.append(Finding(asset, last.status, last.text, line.removeprefix(_REMEDY)))
    bad = any(finding.status == "bad" for finding in findings)
    if done.returncode != (1 if bad else 0) or not findings:
        raise IncompleteError(f"The check of `{asset}` ended with exit code {done.returncode}; its words are above.")
    return findings
