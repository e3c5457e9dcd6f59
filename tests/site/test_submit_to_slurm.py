"""`runner submit` with a real sbatch: it finds first what Slurm would reject now or later."""

from __future__ import annotations

import pytest

from tests.site.conftest import Site
from tests.site.test_launch_on_slurm import PROGRAM

pytestmark = pytest.mark.site


@pytest.mark.parametrize(
    ("change", "says", "remedy"),
    [
        ('partition="gpu"', "invalid partition specified: gpu", "sinfo -s"),
        ("gpus_per_node=9", "node configuration is not available", "slurm.gpus_per_node"),
        ("nodes=3", "node configuration is not available", "Lower slurm.nodes: it is 3"),
        ('options={"gres": "gpu:a800:1"}', "node configuration is not available", "sinfo"),
        ('options={"no-such-option": "1"}', "unrecognized option", "slurm.options"),
        (
            'time="3-00:00:00"',
            "more than partition batch allows, 2-00:00:00",
            "requeued and resumes",
        ),
        ('time="1h"', "'1h' is not a time limit", "HH:MM:SS"),
    ],
)
def test_a_job_that_could_not_start_is_refused_with_the_way_out(
    site: Site, change: str, says: str, remedy: str
) -> None:
    refused = site.python(
        PROGRAM, "submit", str(site.home / "refused"), "meet", change, check=False
    )
    assert refused.returncode != 0
    assert says in refused.stderr
    assert remedy in refused.stderr
    assert site.run("squeue", "--noheader").stdout == ""


def test_a_second_job_for_the_same_run_folder_is_refused_while_the_first_is_queued(
    site: Site,
) -> None:
    folder = str(site.home / "once")
    first = int(site.python(PROGRAM, "submit", folder, "save_when_asked").stdout)
    refused = site.python(PROGRAM, "submit", folder, "save_when_asked", check=False)
    assert f"job {first} (" in refused.stderr
    assert f"scancel {first}" in refused.stderr
    site.run("scancel", str(first))
    site.wait_for_end(first)


def test_a_run_folder_with_any_name_gets_its_log(site: Site) -> None:
    folder = site.home / 'it\'s 100% "mine" #1 %j'
    job = int(site.python(PROGRAM, "submit", str(folder), "meet").stdout)
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "rank 0 listens on" in (folder / "logs" / f"slurm-{job}.out").read_text()


def test_a_rank_gets_its_share_of_what_the_nodes_have(site: Site) -> None:
    code = (
        "from runner.launch.submit import *; s = node_shapes(None); "
        "print(cpus_per_task(s, 2, 2)); print(s)"
    )
    said = site.python("-c", code).stdout
    assert said.startswith("(2, ")
    assert said.count("NodeShape(cpus=4, gpus=2, memory=") == 2
