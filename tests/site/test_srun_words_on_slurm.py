"""`slurm.srun`: ranks whose Python is only in a container, started by the script alone."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.site.conftest import Site, log
from tests.site.test_train_on_slurm import losses
from tests.support.environment.site import bubblewrap, skip_without_bubblewrap

pytestmark = pytest.mark.site

ENVIRONMENT = Path(sys.executable).parents[1]


@pytest.fixture(scope="module")
def inside(site: Site) -> Path:
    """Where the environment is, in a container alone; outside, this folder is empty."""
    inside = site.home / "inside"
    site.run("mkdir", str(inside))
    return inside


def written(site: Site, words: list[str], name: str, *ranks: str) -> tuple[Path, Path]:
    """The script, made inside by the Python that is only there; and the run folder."""
    output = site.home / "output" / name
    python, runner = site.home / "inside/bin/python", site.home / "inside/bin/runner"
    listed = f"slurm.srun={json.dumps(words)}"
    sets = ["--set", listed, *(word for s in ranks for word in ("--set", s))]
    run, bundle = str(site.home / "tiny.yaml"), str(site.home / "bundle")  # it starts in /
    submit = ["submit", run, "--bundle", bundle, "--output", str(output), *sets]
    submit = ["srun", "--ntasks=1", *words, str(python), str(runner), *submit, "--print"]
    done = site.run(*submit)
    script = site.folder / f"{name}.sbatch"
    script.write_text(done.stdout)
    script.chmod(0o644)
    assert f"{shlex.join(words)} env -u RANK" in done.stdout and "exec " not in done.stdout
    site.run("mkdir", "-p", str(output / "logs"))
    return script, output


@pytest.mark.slow  # test_train_on_slurm.py has a stopped job without a container
def test_a_stopped_job_of_a_container_is_requeued_and_ends_with_the_same_losses(
    site: Site, bundle: Path, inside: Path, undisturbed: Path
) -> None:
    less = ("slurm.tasks_per_node=1", "batch.micro=4")
    skip_without_bubblewrap()
    words = bubblewrap(ENVIRONMENT, inside, Path("/tmp"), site.folder)
    script, run_folder = written(site, words, "in-container", *less)
    assert not (inside / "bin").exists()
    job = site.job_number(site.run("sbatch", "--parsable", str(script)).stdout)
    site.wait(lambda: len(losses(run_folder)) >= 2, why=lambda: log(run_folder))
    site.run("scancel", "--signal=TERM", str(job))
    site.wait(lambda: "resumed from step-" in log(run_folder), why=lambda: log(run_folder))
    ended = site.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(run_folder)
    assert f"job {job} goes back in the queue (restart 1 of at most 32)" in log(run_folder)
    assert losses(run_folder) == losses(undisturbed)
    assert not (run_folder / "stopped").exists()
