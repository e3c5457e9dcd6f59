"""`kill -9` of a launcher, of its srun, of both: two launchers never train in one run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remedies.obeyed import obeys
from tests.site.conftest import Site

pytestmark = pytest.mark.site
PROGRAM = str(Path(__file__).parent / "ranks.py")

# In a shell of salloc. `hold` is `runner train` without the training.
PRELUDE = """
python=$0 ranks=$1
hold() { "$python" "$ranks" hold "$@"; }
begin() {  # in folder $1: sets $launcher and $sruns, srun and the child that it watches itself with
    mkdir "$1"
    "$python" "$ranks" hold "$1" train_on >"$1/first" 2>&1 &
    launcher=$!
    until [ "$(ls "$1"/alive-* 2>/dev/null | wc -l)" = 4 ]; do sleep 0.05; done
    srun=$(pgrep -P $launcher -x srun)
    sruns="$srun $(pgrep -P $srun)"
}
again() {  # in folder $1, until it is let in
    for _ in $(seq 100); do
        hold "$1" train_briefly >>"$1/again" 2>&1 && return
        sleep 0.3
    done
    echo "never let in" >>"$1/again"
}
steps() { squeue --noheader --steps --format=%j; }
"""
LAUNCHER_THEN_BOTH = """
begin launcher
kill -9 $launcher
again launcher

begin both
kill -9 $sruns $launcher
sleep 1  # were they to end by themselves
hold both train_briefly >both/refused 2>&1
echo $? >both/code
eval "$(grep -o 'scancel [0-9]*[.][0-9]*' both/refused)"  # its remedy
again both
"""
SRUN = """
begin srun
kill -9 $sruns
wait $launcher
echo $? >srun/code
steps >srun/left
"""


def in_salloc(site: Site, script: str) -> Callable[[str], str]:
    """Runs it; the result reads the files that it wrote."""
    command = ["timeout", "120", "bash", "-c", PRELUDE + script, sys.executable, PROGRAM]
    site.run("salloc", "--nodes=2", "--ntasks-per-node=2", *command)
    return lambda name: (site.home / name).read_text()


@obeys("runner/run_folder/run_lock.py", "scancel {}; then run the same command again.")
def test_ranks_that_outlive_a_killed_launcher_are_never_trained_over(site: Site) -> None:
    said = in_salloc(site, LAUNCHER_THEN_BOTH)
    for name in ("launcher", "both"):
        assert "left by process" in said(f"{name}/again") and "never let in" not in said(
            f"{name}/again"
        )
        assert len({path.name.split("-")[1] for path in (site.home / name).glob("alive-*-3")}) == 2
        together = site.home / name / "together"
        assert not together.exists(), together.read_text()
    assert said("both/code") == "2\n", said("both/refused")
    assert "was killed, and its ranks still run (step " in said("both/refused")


@pytest.mark.slow
def test_a_launcher_whose_srun_is_killed_ends_the_ranks_before_it_leaves(site: Site) -> None:
    said = in_salloc(site, SRUN)
    assert (said("srun/code"), said("srun/left")) == ("5\n", ""), said("srun/first")
    assert "srun was ended by SIGKILL" in said("srun/first")
