"""What is decided about a run: handed to its ranks by a file, and written plainly for people.

The launcher, or `runner prepare`, writes what needs no device. Each rank reads it, and opens
neither the run file nor the bundle's lock. Rank 0 adds the plan, and sends it to the others.
`resolved.json` has the same for people; only its version is read by a program.

A rank that another launcher started compares what it was called with to what `runner prepare`
wrote (`why_not_ready`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from runner.from_stage import UsageError, __version__, write_atomically
from runner.job.plan import MicroBound, TrainingPlan
from runner.job.shapes import Device, ModelShape
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder, write_json


@dataclass(frozen=True)
class Resolved:
    """What is decided about a run.

    Attributes:
        shape: the model's counts.
        stores: `train` and `validation` -> the files of their prepared data.
        data: the key of the training data.
        attempt: counts the starts of the ranks by one launcher, from 1.
        options: of the work that the ranks do, by name.
        bound: what earlier starts have shown of micro batches.
        plan: what `auto` means on the devices; None until rank 0 has decided.
        device: of each rank, known with the plan.
        steps: optimizer steps of the whole run, known with the plan.
        notes: lines that rank 0 prints before the first step.
        version: of Airlift, which may change the format.
    """

    run: TrainingRun
    shape: ModelShape
    stores: Mapping[str, tuple[Path, ...]]
    data: str
    attempt: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    bound: MicroBound | None = None
    plan: TrainingPlan | None = None
    device: Device | None = None
    steps: int = 0
    notes: tuple[str, ...] = ()
    version: str = __version__

    @staticmethod
    def of(run: TrainingRun, **options: Any) -> Resolved:
        """Decides what needs no device.

        Args:
            options: of the work, by name; they fit into JSON.

        Raises:
            StageError: as for `shape_of`, `sequence_length` and `recipes`.
        """
        bound = _read_bound(run.folder)
        return Resolved(run, run.shape, run.stores, run.data, options=options, bound=bound)

    def decided(self) -> TrainingPlan:
        """The plan, after rank 0 has decided."""
        assert self.plan is not None
        return self.plan


def write_resolved(resolved: Resolved) -> None:
    """Writes what is decided into the run folder, atomically; `resolved.json` last."""
    folder = resolved.run.folder
    # A pickle, as `runner.child` sends it. It can run code: an account that may write this file can
    # act as the user. That holds for the whole run folder: a checkpoint of DeepSpeed is a pickle.
    write_atomically(folder.handed_over, pickle.dumps(resolved))
    values = {one.name: getattr(resolved, one.name) for one in fields(resolved)}
    run = values.pop("run")
    for name in ("shape", "bound", "plan", "device"):
        values[name] = asdict(values[name]) if values[name] is not None else None
    write_json(folder.resolved, {"bundle": run.bundle, "overrides": run.overrides, **values})


def read_resolved(folder: RunFolder) -> Resolved:
    """Reads what this version of Airlift has written to the run folder."""
    found: Resolved = pickle.loads(folder.handed_over.read_bytes())
    return found


def tried_with(resolved: Resolved) -> dict[str, str]:
    """What decides how much memory a micro batch takes, and how much there is."""
    config, model, plan = resolved.run.config, resolved.run.inputs.model, resolved.decided()
    device, engine = resolved.device, config.engine.name
    assert device is not None
    return {
        "model": f"{model.source}@{model.commit}",
        "task": config.task,
        "sequence_length": str(plan.sequence_length),
        "precision": plan.precision,
        "engine": f"{engine}, stage {plan.zero}, offload {plan.offload}",
        "optimizer": config.optimizer.name,
        "lora": config.lora.describe() if config.lora else "",
        "quantization": config.quantization.describe() if config.quantization else "",
        "activation_checkpointing": str(config.activation_checkpointing),
        "compile": str(config.compile),
        "device": f"{device.name}, {device.memory} bytes",
        "ranks": str(plan.world_size),
    }


def write_bound(folder: RunFolder, bound: MicroBound) -> None:
    """Keeps what a start has shown of micro batches, for the next start of the run."""
    write_json(folder.micro, asdict(bound))


def _read_bound(folder: RunFolder) -> MicroBound | None:
    try:
        return MicroBound(**json.loads(folder.micro.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # of another version, or none: the guess is tried again


def check_ready(run: TrainingRun) -> None:
    """Refuses a run folder that `runner prepare` did not make ready for this run.

    Args:
        run: what a rank was called with.

    Raises:
        UsageError: it is not ready, or was made ready for something else.
    """
    if why := why_not_ready(run):
        raise UsageError(
            f"{run.folder.root} is not ready for ranks: {why}.",
            f"Once, before the ranks start: {run.command('prepare')}",
        )


def why_not_ready(run: TrainingRun) -> str:
    """The reason, as the end of a sentence; empty: the run folder is ready."""
    try:
        text = run.folder.resolved.read_text(encoding="utf-8")
        version = json.loads(text).get("version", "of an earlier version")
        if version != __version__:  # which may write another format
            return f"it was prepared by Airlift {version}, and this is {__version__}"
        before = read_resolved(run.folder).run
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        # The files are written whole, but a copy of the folder may lack one or have a part of it.
        return "nothing was prepared in it"
    if (before.inputs.bundle, before.inputs.bundle_id) != (run.inputs.bundle, run.inputs.bundle_id):
        return f"it was prepared from bundle {before.inputs.bundle_id[:12]} in {before.bundle}"
    # The path of the run file may be another one, from another folder.
    if replace(before.config, path=run.config.path) == run.config:
        return ""
    if before.overrides != run.overrides:
        options = " ".join(f"--set {override}" for override in before.overrides)
        return f"it was prepared with {options or 'no --set'}"
    return f"{run.config.path} has changed since it was prepared"
