"""The Python that real scripts run in: this project's own packages, and what the scripts need more.

A virtual environment of a few MB in a cache folder; torch and the like are those of this project's
environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airlift-real-scripts"


def make(packages: tuple[str, ...], cache: Path = CACHE) -> Path:
    """Makes the environment once, and returns its Python."""
    key = "\n".join([*sorted(packages), sys.executable])
    folder = cache / f"venv-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            uv = Path(sys.executable).with_name("uv")
            _run(uv, "venv", "-q", "--clear", "--python", sys.executable, folder)
            _run(uv, "pip", "install", "-q", "--no-deps", "--python", python, *packages)
            own = next(folder.glob("lib/python*/site-packages"))
            theirs = sysconfig.get_path("purelib")
            (own / "base.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
            (folder / "complete").touch()
    return python


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
