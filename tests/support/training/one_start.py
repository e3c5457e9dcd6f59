"""A start of a run in ranks that have met already, or in one rank of this process alone."""

from __future__ import annotations

import torch.distributed as dist

from runner.job.training_run import TrainingRun
from runner.launch.ranks import Rank, RankInfo
from runner.launch.resolved import Resolved
from runner.run_folder.heartbeat import Heartbeat
from runner.training.components.device import StopRequest, find_device, gpu_uuid
from runner.training.components.process_group import RankFacts, Ranks, meet, open_store
from runner.training.loop import Trainer
from runner.training.reporting import Console
from runner.training.setup import decide_once, make_trainer


def place_alone() -> RankInfo:
    """The info of the only rank."""
    return RankInfo.of(
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "1"}
    )  # fmt: skip


def begin(run: TrainingRun, info: RankInfo, console: Console) -> Trainer:
    """What a rank has loaded. Ranks that have not met meet at AIRLIFT_MEETING_FILE."""
    device, facts = find_device(info.local_rank, info.local_world_size, run.config.slurm)
    if dist.is_initialized():
        ranks = Ranks()
    else:
        rank = Rank(info, Heartbeat(run.folder.logs, info.rank))
        ranks = meet(rank, open_store(rank), run.config.engine.name, device.type)
    seen = RankFacts.of(info, facts, gpu_uuid(device), run.inputs.bundle)
    whole = decide_once(ranks, Resolved.of(run), seen)
    heartbeat = Heartbeat(run.folder.logs, info.rank)
    return make_trainer(whole, ranks, device, facts, StopRequest(), console, heartbeat)
