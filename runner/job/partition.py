"""A partition of the cluster, as Slurm shows it: its nodes, and what a job gets of their memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property

from runner.from_stage import human_count
from runner.slurm.jobs import ask

MIB = 2**20


@dataclass(frozen=True)
class NodeShape:
    """CPUs, GPUs and memory (bytes; 0: not known) of one node, as `sinfo` shows them."""

    cpus: int
    gpus: int
    memory: int = 0
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """A partition; without nodes, Slurm is not installed or does not answer.

    Attributes:
        name: `default` if Slurm does not tell.
        time_limit: in Slurm's notation; empty: not known, or several partitions differ.
    """

    name: str
    nodes: tuple[NodeShape, ...] = ()
    time_limit: str = ""

    @cached_property
    def _shown(self) -> tuple[str, str]:
        """What scontrol(1) prints of the partition, and of the cluster; empty: it does not."""
        shown = list[str]()
        for words in (("partition", self.name, "--oneliner"), ("config",)):
            done = ask("scontrol", "show", *words)
            if done is None or done.returncode:
                return "", ""
            shown.append(done.stdout)
        return shown[0], shown[1]

    @property
    def gives_whole_nodes(self) -> bool:
        """Whether a job gets all CPUs of its nodes, whatever it asks for."""
        its, config = self._shown
        return "OverSubscribe=EXCLUSIVE" in its or "select/linear" in config

    def default_memory(self, gpus: int, cpus: int) -> tuple[int, str]:
        """What a job that asks for no memory gets of a node (slurm.conf(5), `DefMemPerCPU`).

        The partition's default comes before the cluster's. Without memory in
        `SelectTypeParameters`, Slurm keeps no job to one.

        Args:
            gpus, cpus: that the job gets of the node; 0: none, or not known.

        Returns:
            Bytes, and where they come from; 0: all of the node's, or not known.
        """
        selects = re.findall(r"SelectTypeParameters\s*=\s*(\S*)", " ".join(self._shown))
        if "MEMORY" not in "".join(selects):
            return 0, ""
        counts = {"CPU": cpus, "Node": 1}
        counts = {"GPU": gpus, **counts} if gpus else counts
        for whose, text in zip((f"partition {self.name}", "slurm.conf"), self._shown, strict=True):
            for unit, count in counts.items():
                found = re.search(rf"\bDefMemPer{unit}\s*=\s*(\d+)", text)
                if found and len(found[1]) > 15:
                    return 0, ""  # how Slurm prints UNLIMITED of a partition
                if found and int(found[1]):
                    times = f" x {human_count(count, unit)}" if unit != "Node" else ""
                    why = f"DefMemPer{unit} of {whose}, {found[1]} MB{times}"
                    return int(found[1]) * MIB * count, why
        return 0, ""


def ask_partition(wanted: str | None) -> Partition:
    """Asks sinfo(1) for a partition; None: the one of this shell, or the default one."""
    chosen = wanted or os.environ.get("SBATCH_PARTITION") or None
    only = [f"--partition={chosen}"] if chosen else []
    shown = ask("sinfo", "--noheader", "--Node", "--format=%P|%c|%m|%G|%l", *only)
    lines = shown.stdout.splitlines() if shown and shown.returncode == 0 else []
    rows = [[field.strip() for field in line.split("|")] for line in lines]
    rows = [row for row in rows if len(row) == 5 and (chosen or row[0].endswith("*"))]
    if not rows:
        return Partition(chosen or "default")
    nodes = tuple(
        NodeShape(
            int(cpus),
            count_gpus(gres),
            int(memory) * MIB if memory.isdigit() else 0,
            types_of_gpus(gres),
        )
        for _, cpus, memory, gres, _ in rows
        if cpus.isdigit()
    )
    limits = {row[4] for row in rows}  # of several partitions any one may take the job
    limit = limits.pop() if len(limits) == 1 else ""
    return Partition(chosen or rows[0][0].strip("*"), nodes, limit)


def count_gpus(gres: str) -> int:
    """The number of GPUs in Slurm's gres notation: 4 for `gpu:a800:4(S:0-1),nvme:1`."""
    return sum(int(entry[-1]) if entry[-1].isdigit() else 1 for entry in _gpu_entries(gres))


def types_of_gpus(gres: str) -> tuple[str, ...]:
    """The types of GPU in Slurm's gres notation: `gpu:a800:4,nvme:1` has `a800`; `gpu:4` none."""
    return tuple(
        entry[1] for entry in _gpu_entries(gres) if len(entry) > 1 and not entry[1].isdigit()
    )


def _gpu_entries(gres: str) -> list[list[str]]:
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return [entry for entry in entries if entry[0] == "gpu"]
