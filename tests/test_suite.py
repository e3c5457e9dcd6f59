"""The suite's own rules: nothing skips silently in CI, a file has one worker, lists name files."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import scheduling

ROOT = Path(__file__).resolve().parents[1]


def passed_through(hook: Generator[None, Any, Any], report: Any) -> Any:
    """What a hook of the conftest makes of a report."""
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(report)
    return end.value.value


def skipped_test(marker: str | None = None) -> Any:
    """The outcome of a test with this marker that skipped."""
    item: Any = SimpleNamespace(get_closest_marker=lambda name: True if name == marker else None)
    reason = ("test_it.py", 1, "Skipped: no reason")
    report = pytest.TestReport("test_it", ("", 1, ""), {}, "skipped", reason, "call")
    return passed_through(conftest.pytest_runtest_makereport(item), report)


def skipped_module() -> Any:
    report = pytest.CollectReport("test_it.py", "skipped", ("test_it.py", 1, "Skipped: no"), [])
    return passed_through(conftest.pytest_make_collect_report(), report)


def test_a_skip_fails_where_nothing_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRLIFT_NO_SKIP", raising=False)
    assert (skipped_test().outcome, skipped_module().outcome) == ("skipped", "skipped")
    monkeypatch.setenv("AIRLIFT_NO_SKIP", "1")
    assert (skipped_test().outcome, skipped_module().outcome) == ("failed", "failed")
    assert "AIRLIFT_NO_SKIP): Skipped: no reason" in skipped_test().longrepr


def test_missing_hardware_and_expected_failures_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRLIFT_NO_SKIP", "1")
    assert skipped_test("gpu").outcome == "skipped"
    report = pytest.TestReport("test_it", ("", 1, ""), {}, "skipped", "", "call", wasxfail="why")
    item: Any = SimpleNamespace(get_closest_marker=lambda _: None)
    assert passed_through(conftest.pytest_runtest_makereport(item), report).outcome == "skipped"


def test_a_file_has_one_worker_and_the_site_has_one() -> None:
    config: Any = SimpleNamespace(getvalue=lambda name: {"dist": "load"}[name])
    assert scheduling.make_scheduler(config, None) is None
    scope = scheduling.ByFile._split_scope
    scheduler: Any = None
    assert scope(scheduler, "tests/hub/a.py::test[1::2]") == "tests/hub/a.py"
    assert scope(scheduler, "tests/site/a.py::test") == scope(scheduler, "tests/site/b.py::test")


@pytest.mark.parametrize("script", ["scripts/test", "scripts/smoke", "scripts/lowest"])
def test_the_files_that_a_script_names_are_there(script: str) -> None:
    files = re.findall(r"\btests/\S+\.py\b", (ROOT / script).read_text())
    assert files and [file for file in files if not (ROOT / file).is_file()] == []


def test_the_quick_tests_need_no_site_and_no_system_package() -> None:
    """scripts/test --quick installs only git and rsync."""
    text = (ROOT / "scripts/test").read_text()
    packages = re.findall(r"^    need (\S+)", text, re.MULTILINE)
    files = re.findall(r"^    (tests/\S+)$", text, re.MULTILINE)
    assert len(packages) > 10 and len(files) > 10
    needs = [*(f'"{package}"' for package in packages), "mark.site"]
    found = {file: (ROOT / file).read_text() for file in files}
    assert [file for file, code in found.items() if any(need in code for need in needs)] == []
