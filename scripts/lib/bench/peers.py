"""The tools measured beside ours: where they come from, which versions they are, and which are not to be had here."""

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
        """Makes the environment, or takes the one an earlier run made from the same requirements.

        Raises:
            BenchError: pip failed.
        """
        stamp = venv / "made-from.txt"
        wanted = REQUIREMENTS.read_text()
        if not stamp.is_file() or stamp.read_text() != wanted:
            say(f"$ pip install -r {REQUIREMENTS.name}    (into {venv}, once)")
            shutil.rmtree(venv, ignore_errors=True)
            pip = (str(venv / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check")
            for command in ((sys.executable, "-m", "venv", str(venv)), (*pip, "-r", str(REQUIREMENTS))):
                if subprocess.run(command).returncode != 0:
                    raise BenchError(
                        f"`{' '.join(command)}` failed: without the peers there is nothing to compare with"
                    )
            stamp.write_text(wanted)
        return Peers(venv)

    def command(self, name: str) -> str:
        """A command of the environment."""
        return str(self.venv / "bin" / name)

    def missing(self, *names: str) -> list[str]:
        """Why candidates that need these system tools are left out; nothing if all are here."""
        return [f"{name}: not installed here, and only root can" for name in names if not shutil.which(name)]

    def versions(self) -> dict[str, str]:
        """Tool -> version, as the tools themselves say."""
        names = [line.partition("==")[0] for line in REQUIREMENTS.read_text().split()]
        script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        answer = subprocess.run([self.command("python"), "-c", script, *names], capture_output=True, check=True)
        found: dict[str, str] = json.loads(answer.stdout)
        for name in SYSTEM_TOOLS:
            if shutil.which(name):
                said = subprocess.run(
                    [name, "--version"], capture_output=True, text=True, check=True
                ).stdout.splitlines()[0]
                found[name] = match[0] if (match := re.search(r"\d+(\.\d+)+", said)) else said
        return found
