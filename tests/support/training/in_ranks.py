"""Several runs one after the other in the same ranks: imports take most of the time of a small run.

    python -m tests.support.training.in_ranks RANKS BUNDLE RUN_FILE...

NAME.yaml and NAME.ANYTHING.yaml run in output/NAME beside them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def one_rank(rank: int, world_size: int, meeting: str, bundle: str, run_files: list[str]) -> None:
    """Rank `rank` of all runs."""
    os.environ.update(
        {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", AIRLIFT_MEETING_FILE=meeting,
    )  # fmt: skip
    import torch.distributed as dist

    from runner.job.training_run import TrainingRun
    from runner.launch.ranks import RankInfo
    from runner.training.reporting import open_console
    from tests.support.training.one_start import begin

    for path in map(Path, run_files):
        run = TrainingRun.load(
            path, Path(bundle), path.parent / "output" / path.stem.partition(".")[0], ()
        )
        run.folder.make()
        with open_console(run.folder.logs / f"rank-{rank}.log") as console:
            trainer = begin(run, RankInfo.of(os.environ), console)
            trainer.resume()
            trainer.run()
            trainer.export()
            trainer.observer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        ranks = int(sys.argv[1])
        arguments = (ranks, f"{folder}/ranks", sys.argv[2], sys.argv[3:])
        start_processes(one_rank, arguments, nprocs=ranks, start_method="fork")
