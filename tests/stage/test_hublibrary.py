"""Environments hold what people's scripts need: transformers 4 wants a huggingface_hub that fetching cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage.hublibrary import is_enough


@pytest.mark.parametrize(
    ("found", "enough"),
    [("2.4.0", True), ("2.10.0", True), ("2.5rc1", True), ("3.0.0", True), ("2.3.9", False), ("0.36.2", False)],
)
def test_versions_are_numbers_and_not_texts(found: str, enough: bool) -> None:
    assert is_enough(found) is enough


@pytest.mark.parametrize("command", [["fetch", "m.yaml", "-o", "out"], ["lock", "m.yaml"], ["init", "acme/tiny"]])
def test_an_older_client_is_told_before_it_fails_and_stops_nothing_else(tmp_path: Path, command: list[str]) -> None:
    older = tmp_path / "site" / "huggingface_hub-0.36.2.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: huggingface_hub\nVersion: 0.36.2\n")
    (tmp_path / "m.yaml").write_text("format: 1\nname: m\nassets:\n  tiny: {model: acme/tiny}\n")
    paths = os.pathsep.join([str(older.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    def stage(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "stage", *arguments]
        return subprocess.run(
            argv, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )

    refused = stage(*command)
    assert refused.returncode == 2, refused.stderr
    assert "huggingface_hub 2.4 or newer" in refused.stderr and "0.36.2" in refused.stderr
    assert "not a bundle" in stage("verify", ".").stderr
