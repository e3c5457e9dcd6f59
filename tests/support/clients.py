"""The clients of people's scripts: a process with HF_ENDPOINT alone, and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


def run_client(script: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a user's script with only HF_ENDPOINT set and caches of its own."""
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": endpoint,
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )


def answer_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a script printed last."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
