"""transformers 4 in a user's environment brings a huggingface_hub that is too old to fetch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage.hub.library import is_enough


@pytest.mark.parametrize(
    ("found", "enough"),
    [
        ("2.4.0", True),
        ("2.10.0", True),
        ("2.5rc1", True),
        ("3.0.0", True),
        ("2.3.9", False),
        ("0.36.2", False),
    ],
)
def test_versions_are_numbers_and_not_texts(found: str, enough: bool) -> None:
    assert is_enough(found, (2, 4)) is enough


@pytest.mark.parametrize(
    "command", [["fetch", "m.yaml", "-o", "out"], ["lock", "m.yaml"], ["init", "acme/tiny"]]
)
@pytest.mark.parametrize(
    ("library", "version", "least"),
    [
        ("huggingface_hub", "0.36.2", "2.4"),
        ("urllib3", "1.26.20", "2.0"),
        ("pyarrow", "12.0.1", "14.0"),
    ],
)
def test_an_older_client_is_reported_before_it_fails_and_stops_nothing_else(
    tmp_path: Path, command: list[str], library: str, version: str, least: str
) -> None:
    older = tmp_path / "site" / f"{library}-{version}.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    (tmp_path / "m.yaml").write_text("format: 1\nname: m\nassets:\n  tiny: {model: acme/tiny}\n")
    paths = os.pathsep.join([str(older.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    def stage(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "stage", *arguments]
        return subprocess.run(
            argv,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )

    refused = stage(*command)
    assert refused.returncode == 2, refused.stderr
    assert f"needs {library} {least} or newer" in refused.stderr and version in refused.stderr
    assert "not a bundle" in stage("verify", ".").stderr
