"""Two laptops, one name, two texts of the run file: by ssh, up to a Slurm that is a stand-in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from runner.from_stage import __version__
from tests.runner.remote.conftest import RUN, Laptop
from tests.runner.remote.far import TOOLS
from tests.support.waiting import wait_for

SUBMIT = ("submit", "runs/my.yaml", "--to", "far")
RUNNER = """\
case $1 in
  --version) echo "runner, version {version}" ;;
  check) sleep {check_s} ;;
  status) exit 1 ;;
  submit)
    mkdir -p output/my
    [ ! -s {queue} ] || {{ echo "error: job 17 (pending) already writes output/my" >&2; exit 2; }}
    echo "exec runner train $PWD/$3" >output/my/submit.sbatch
    echo 17 >output/my/submitted && echo 17 >{queue} ;;
esac
"""
SQUEUE = """\
[ -s {queue} ] || exit 0
case $* in *-j*) echo PENDING ;; *) echo "job=17|PENDING|{there}/output/my/submit.sbatch" ;; esac
"""


@pytest.fixture
def laptops(laptop: Laptop, programs: Path, tmp_path: Path) -> tuple[Laptop, Laptop]:
    for tool in (*TOOLS, "rsync"):
        if not (programs / tool).exists():
            (programs / tool).symlink_to(shutil.which(tool) or tool)
    words = {"queue": tmp_path / "queue", "there": laptop.there, "version": __version__}
    texts = {"sbatch": "", "squeue": SQUEUE, "runner": RUNNER}
    for name, text in texts.items():
        (programs / name).write_text("#!/bin/sh\n" + text.format(**words, check_s=3))
        (programs / name).chmod(0o755)
    other = replace(laptop, folder=tmp_path / "other")
    shutil.copytree(laptop.folder, other.folder)
    other.run_file.write_text(RUN.replace("steps: 4", "steps: 777"))
    return laptop, other


def code_of(laptop: Laptop) -> int:
    """The exit code of a submit."""
    try:
        laptop.runner(*SUBMIT)
    except AssertionError as refused:
        assert "error: " in str(refused), refused
        return 2
    return 0


def made_with(laptop: Laptop) -> str:
    """The text of the run file that the job there reads."""
    script = (laptop.there / "output/my/submit.sbatch").read_text()
    return Path(script.split()[-1]).read_text()


@pytest.mark.parametrize(
    "later",
    [
        Path.exists,
        lambda there: (there / ".airlift/lock/step").exists(),
        lambda there: (there / "output/my/submitted").exists(),
    ],
    ids=["at once", "within its walk", "after it"],
)
def test_the_job_reads_the_text_of_the_laptop_that_is_told_so(
    laptops: tuple[Laptop, Laptop], later: Callable[[Path], bool]
) -> None:
    first, second = laptops
    with ThreadPoolExecutor() as pool:
        one = pool.submit(code_of, first)
        wait_for(lambda: later(first.there))
        is_begun = (first.there / ".airlift/lock/step").exists() or not one.running()
        two = pool.submit(code_of, second)
        codes = (one.result(), two.result())
    # At once: the plan of one is replaced before go.sh has read it, and that one is refused.
    assert codes == (0, 2) or (codes == (2, 0) and not is_begun)
    winner, loser = (first, second) if codes[0] == 0 else (second, first)
    assert made_with(winner) == winner.run_file.read_text()
    said = loser.runner(*SUBMIT, code=2)
    assert "was submitted with another text of this file" in said, said
    # A clean-up there takes the run file that the job is to read: the same command puts it back.
    for folder in first.there.glob("runs-*"):
        shutil.rmtree(folder)
    assert "job 17" in winner.runner(*SUBMIT)
    assert made_with(winner) == winner.run_file.read_text()
    shown = winner.runner(*SUBMIT, "--dry-run")
    assert shown.count("# done") == 6, shown  # there is no environment to make
