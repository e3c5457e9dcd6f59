"""Kills and stops: the same command resumes as if nothing had happened.

Each kind has one real run here. test_checkpoints has the variants, test_kills random moments.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.runner.conftest import Cluster, assert_same_story
from tests.support.waiting import wait_for
from tests.support.warm import HOOK, warm_python

# Runs in every rank (tests.support.warm). Rank 1 or 0 kills itself, as the kernel's out-of-memory
# killer would, when it is about to do the named thing. The second time nothing happens.
KILL_ITSELF = """
import os, signal, sys
rank, event, ending = os.environ["KILL_RANK"], os.environ["KILL_EVENT"], os.environ["KILL_AT"]
flag = os.environ["KILL_FLAG"]
def hook(name, arguments):
    if name == event and os.environ.get("RANK") == rank and str(arguments[0]).endswith(ending):
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""

# Runs in every rank: the third step ends when the stop signal is here, however fast the steps are.
WAIT_FOR_STOP = """
import time
from runner.training.loop import Trainer
add_up = Trainer.add_up
def add_up_then(trainer, summed, next_step):
    while next_step == 4 and trainer.stop.received is None:
        time.sleep(0.01)
    return add_up(trainer, summed, next_step)
Trainer.add_up = add_up_then
"""


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def site_folder(cluster: Cluster, code: str) -> dict[str, str]:
    """Makes every Python process run `code` at its start.

    A run keeps only one folder of PYTHONPATH: the one that `runner` is imported from. So the code
    must be in it.
    """
    folder = cluster.folder / "site"
    folder.mkdir(exist_ok=True)
    for package in ("runner", "stage"):
        if not (folder / package).exists():
            (folder / package).symlink_to(Path(__file__).parents[3] / package)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_stopped_then_killed_in_mid_checkpoint_a_run_loses_nothing_but_time(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    undisturbed = trained_at(2)
    cluster.take_data(undisturbed)
    cluster.write(engine={"zero": 2})
    stopped_by_ctrl_c(cluster)
    killed_in_mid_checkpoint(cluster, "0", "open", "step-8.tmp/files.json")
    finished = cluster.run("train", "tiny.yaml", "--processes", "2")
    assert finished.returncode == 0, finished.stderr
    assert "resumed from step-6" in finished.stdout
    # DeepSpeed's messages belong into the logs.
    assert "DeepSpeed" not in finished.stdout + finished.stderr
    assert "[INFO]" not in finished.stdout + finished.stderr
    assert_same_story(cluster.output(), undisturbed)
    assert not list((cluster.output() / "checkpoints").glob("*.tmp"))


def stopped_by_ctrl_c(cluster: Cluster) -> None:
    """The launcher makes a run save and stop."""
    words = ("train", "tiny.yaml", "--processes", "2", "--set", "checkpoint.every=100")
    process = cluster.start(*words, python=warm_python(), **{HOOK: WAIT_FOR_STOP})
    wait_for(lambda: steps_done(cluster.output()) >= 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5, (out, err)
    assert "run the same command again to resume" in err
    done = steps_done(cluster.output())
    assert done < 7
    assert (cluster.output() / "checkpoints" / f"step-{done}" / "files.json").exists()
    assert not (cluster.output() / "stopped").exists()


def killed_in_mid_checkpoint(cluster: Cluster, rank: str, event: str, at: str) -> None:
    """A rank dies just before that call. No run resumes from the incomplete checkpoint."""
    flag = cluster.folder / f"killed-{at.partition('.')[0]}"
    kill = {"KILL_RANK": rank, "KILL_EVENT": event, "KILL_AT": at, "KILL_FLAG": str(flag)}
    done = cluster.run("train", "tiny.yaml", "--processes", "2", **{HOOK: KILL_ITSELF}, **kill)
    assert flag.exists(), done.stderr
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    torn = [path.name for path in (cluster.output() / "checkpoints").glob("*.tmp")]
    assert torn == [at.partition("/")[0]]
    assert not (cluster.output() / "checkpoints" / Path(torn[0]).stem).exists()
