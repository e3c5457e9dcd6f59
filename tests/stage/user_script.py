"""A script as a user writes it. `scripts/test` checks it with mypy --strict; nothing runs it.

mypy must find the mistakes at its end: where it does not, `type: ignore` is an error.
"""

from __future__ import annotations

from pathlib import Path

import runner
import stage
import stage.bundle.receipt
from stage import fetch, verify


def main(path: Path) -> Path:
    outcome: stage.FetchOutcome = stage.fetch("manifest.yaml", path, jobs=2)
    fetch(stage.Manifest.load("manifest.yaml"), str(path), locked=True)
    report: stage.VerificationReport = stage.verify(path)
    if not verify(path, "fast").ok or not report.ok:
        raise SystemExit(outcome.bundle_id)
    lock: stage.Lockfile = stage.resolve("manifest.yaml")
    bundle: stage.Bundle = stage.open_bundle(path)
    run: runner.RunConfig = runner.load_run("run.yaml", ["steps=3"])
    inputs: runner.Inputs = runner.resolve_inputs(run, bundle.root)
    print(stage.__version__, lock.id, list(bundle), inputs.model.path)
    asset: stage.BundleAsset = bundle["bert"]
    return asset.path


def with_mistakes() -> None:
    stage.verify(1)  # type: ignore[arg-type]
    stage.fetch("a.yaml")  # type: ignore[call-arg]
    print(stage.nonsense)  # type: ignore[attr-defined]
