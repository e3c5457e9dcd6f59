"""Ranks that would not do the same are told before they begin; later they would only wait for each other.

What is `auto` follows from each rank's own device, and what is read from each node's own disk: a node with fewer or
other GPUs, or with another copy of the run file, decides otherwise than the rest.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from runner.config import RunConfig
from runner.errors import UsageError
from runner.inputs import Inputs
from runner.plan import Plan
from runner.shapes import Device


@dataclass(frozen=True, kw_only=True)
class Standpoint:
    """What one rank goes by.

    Attributes:
        gpu: what tells its GPU from all others; empty for a CPU.
        must_agree: what has to be the same everywhere, in words.
    """

    host: str
    device: str
    gpu: str
    must_agree: tuple[tuple[str, str], ...]

    @staticmethod
    def of(plan: Plan, device: Device, config: RunConfig, inputs: Inputs, gpu: str) -> Standpoint:
        """This rank's."""
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
        return Standpoint(host=platform.node(), device=device.name, gpu=gpu, must_agree=tuple(facts.items()))


def check_agreement(standpoints: Sequence[Standpoint]) -> None:
    """Refuses ranks that differ, and two on one GPU: NCCL would, in words that nobody understands.

    Args:
        standpoints: every rank's, in order.

    Raises:
        UsageError: naming the first difference, both ranks and their devices.
    """
    first = standpoints[0]
    holders: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(standpoints):
        before = holders.setdefault((one.host, one.gpu), rank)
        if one.gpu and before != rank:
            gpus = len({other.gpu for other in standpoints if other.host == one.host})
            raise UsageError(
                f"ranks {before} and {rank} would share a GPU of {one.host} ({one.device}); its ranks see {gpus} in "
                "all.",
                f"A rank a GPU: --processes {gpus}, or slurm.tasks_per_node and gpus_per_node: {gpus}.",
            )
    for rank, other in enumerate(standpoints):
        for (what, ours), (_, theirs) in zip(first.must_agree, other.must_agree, strict=True):
            if ours != theirs:
                raise UsageError(
                    f"the ranks disagree on {what}: {ours} on rank 0 ({first.host}, {first.device}), {theirs} on rank "
                    f"{rank} ({other.host}, {other.device}).",
                    "Ask Slurm for nodes of one kind (slurm.options: constraint, or gres with a type), or set what is "
                    "`auto` in the run file.",
                )
