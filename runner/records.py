"""What a run writes down, and how it is read back.

One folder a run (`RunFolder` owns every name in it); `metrics.jsonl` grows by one object a logged step, and is cut back
to the checkpoint a resumed run starts from, so that it always tells one story.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.errors import write_atomically

PACKAGES = (
    "airlift",
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "datasets",
    "safetensors",
    "numpy",
    "pyarrow",
)


@dataclass(frozen=True)
class RunFolder:
    """The names of everything one run writes."""

    root: Path

    @property
    def config(self) -> Path:
        """The run file with every default filled in."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        """Where and with what the run ran."""
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """What the ranks and Slurm said."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """`step-N` folders."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.root / "model"

    @property
    def holder(self) -> Path:
        """Who trains here, while somebody does (`runner.holder`)."""
        return self.root / "running"

    @property
    def stores(self) -> Path:
        """Tokenised data, shared by the runs beside this one."""
        return self.root.parent / ".stores"

    def make(self) -> None:
        """Creates the folder and those inside it."""
        for folder in (self.root, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)


class MetricsLog:
    """Appends to `metrics.jsonl`. Only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, values: Mapping[str, Any]) -> None:
        """One line, on disk when this returns (a killed job keeps what it told)."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")

    def cut_back(self, step: int) -> None:
        """Drops what was logged after `step`: the run goes on from there."""
        if self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["step"] <= step]
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a `metrics.jsonl`; a last line cut off by a kill is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan (an fp16 step that overflowed has such a norm): null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment_record(facts: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What `environment.json` says: versions, machine, Slurm job, the user's own commit, and the run's `facts`."""
    slurm = {key: environ[key] for key in sorted(environ) if key in _SLURM_VARIABLES}
    return {
        **facts,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "slurm": slurm or None,
        "git_commit": _git_commit(Path.cwd()),
        "command": sys.argv,
    }


_SLURM_VARIABLES = frozenset(
    f"SLURM_{name}"
    for name in ("JOB_ID", "JOB_NODELIST", "JOB_PARTITION", "NNODES", "NTASKS", "CLUSTER_NAME", "RESTART_COUNT")
)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    write_atomically(path, (json.dumps(document, indent=1, default=str) + "\n").encode())


EXPORTED = "exported_step"
"""In `environment.json`: after which step `model/` was exported; null while it is older than the run; absent in folders
of versions that did not note it."""


def exported(folder: RunFolder) -> dict[str, Any]:
    """What is noted of the export, for a record that takes the place of the one there; empty where nothing is."""
    try:
        found = json.loads(folder.environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {EXPORTED: found[EXPORTED]} if isinstance(found, dict) and EXPORTED in found else {}


def note_export(folder: RunFolder, step: int | None) -> None:
    """Notes after which step `model/` was exported; None: what is there, or may be, is older than the run now is."""
    found = json.loads(folder.environment.read_text(encoding="utf-8"))
    write_json(folder.environment, {**found, EXPORTED: step})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """The commit of the folder the user works in; None if it is none or git is not there."""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
