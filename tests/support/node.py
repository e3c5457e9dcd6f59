"""A node as a shell script sees it: its own PATH, with programs that answer as on a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[2] / "stage" / "templates"

SHELLS = [
    command
    for command in (["dash"], ["bash"], ["busybox", "sh"], ["ksh"], ["zsh", "--emulate", "sh"])
    if shutil.which(command[0])
]
TOOLS = (
    "sh", "sed", "tr", "cut", "sort", "grep", "sleep", "cat", "rm", "mkdir", "uname", "kill", "env",
    "awk", "chmod", "df", "dirname", "id", "ln",
)  # fmt: skip

HEADER = "| NVIDIA-SMI {driver}             Driver Version: {driver}      {cuda} |"


class Node:
    """A folder of programs, the only one on PATH, with the commands that a test adds."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.folder = folder
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for script in ("env-probe.sh", "env-check.sh"):
            # The script also searches the usual folders, where this machine's sinfo would answer.
            text = re.sub(
                r"^PATH=\$PATH:.*$", "", (TEMPLATES / script).read_text(), flags=re.MULTILINE
            )
            (folder / script).write_text(text)
        self.add("getconf", 'echo "glibc 2.28"')

    def add(self, name: str, body: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def add_gpu(self, name: str, driver: str, capability: str | None, cuda: str = "") -> None:
        """Adds an nvidia-smi. Drivers before 510 do not know `compute_cap` (`capability`: None)."""
        rows = f"{driver}, {capability}, {name}"
        refusal = 'Field "compute_cap" is not a valid field to query.'
        self.add(
            "nvidia-smi",
            f"""case "$*" in
              *compute_cap*) {f"echo '{rows}'" if capability else f"echo '{refusal}'; exit 2"} ;;
              *driver_version,name*) echo '{driver}, {name}' ;;
              *) echo '{HEADER.format(driver=driver, cuda=cuda)}' ;;
            esac""",
        )

    def run(
        self, script: str, *arguments: object, shell: Sequence[str] = ("sh",), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of the scripts. Only this node's programs are on PATH."""
        program = shutil.which(shell[0])
        assert program
        command = [program, *shell[1:], str(self.folder / script), *map(str, arguments)]
        env = {
            "PATH": str(self.bin),
            "TMPDIR": str(self.folder),
            "HOME": str(self.folder),
            **environment,
        }
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
