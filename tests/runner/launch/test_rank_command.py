"""How each command starts its ranks: by the same Python, and never two in one folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.run_config import SlurmConfig
from runner.errors import UsageError
from runner.launch.place import Start
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import hold_run_folder
from runner.training.components.device import dropout_seed
from runner.trials import evaluate as evaluation

SRUN = ("--container-mounts=/scratch", "--environment=/home/me/ngc.toml")
CONTAINER = ("apptainer", "exec", "--nv", "image.sif")


def run_in(folder: Path) -> Any:
    """What the launchers use of a `Run`."""
    return SimpleNamespace(
        folder=RunFolder(folder),
        config=SimpleNamespace(
            path=Path("a.yaml"),
            environment=None,
            hang_after="auto",
            slurm=SlurmConfig(srun=SRUN, container=CONTAINER),
        ),
        inputs=SimpleNamespace(environment=None),
        bundle=Path("bundle"),
        overrides=(),
        write_config=lambda: None,
    )


def test_a_second_evaluation_of_a_run_leaves_the_first_one_alone(tmp_path: Path) -> None:
    run = run_in(tmp_path / ".evaluate-run")
    run.folder.make()
    (run.folder.logs / "rank-0.log").write_text("of the first")
    chosen = evaluation.Evaluation(run, None, "step-8")
    with (
        hold_run_folder(run.folder, {}),
        pytest.raises(UsageError, match="works in this run folder"),
    ):
        evaluation._launch(chosen, Start(), {})
    assert (run.folder.logs / "rank-0.log").exists()


def test_dropout_is_seeded_by_a_function_that_no_version_of_python_changes() -> None:
    assert dropout_seed(42, 7, 1) == 8033518362486211898
    numbers = {dropout_seed(s, step, rank) for s in (1, 2) for step in (0, 1) for rank in (0, 1)}
    assert len(numbers) == 8 and all(0 <= number < 2**63 for number in numbers)
