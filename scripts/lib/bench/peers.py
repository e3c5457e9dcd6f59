"""The other tools that are measured: their sources, their versions, those missing here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.bench.measure import BenchError

REQUIREMENTS = Path(__file__).with_name("peers.txt")
SYSTEM_TOOLS = ("curl", "aria2c", "sha256sum")


@dataclass(frozen=True)
class Peers:
    """A virtual environment with the peers that PyPI has; the others come from the system."""

    venv: Path

    @staticmethod
    def install(venv: Path, say: Callable[[str], None]) -> Peers:
        """Makes the environment, or uses that of an earlier run with the same requirements.

        Raises:
            BenchError: pip failed.
        """
        stamp = venv / "made-from.txt"
        wanted = REQUIREMENTS.read_text()
        if not stamp.is_file() or stamp.read_text() != wanted:
            say(f"$ pip install -r {REQUIREMENTS.name}    (into {venv}, once)")
            shutil.rmtree(venv, ignore_errors=True)
            make = [sys.executable, "-m", "venv", str(venv)]
            install = [str(venv / "bin/python"), "-m", "pip", "install", "-qq"]
            install += ["--disable-pip-version-check", "-r", str(REQUIREMENTS)]
            for command in (make, install):
                if subprocess.run(command).returncode != 0:
                    raise BenchError(f"`{' '.join(command)}` failed: no tools to compare with")
            stamp.write_text(wanted)
        return Peers(venv)

    def command(self, name: str) -> str:
        """A command of the environment."""
        return str(self.venv / "bin" / name)

    def missing(self, *names: str) -> list[str]:
        """One reason for each of these system tools that is missing here."""
        missing = [name for name in names if not shutil.which(name)]
        return [f"{name}: not installed here, and only root can install it" for name in missing]

    def versions(self) -> dict[str, str]:
        """Tool -> version, as the tools print it."""
        names = [line.partition("==")[0] for line in REQUIREMENTS.read_text().split()]
        script = (
            "import importlib.metadata as m, json, sys; "
            "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        )
        found: dict[str, str] = json.loads(_output(self.command("python"), "-c", script, *names))
        for name in filter(shutil.which, SYSTEM_TOOLS):
            line = _output(name, "--version").splitlines()[0]
            found[name] = match[0] if (match := re.search(r"\d+(\.\d+)+", line)) else line
        return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
