"""transformers 4 in a user's environment brings a huggingface_hub that is too old to fetch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.light import declared


@pytest.mark.parametrize(
    ("command", "library", "version", "least"),
    [
        (["fetch", "m.yaml", "-o", "out"], "huggingface_hub", "0.36.2", "2.4"),
        (["lock", "m.yaml"], "huggingface_hub", "2.3.9", "2.4"),
        (["init", "acme/tiny"], "urllib3", "1.26.20", "2"),
        (["fetch", "m.yaml", "-o", "out"], "pyarrow", "12.0.1", "14"),
    ],
)
def test_an_older_client_is_reported_before_it_fails_and_stops_nothing_else(
    tmp_path: Path, command: list[str], library: str, version: str, least: str
) -> None:
    older = tmp_path / "site" / f"{library}-{version}.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    own = tmp_path / "site" / "airlift_hpc-9.dist-info"
    own.mkdir()
    laptop = (f"{r.name}{r.specifier}" for r in declared("laptop"))
    needs = "".join(f'Requires-Dist: {bare} ; extra == "laptop"\n' for bare in laptop)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: airlift-hpc\nVersion: 9\n{needs}")
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
    assert "[laptop]" in refused.stderr
    assert "not a bundle" in stage("verify", ".").stderr
