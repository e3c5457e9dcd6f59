"""`runner exec`, `runner status` and `runner logs` in and around jobs of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.site.conftest import REPOSITORY, RUNNER, Site

pytestmark = pytest.mark.site

HERE = (
    "env",
    f"PYTHONPATH={REPOSITORY}",
    *RUNNER,
)  # this checkout's runner, whichever is installed
ASK = """\
import os, socket
from huggingface_hub import HfApi, hf_hub_download
HfApi().model_info("acme/tiny-bert")
size = os.path.getsize(hf_hub_download("acme/tiny-bert", "config.json"))
print("ASKED", os.environ["SLURM_PROCID"], size > 0,
      os.path.dirname(os.environ["HF_HUB_CACHE"]), flush=True)
"""


def test_each_task_of_a_step_on_two_nodes_finds_the_bundle_and_nothing_stays(
    site: Site, bundle: Path
) -> None:
    (site.home / "ask.py").write_text(ASK)
    command = f"{' '.join(HERE)} exec --bundle {bundle} -- {sys.executable} ask.py"
    (site.home / "ask.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --output=ask.out --time=5\n"
        f"srun --ntasks=4 {command}\necho LEFT; srun --ntasks-per-node=1 --ntasks=2 sh -c "
        '\'pgrep -f "[s]tage serve" && echo SERVER; '
        "ls -d /tmp/airlift-*-$SLURM_JOB_ID/exec && echo CACHES; true'\n"
    )
    number = int(site.run("sbatch", "--parsable", "ask.sbatch").stdout.split(";")[0])
    assert site.wait_for_end(number)["JobState"] == "COMPLETED", (site.home / "ask.out").read_text()
    asked, _, left = (site.home / "ask.out").read_text().partition("LEFT")
    answers = sorted(line.split() for line in asked.splitlines() if line.startswith("ASKED"))
    assert [words[1:3] for words in answers] == [[str(rank), "True"] for rank in range(4)], asked
    assert asked.count("runner exec: bundle") == 1  # by the first task alone
    assert "SERVER" not in left and "CACHES" not in left, left


def test_a_waiting_and_a_cancelled_job_are_described(site: Site, bundle: Path) -> None:
    output = site.home / "held"
    sets = ("--set", "slurm.options={hold: true}", "--set", "name=held")
    said = site.run(
        *HERE, "submit", "tiny.yaml", "--bundle", str(bundle), "--output", str(output), *sets
    ).stdout
    number = site.job_number(said)
    shown = site.run(*HERE, "status", str(number)).stdout
    assert "waiting" in shown and "scontrol release" in shown and str(output) in shown
    site.run("scancel", str(number))
    site.wait_for_end(number)
    document = json.loads(site.run(*HERE, "status", str(output), "--json").stdout)
    assert document["state"] == "stopped" and document["job"]["state"] == "CANCELLED"
