"""A virtual environment with the other tools that PyPI has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.bench.workload import BenchError

REQUIREMENTS = Path(__file__).with_name("peers.txt")


@dataclass(frozen=True)
class Peers:
    """The tools of an environment; others come from the system."""

    venv: Path

    @staticmethod
    def install(venv: Path) -> Peers:
        """Makes the environment, or uses that of an earlier run with the same requirements.

        Raises:
            BenchError: pip failed.
        """
        stamp = venv / "made-from.txt"
        wanted = REQUIREMENTS.read_text()
        if not stamp.is_file() or stamp.read_text() != wanted:
            print(f"$ pip install -r {REQUIREMENTS.name}    (into {venv}, once)", flush=True)
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
