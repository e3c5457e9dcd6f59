"""Runs tests/gpu and returns the outcome of each test."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from runner.errors import StageError
from scripts.lib.gpu_check.limited import run_limited

ROOT = Path(__file__).resolve().parents[3]
ON_CPU = "AIRLIFT_GPU_TESTS_ON_CPU"
"""Set to 1, tests/gpu runs on the CPU where the test makes sense there: for `--dry-run`."""


def run_suite(folder: Path, *, on_cpu: bool, limit_s: float) -> dict[str, Any]:
    """Runs the tests marked `gpu`.

    Args:
        folder: takes the report and the log.
        on_cpu: whether to run them without a GPU.
        limit_s: the most seconds they may take.

    Returns:
        Test -> outcome, and how many passed.

    Raises:
        StageError: a test failed, or they did not run.
    """
    report, log = folder / "tests.xml", folder / "tests.log"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-n", "0", "-q", "-p",
        "no:cacheprovider", f"--junitxml={report}",
    ]  # fmt: skip
    environment = {**os.environ, **({ON_CPU: "1"} if on_cpu else {})}
    if run_limited(command, log, limit_s, cwd=ROOT, environ=environment) is None:
        raise StageError(f"the tests did not end in {limit_s:.0f} s.", f"less {log}", 1)
    outcomes = read_report(report) if report.exists() else {}
    if not outcomes:
        raise StageError("the tests did not run.", f"less {log}", 1)
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    if failed:
        raise StageError(
            f"{len(failed)} of {len(outcomes)} tests failed: {', '.join(failed)}.",
            f"less {log}",
            1,
        )
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    return {"passed": passed} | {
        name: outcome for name, outcome in outcomes.items() if outcome != "passed"
    }


def read_report(path: Path) -> dict[str, str]:
    """Test -> `passed`, `failed` or `skipped: REASON`, from pytest's JUnit XML."""
    outcomes = {}
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        skipped = f"skipped: {kinds['skipped']}" if "skipped" in kinds else "passed"
        outcomes[case.get("name", "?")] = "failed" if {"failure", "error"} & set(kinds) else skipped
    return outcomes
