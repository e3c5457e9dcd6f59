"""What the ranks do together besides the engine's work: join, agree, wait, share small values.

`Ranks` uses a gloo group of its own, so it works the same on GPUs and CPUs and uses no device.

`check_agreement` finds ranks with different settings before training; later they would only wait
for each other. A rank decides `auto` settings from its own device, and reads files from its node's
disk. So a node with fewer or other GPUs, or with another copy of the run file, decides differently.
"""

from __future__ import annotations

import hashlib
import os
import platform
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import Inputs
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device
from runner.launch.environment import RankEnvironment
from runner.launch.reach import explain_joining, says_lost_peer, wait_for_rank_0
from runner.run_folder.heartbeat import JOIN, LOAD, Heartbeat, flight_prefix

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(hours=1)  # a rank may be busy with writing a large checkpoint
STEP_TIMEOUT = timedelta(minutes=30)


def meet(
    engine: str, device: str, place: RankEnvironment, meeting_file: str | None, heartbeat: Heartbeat
) -> Ranks:
    """Joins the other ranks, waits until all have joined, and makes the gloo group of `Ranks`.

    Args:
        engine: `engine.name` of the run file.
        device: `cuda` or `cpu`.
        place: this rank's number and the addresses.
        meeting_file: as for `join`.
        heartbeat: where rank 0 shows that it listens.

    Raises:
        NeverMetError: another rank cannot be reached from this node.
        StageError: rank 0 gave up.
    """
    try:
        with heartbeat.beating(JOIN):
            if meeting_file is None and place.rank != 0 and not dist.is_initialized():
                wait_for_rank_0(
                    place.rank,
                    place.master_addr,
                    place.master_port,
                    heartbeat.logs,
                    started=heartbeat.started,
                )
            join(engine, device, place, meeting_file)
            if device == "cuda":
                # NCCL connects at the first use, not before.
                dist.all_reduce(torch.zeros(1, device=device))
            ranks = Ranks()
    except RuntimeError as error:
        explained = explain_joining(error, place.rank, place.master_addr, place.master_port)
        if explained is None:
            raise
        traceback.print_exc()
        raise explained from None
    flight = flight_prefix(heartbeat.logs)
    heartbeat.when_asked_for_stacks(
        lambda: write_collectives(flight.with_name(f"{flight.name}{place.rank}"))
    )
    heartbeat.beat(LOAD)
    return ranks


def write_collectives(path: Path) -> None:
    """Writes the last collectives of this rank, as torch does by itself when NCCL fails.

    The launcher ends ranks that hang long before a collective times out.
    """
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL's; any backend's, in newer torch
        if dump := getattr(c10d, name, None):
            path.write_bytes(dump())
            return


def join(engine: str, device: str, place: RankEnvironment, meeting_file: str | None) -> None:
    """Joins the other ranks, once per process.

    DeepSpeed must be imported after this: at its import it looks for its accelerator.

    Args:
        engine: `engine.name` of the run file.
        device: `cuda` or `cpu`.
        place: this rank's number and the addresses.
        meeting_file: where ranks on one machine meet; None: at MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized():
        return
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        backend = "gloo"
    else:
        # FSDP adds up offloaded gradients on the CPU; DeepSpeed accepts only one backend.
        backend = "nccl" if engine == "deepspeed" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_file}" if meeting_file else None,
        rank=place.rank,
        world_size=place.world_size,
        timeout=STEP_TIMEOUT,
    )


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone."""
    return says_lost_peer(str(error))


class Ranks:
    """This rank among all ranks. All ranks make it at the same time. For one thread at a time.

    Attributes:
        group: a gloo group that only this object uses.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files that exist once."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return self.total(int(flag))[0] > 0

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self.group)


@dataclass(frozen=True, kw_only=True)
class RankConfigDigest:
    """The settings and devices of one rank.

    Attributes:
        host: the node's name.
        device: the device's name.
        gpu: the UUID of its GPU; empty for a CPU.
        must_agree: (name, value) of what must be the same on all ranks.
    """

    host: str
    device: str
    gpu: str
    must_agree: tuple[tuple[str, str], ...]

    @staticmethod
    def of(
        plan: TrainingPlan, device: Device, config: RunConfig, inputs: Inputs, gpu: str
    ) -> RankConfigDigest:
        """The digest of this rank."""
        text = hashlib.sha256(config.to_yaml().encode()).hexdigest()
        facts = {
            "kind of device": device.kind,
            "precision": plan.precision,
            "engine.zero": str(plan.zero),
            "batch.micro": str(plan.micro),
            "sequence_length": str(plan.sequence_length),
            "run file (sha256)": text[:12],
            "bundle": inputs.bundle_id[:12],
        }
        return RankConfigDigest(
            host=platform.node(), device=device.name, gpu=gpu, must_agree=tuple(facts.items())
        )


def check_agreement(digests: Sequence[RankConfigDigest]) -> None:
    """Checks that all ranks have the same settings, and that no two use one GPU.

    NCCL's own message for two ranks on one GPU does not say so.

    Args:
        digests: every rank's, in the order of ranks.

    Raises:
        UsageError: it names the first difference, both ranks and their devices.
    """
    first = digests[0]
    users: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(digests):
        before = users.setdefault((one.host, one.gpu), rank)
        if one.gpu and before != rank:
            gpus = len({other.gpu for other in digests if other.host == one.host})
            raise UsageError(
                f"ranks {before} and {rank} would share a GPU of {one.host} ({one.device}); "
                f"its ranks see {gpus} in all.",
                f"One rank per GPU: --processes {gpus}, or slurm.tasks_per_node and "
                f"gpus_per_node: {gpus}.",
            )
    for rank, other in enumerate(digests):
        for (what, ours), (_, theirs) in zip(first.must_agree, other.must_agree, strict=True):
            if ours != theirs:
                raise UsageError(
                    f"the ranks disagree on {what}: {ours} on rank 0 ({first.host}, "
                    f"{first.device}), {theirs} on rank {rank} ({other.host}, {other.device}).",
                    "Ask Slurm for nodes of one kind (slurm.options: constraint, or gres with a "
                    "type), or set the `auto` values in the run file.",
                )
