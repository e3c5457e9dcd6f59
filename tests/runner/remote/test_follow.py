"""`runner status --to` and `runner logs --to`, where no run is yet; by a real sshd and `go.sh`."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tests.remedies.obeyed import in_it, obeys
from tests.runner.folders import run_folder
from tests.runner.remote.conftest import Laptop
from tests.runner.remote.far import GO

TO = ("--to", "far")


@obeys("runner/run_folder/logs.py", "None is there yet")
def test_the_step_of_go_sh_and_the_runs_that_are_there_are_named(
    laptop: Laptop, programs: Path
) -> None:
    """What the far end printed was for the far end: commands without --to."""
    lock = laptop.there / ".airlift/lock"
    lock.mkdir(parents=True)
    shutil.copy(GO, laptop.there)
    (lock / "holder").write_text("w1 login 1\n")
    (lock / "beat").touch()
    (laptop.there / ".airlift/steps").write_text("w1 verify done 3\nw1 check begin 0\n")
    for words in (("status",), ("status", "runs/my.yaml"), ("logs", "my")):
        said = laptop.runner(*words, *TO, code=5)
        assert "no run is there yet. go.sh is at work there: check." in said, said
        assert "  -> runner status --to far\n" in said
    shutil.rmtree(lock)
    run_folder(laptop.there / "output/second", name="second")
    for words in (("status", "secnd"), ("status", "output/secnd"), ("logs", "secnd")):
        said = laptop.runner(*words, *TO, code=2)
        assert (
            "there is no output/secnd.\n  -> Did you mean `second`? runner status --to far" in said
        )
    (laptop.there / "go.sh").write_text(
        "[ $1 != --state ] || { echo none; exit; }\n"
        f'shift; exec {sys.executable} -m runner "$@"\n'
    )
    said = laptop.runner("logs", "second", *TO, code=2)
    again = in_it(said, "(?<=runner )status output/second --to far").split()
    assert "second: stopped" in laptop.runner(*again)
    (laptop.there / "output/second/logs/slurm-7.out").write_text("of job 7\n")
    for run in ("second", "output/second", "7"):
        assert laptop.runner("logs", run, *TO).endswith("logs/slurm-7.out:\nof job 7\n"), run


def test_a_run_by_its_name_in_another_folder_gets_what_works(
    laptop: Laptop, programs: Path
) -> None:
    other = replace(laptop, folder=laptop.folder / "manifests")
    for command in ("status", "logs", "pull"):
        said = other.runner(command, "my", *TO, code=2)
        assert "no cluster has that name, for there is no clusters.yaml" in said, said
        assert f"looked for: {other.folder}/clusters.yaml, {other.folder}/runs/clusters" in said
        in_it(said, "cd FOLDER, or give RUN by its path")
        for here, run in ((laptop, "my"), (other, "../runs/my.yaml")):
            assert "cluster:" in here.runner(command, run, *TO, code=2)
