"""Two ranks write one checkpoint: full disks, quotas and old listings of one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.training.saving.conftest import names

# Two ranks. The second's disk is full while it writes, then when it syncs its part (a quota on
# NFS). Then its listing is old: it sees only its own files.
TWO_RANKS = """
import os, sys
from pathlib import Path
import torch.distributed as dist
import torch.multiprocessing as mp

def full(*arguments):
    raise OSError(28, "No space left on device")

def one(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    from runner.training.components import process_group as module
    from runner.config.engine import CheckpointConfig
    from runner.run_folder.training_state import TrainingState
    from runner.training.saving.checkpoints import Checkpoints
    class Engine:
        save = None
    engine = Engine()
    checkpoints = Checkpoints(
        Path(folder) / "checkpoints", CheckpointConfig(keep=2), module.Ranks(), print
    )
    def attempt(step):
        try:
            checkpoints.save(engine, TrainingState(step, 2, 2, "fp32", {}))
        except OSError as error:
            os.write(1, f"step {step}, rank {rank}: {error.strerror or error}\\n".encode())
    write, sync = lambda into: (into / f"part-{rank}").write_text("x"), os.fsync
    engine.save = full if rank == 1 else write
    attempt(2)
    engine.save = write
    os.fsync = full if rank == 1 else sync
    attempt(4)
    os.fsync = sync
    attempt(6)
    rglob = Path.rglob
    if rank == 1:
        Path.rglob = lambda path, pattern: (p for p in rglob(path, pattern) if p.name == "part-1")
    attempt(8)
    os.write(1, f"rank {rank} goes on from {checkpoints.newest_whole()[0].name}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    import runner.training.saving.checkpoints  # once: the ranks are forked
    Path(sys.argv[1], "checkpoints").mkdir()
    mp.start_processes(one, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of their checkpoints, and their output."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "two.py").write_text(TWO_RANKS)
    command = [sys.executable, "two.py", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / "checkpoints", sorted(done.stdout.splitlines())


def test_a_listing_that_is_old_on_one_node_leaves_no_file_out_and_none_twice(
    two_ranks: tuple[Path, list[str]],
) -> None:
    folder, said = two_ranks
    listed = [
        entry["path"]
        for entry in json.loads((folder / "step-8" / "files.json").read_text())["files"]
    ]
    assert listed == ["part-0", "part-1", "state.json"]
    assert [line for line in said if "goes on" in line] == [
        f"rank {rank} goes on from step-8" for rank in (0, 1)
    ]


def test_a_disk_full_for_one_rank_is_full_for_all_and_the_next_checkpoint_is_whole(
    two_ranks: tuple[Path, list[str]],
) -> None:
    folder, said = two_ranks
    assert [line for line in said if "goes on" not in line] == [
        f"step {step}, rank {rank}: No space left on device" for step in (2, 4) for rank in (0, 1)
    ]
    assert names(folder) == {"step-6", "step-8", "latest"}
