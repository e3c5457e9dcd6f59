"""Whether a run folder is ready for ranks that our launcher did not start.

`runner prepare` makes it ready, once: data, config.yaml and resolved.json. A rank compares with
this what it was called with.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from runner.errors import UsageError, __version__
from runner.job.training_run import TrainingRun
from runner.launch.resolved import read_resolved


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
