"""What the ranks do together besides the engine's work: join, agree, wait, share small values.

The ranks meet at a store of torch. `Ranks` uses a gloo group of its own, so it works the same on
GPUs and CPUs and uses no device.

No rank waits for the sums of a step (`Totals`): they are started in one step and read in the next.
On GPUs a sum is made on the device (NCCL) and copied to pinned memory; on CPUs a thread of gloo
makes it during the step.

`check_facts` compares what the ranks see, before training; later they would only wait for each
other. Decisions are not compared: rank 0 makes them, and sends them.
"""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from runner.from_stage import UsageError
from runner.inputs import tag_manifest_digest
from runner.job.shapes import Device
from runner.launch.ranks import MEETING_FILE, Rank, RankInfo
from runner.launch.reach import explain_joining, wait_for_rank_0
from runner.run_folder.heartbeat import JOIN, LOAD, flight_prefix
from runner.training.patches import write_collectives
from runner.training.weights import from_first

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(hours=1)  # a rank may be busy with writing a large checkpoint
STEP_TIMEOUT = timedelta(minutes=30)  # torch's own default_pg_timeout; here for NCCL too


@contextmanager
def _joining(rank: Rank) -> Iterator[None]:
    """Shows that this rank is joining, and explains connections that fail.

    Raises:
        NeverMetError: another rank cannot be reached from this node.
    """
    info = rank.info
    try:
        with rank.heartbeat.beating(JOIN):
            yield
    except RuntimeError as error:
        explained = explain_joining(error, info.rank, info.master, info.port)
        if explained is None:
            raise
        traceback.print_exc()
        raise explained from None


def open_store(rank: Rank) -> Store:
    """The store at which the ranks meet. Rank 0 listens; the others wait until it does.

    On one machine it can be a file, which our launcher names; else it is at MASTER_ADDR and
    MASTER_PORT.

    Raises:
        NeverMetError: rank 0 cannot be reached from this node.
        StageError: rank 0 gave up.
    """
    info, file = rank.info, os.environ.get(MEETING_FILE)
    with _joining(rank):
        if file is None and info.rank != 0:
            heartbeat = rank.heartbeat
            wait_for_rank_0(
                info.rank, info.master, info.port, heartbeat.logs, started=heartbeat.started
            )
        where = f"file://{file}" if file else "env://"
        opened = rendezvous(where, info.rank, info.world_size, timeout=STEP_TIMEOUT)
        store: Store = next(opened)[0]
    store.set_timeout(STEP_TIMEOUT)
    return store


def meet(rank: Rank, store: Store, engine: str, device: str) -> Ranks:
    """Joins the other ranks, waits until all have joined, and makes the gloo group of `Ranks`.

    Args:
        store: where they meet.
        engine: `engine.name` of the run file.
        device: `cuda` or `cpu`.

    Raises:
        NeverMetError: another rank cannot be reached from this node.
    """
    with _joining(rank):
        join(engine, device, rank.info, store)
        if device == "cuda":
            # NCCL connects at the first use, not before.
            dist.all_reduce(torch.zeros(1, device=device))
        ranks = Ranks()
    heartbeat = rank.heartbeat
    flight = flight_prefix(heartbeat.logs)
    heartbeat.when_asked_for_stacks(
        lambda: write_collectives(flight.with_name(f"{flight.name}{rank.info.rank}"))
    )
    heartbeat.beat(LOAD)
    return ranks


def join(engine: str, device: str, info: RankInfo, store: Store) -> None:
    """Joins the other ranks, once per process.

    DeepSpeed must be imported after this: at its import it looks for its accelerator.

    Args:
        engine: `engine.name` of the run file.
        device: `cuda` or `cpu`.
        info: this rank's number and the addresses.
        store: where they meet.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        backend = "gloo"
    else:
        # FSDP adds up offloaded gradients on the CPU; DeepSpeed accepts only one backend.
        backend = "nccl" if engine == "deepspeed" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("ranks", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=STEP_TIMEOUT,
    )


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

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; or its error."""
        return from_first(make, self.group)

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self.group)


class HostValue:
    """A vector's copy on the host, which is made when the device gets there.

    Args:
        value: a number or scalar is a vector of one.
    """

    def __init__(self, value: float | torch.Tensor) -> None:
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1)
        self._copy, self._made = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record()

    def read(self) -> list[float]:
        """The values of a vector. Waits until the device got there."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy.tolist()


class Totals:
    """Sums over all ranks, in float64. All ranks make it at the same time.

    Args:
        ranks: this rank among the others.
        device: of this rank.
        computed: scalars on the device.
        known: values that the host knows.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        computed: Sequence[torch.Tensor],
        known: Sequence[float],
    ) -> None:
        on_host = torch.tensor([0.0] * len(computed) + list(known), dtype=torch.float64)
        on_gpu = device.type == "cuda"
        if on_gpu:
            on_host = on_host.pin_memory()
        self._values = on_host.to(device, non_blocking=True)
        for number, scalar in enumerate(computed):
            self._values[number].copy_(scalar)
        self._work = dist.all_reduce(
            self._values, group=None if on_gpu else ranks.group, async_op=True
        )
        self._host: HostValue | None = None

    def on_device(self) -> torch.Tensor:
        """The sums, shape (number of values,). On a GPU only later work of the device waits."""
        if self._host is None:
            self._work.wait()
            self._host = HostValue(self._values)
        return self._values

    def read(self) -> list[float]:
        """The sums, on the host."""
        self.on_device()
        assert self._host is not None
        return self._host.read()


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank sees.

    Attributes:
        host: the node's name.
        gpu: the UUID of its GPU; empty for a CPU.
        bundle: the digest of the bundle's tag manifest on its node, from one rank of each.
    """

    device: Device
    host: str
    gpu: str
    bundle: str = ""

    @staticmethod
    def of(info: RankInfo, device: Device, gpu: str, bundle: Path) -> RankFacts:
        """What this rank sees.

        Raises:
            DamageError: the bundle's tag manifest cannot be read on this node.
        """
        return RankFacts(
            device=device,
            host=platform.node(),
            gpu=gpu,
            bundle=tag_manifest_digest(bundle) if info.local_rank == 0 else "",
        )


def check_facts(facts: Sequence[RankFacts]) -> None:
    """Checks that all ranks have devices of one kind and the same bundle, and that no two use one
    GPU.

    NCCL's own message for two ranks on one GPU does not say so.

    Args:
        facts: every rank's, in the order of ranks.

    Raises:
        UsageError: it names the first difference, both ranks and their devices.
    """
    first = facts[0]
    users: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(facts):
        before = users.setdefault((one.host, one.gpu), rank)
        if one.gpu and before != rank:
            gpus = len({other.gpu for other in facts if other.host == one.host})
            raise UsageError(
                f"ranks {before} and {rank} would share a GPU of {one.host} ({one.device.name}); "
                f"its ranks see {gpus} in all.",
                f"One rank per GPU: --processes {gpus}, or slurm.tasks_per_node and "
                f"gpus_per_node: {gpus}.",
            )
    for rank, other in enumerate(facts):
        both = f"(rank 0 on {first.host}, rank {rank} on {other.host})"
        if other.device.kind != first.device.kind:
            raise UsageError(
                f"the ranks have devices of different kinds: {first.device.name} and "
                f"{other.device.name} {both}.",
                "Ask Slurm for nodes of one kind (slurm.options: constraint, or gres with a type).",
            )
        if other.bundle and other.bundle != first.bundle:
            raise UsageError(
                f"the ranks see different bundles: tag manifest {first.bundle[:12]} and "
                f"{other.bundle[:12]} {both}.",
                "Give all nodes the same bundle: on each, stage show BUNDLE prints its id.",
            )


def weakest(facts: Sequence[RankFacts]) -> Device:
    """What the device of every rank can do: a plan is for all of them. Pure."""
    devices = [one.device for one in facts]
    return Device(
        kind=devices[0].kind,
        name=" and ".join(sorted({device.name for device in devices})),
        memory=min(device.memory for device in devices),
        has_bf16=all(device.has_bf16 for device in devices),
        has_fp16=all(device.has_fp16 for device in devices),
        host_memory=min(device.host_memory for device in devices),
    )
