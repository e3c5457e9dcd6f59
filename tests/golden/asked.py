"""The golden of questions: how often the commands on the demo's run ask Slurm.

A login node is shared, and so is Slurm's controller. The programs of Slurm are stand-ins that write
down each call.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from scripts.lib.demo.repositories import make_repositories
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.first_job.harness import programs, run_runner
from tests.support.staging import fetch_bundle

ROOT = Path(__file__).resolve().parents[2]
RUN = "demo.yaml --bundle bundle"
BODIES = {
    "sinfo": 'echo "cpu*|8|64000|(null)|1-00:00:00"',
    "squeue": 'case "$*" in *--jobs=17*%T*) echo RUNNING ;; esac',
    "sbatch": 'case "$*" in *--test-only*) echo "Job 17 to start" >&2 ;; *) echo 17 ;; esac',
    "scontrol": "exit 1",
    "sacct": "exit 1",
    "scancel": "exit 1",
    "srun": "exit 1",
}
COMMANDS = (
    f"check {RUN}",
    f"submit {RUN} --print",
    f"submit {RUN}",
    "status",
    "status output/demo",
    "logs output/demo",
    f"train {RUN} --dry-run",
)


def record(folder: Path) -> str:
    """A line for each command: its exit code, and how often it asks each program."""
    shutil.copy(ROOT / "manifests/demo.yaml", folder)
    with LoopbackHub(folder / "hub") as hub:
        make_repositories(hub.repositories)
        fetch_bundle(folder, "demo", hub.endpoint, "--no-offline-check")
    shutil.copy(ROOT / "runs/demo.yaml", folder)
    calls = folder / "calls"
    bodies = {name: f'echo {name} >>"{calls}"; {body}' for name, body in BODIES.items()}
    cluster, lines = programs(folder / "bin", **bodies), list[str]()
    state = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    for command in COMMANDS:
        calls.write_text("")
        code = run_runner(folder, *command.split(), PATH=cluster, **state).code
        asked = Counter(calls.read_text().split())
        counts = ", ".join(f"{name} {asked[name]}" for name in sorted(asked)) or "none"
        lines.append(f"runner {command}: exit {code}; {counts}\n")
    return "".join(lines)
