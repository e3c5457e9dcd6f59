"""The Python that real scripts run in: this project's own packages, and what the scripts need more.

A virtual environment of a few MB in a cache folder; torch and the like are those of this project's
environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path


def make(cache: Path, packages: tuple[str, ...]) -> Path:
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
            _without_compiled_operators(own / "torchvision")
            (folder / "complete").touch()
    return python


def _without_compiled_operators(torchvision: Path) -> None:
    """Lets torchvision work where torch has no CUDA: its wheels on PyPI are for CUDA.

    Their library does not load then, and this file registers operators of it. Images, transforms
    and models need none of them.
    """
    registrations = torchvision / "_meta_registrations.py"
    if registrations.exists() and not _has_cuda():
        registrations.write_text("")


def _has_cuda() -> bool:
    code = "import sys, torch; sys.exit(torch.version.cuda is None)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
