"""The files of a run folder, and how they are written.

There is one folder per run; `RunFolder` owns every name in it. `metrics.jsonl` grows by one object
per logged step. A resumed run first cuts it to the step of its checkpoint, so that each step is
recorded once.
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

from runner.from_stage import __version__, write_atomically
from runner.slurm.requeue import STEP, STOPPED

HOLDER = "holder"
"""The file in the folder of a lock."""

WORK = "work"
"""The working folder of a command, in its run folder."""

PULLED = "pulled.json"
"""What `runner pull` brought into a folder."""

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "peft",
    "safetensors",
    "numpy",
    "pyarrow",
)


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files."""

    root: Path

    @property
    def config(self) -> Path:
        """The run file with all default values."""
        return self.root / "config.yaml"

    @property
    def resolved(self) -> Path:
        """What is decided about the newest start (`runner.launch.resolved`)."""
        return self.root / "resolved.json"

    @property
    def handed_over(self) -> Path:
        """The same for its ranks (`runner.launch.resolved`)."""
        return self.root / "resolved.pickle"

    @property
    def micro(self) -> Path:
        """Which micro batches did not fit (`runner.launch.supervise`)."""
        return self.root / "micro.json"

    @property
    def environment(self) -> Path:
        """A record of the machine, the versions and the job."""
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """The logs of the ranks and of Slurm."""
        return self.root / "logs"

    @property
    def submitted(self) -> Path:
        """The number of the job that was submitted last; its log may never be written."""
        return self.root / "submitted"

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
        """The lock of the launcher that trains here (`runner.run_folder.run_lock`)."""
        return self.root / "running" / HOLDER

    @property
    def submitter(self) -> Path:
        """The lock of the `runner submit` that is at work here."""
        return self.root / "submitting" / HOLDER

    @property
    def intent(self) -> Path:
        """The jobs there were before an sbatch whose answer has not come."""
        return self.root / "submit.intent"

    @property
    def stopped(self) -> Path:
        """Rank 0 writes it, after a barrier, when all ranks have saved on a signal."""
        return self.root / STOPPED

    @property
    def step(self) -> Path:
        """Of a command whose job has `slurm.srun`: what the launcher and the script agree on."""
        return self.root / STEP

    @property
    def project(self) -> Path:
        """Of a command: the archive of the user's project."""
        return self.root / "project.tar"

    @property
    def packed(self) -> Path:
        """What is in that archive."""
        return self.root / "project.json"

    @property
    def work(self) -> Path:
        """Of a command: its working folder, a copy of the project and what it wrote."""
        return self.root / WORK

    @property
    def task(self) -> Path:
        """Of a command: what each of its processes that srun starts is to become."""
        return self.root / "task.json"

    @property
    def limit(self) -> Path:
        """Of a command: the name of the signal that its ranks are to get now."""
        return self.root / "limit"

    @property
    def missing(self) -> Path:
        """Of a command: what it asked for and the bundle does not have, as lines of a manifest."""
        return self.root / "missing.yaml"

    @property
    def stores(self) -> Path:
        """Tokenised data, shared with the other runs in the parent folder."""
        return self.root.parent / ".stores"

    def make(self) -> None:
        """Creates the folder and its subfolders."""
        for folder in (self.root, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)


class MetricsLog:
    """Appends to `metrics.jsonl`. Only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line, and closes the file: it survives the end of a killed job."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")

    def cut_back(self, step: int) -> str:
        """Removes the lines after `step`, from which the run resumes.

        Returns:
            What is missing of the steps before: a disk or a power cut took it. Empty: nothing.
        """
        kept = list(read_metrics(self._path)) if self._path.exists() else []
        kept = [line for line in kept if line["step"] <= step]
        if self._path.exists():
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        lost = step - len({line["step"] for line in kept if "loss" in line})
        if lost <= 0:
            return ""
        return f"{self._path}: {lost} of the {step} steps so far cannot be read in it"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; what is damaged, or not whole yet, is skipped."""
    with open(path, "rb") as file:
        yield from filter(None, map(metrics_line, file))


def metrics_line(raw: bytes) -> dict[str, Any] | None:
    """Reads one line of metrics; None if it is damaged or incomplete."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return found if isinstance(step, int) and abs(step) <= 2**53 else None


def _finite(value: Any) -> Any:
    """Replaces inf and nan by null: JSON has neither, and an fp16 step may overflow."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment_record(facts: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The content of `environment.json`.

    Args:
        facts: what the run itself adds.

    Returns:
        `facts`, the machine, versions, the Slurm job, and the git commit of the current folder.
    """
    slurm = {key: environ[key] for key in sorted(environ) if key in _SLURM_VARIABLES}
    return {
        **facts,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"airlift": __version__}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "slurm": slurm or None,
        "git_commit": _git_commit(Path.cwd()),
        "command": sys.argv,
    }


_SLURM_VARIABLES = frozenset(
    f"SLURM_{name}"
    for name in (
        "JOB_ID",
        "JOB_NODELIST",
        "JOB_PARTITION",
        "NNODES",
        "NTASKS",
        "CLUSTER_NAME",
        "RESTART_COUNT",
    )
)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    write_atomically(path, (json.dumps(document, indent=1, default=str) + "\n").encode())


def read_json(path: Path) -> Any:
    """What a JSON file has; None: it is not there, or it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


EXPORTED = "exported_step"
"""In `environment.json`: the step after which `model/` was exported.

null: `model/` is older than the run. Absent: an older version wrote the folder.
"""


ENDED_EARLY = "ended_early"
"""In `environment.json`: the step at which `evaluation.patience` ended the run, if it did."""


WEIGHTS_OF = "exported_weights_step"
"""In `environment.json`: the step whose weights `model/` has, where `checkpoint.best` chose an
earlier one than the last."""


def exported(folder: RunFolder) -> dict[str, Any]:
    """What `note_export` recorded, to keep it when the record is rewritten; empty if nothing."""
    found = read_json(folder.environment)
    known = found if isinstance(found, dict) else {}
    return {key: known[key] for key in (EXPORTED, ENDED_EARLY, WEIGHTS_OF) if key in known}


def note_export(
    folder: RunFolder, step: int | None, *, early: bool = False, weights: int | None = None
) -> None:
    """Records the step after which `model/` was exported.

    Args:
        folder: of the run.
        step: None: `model/` is older than the run.
        early: whether the run ended there, before all its steps.
        weights: the step whose weights were exported; None: those of `step`.
    """
    found = json.loads(folder.environment.read_text(encoding="utf-8"))
    found.pop(ENDED_EARLY, None)
    found.pop(WEIGHTS_OF, None)
    ended = {ENDED_EARLY: step} if early else {}
    chosen = {WEIGHTS_OF: weights} if weights not in (None, step) else {}
    write_json(folder.environment, {**found, EXPORTED: step, **ended, **chosen})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class GitError(Exception):
    """Git says nothing about a folder. Its text is the reason."""


def ask_git(folder: Path, *words: str, timeout_s: float = 10.0) -> str:
    """What a command of git prints in a folder.

    Args:
        timeout_s: a dead network disk must not keep the run from starting.

    Returns:
        Its output; bytes that are not UTF-8, in names of files, are surrogates.

    Raises:
        GitError: no checkout, one that git does not trust, no git.
    """
    # A hook of git sets variables that name another checkout than that of the folder.
    environ = {key: text for key, text in os.environ.items() if key not in _OF_GIT_HOOKS}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise GitError("there is no git program") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git: {error}") from None
    if done.returncode != 0:
        reason = done.stderr.strip().partition("\n")[0]
        raise GitError(f"git: {reason.removeprefix('fatal: ')}")
    return done.stdout


_OF_GIT_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


def _git_commit(folder: Path) -> str | None:
    """The git commit of a folder; None if it is not in a repository or git is not installed."""
    try:
        return ask_git(folder, "rev-parse", "HEAD").strip()
    except GitError:
        return None
