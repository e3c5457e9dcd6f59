"""The clients that people's scripts use, in the versions that they have: each in its own folder.

They are installed once by uv from the package index, below `~/.cache/airlift-clients`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airlift-clients"
UV = Path(sys.executable).parent / "uv"
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


def client_python(*requirements: str) -> Path:
    """The Python of a virtual environment with these packages and what they depend on."""
    key = "-".join(sorted(requirements))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = CACHE / hashlib.sha256(f"{key} {version}".encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            install: list[str | Path] = [UV, "pip", "install", "-q"]
            _run(UV, "venv", "-q", "--clear", "--python", sys.executable, folder)
            _run(*install, "--python", folder / "bin" / "python", *requirements)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def run_client(
    python: Path | str, script: str, endpoint: str, home: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a user's script with only HF_ENDPOINT set and caches of its own."""
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": endpoint,
        **more,
    }
    return subprocess.run(
        [str(python), "-c", script],
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
