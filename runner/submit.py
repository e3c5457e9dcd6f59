"""`runner submit`: a run file becomes a job.

`RunConfig` -> `request` (asks Slurm for the shape of a node) -> `sbatch_script` -> `submit` (kept in the run folder,
tried with `--test-only`, submitted). Whatever Slurm would only say in the queue or in a log is asked for before.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import devices
from runner.config import RunConfig, SlurmConfig
from runner.devices import NodeShape
from runner.errors import IncompleteError, UsageError, human_count, write_atomically
from runner.launch import runner_command
from runner.sbatch import SbatchRequest, sbatch_script, time_limit_s
from runner.shapes import Device
from runner.slurm_commands import ask
from runner.sweep import Member

REMEDIES = {
    "invalid partition": "See `sinfo -s` for the partitions, and set slurm.partition.",
    "invalid account": "See `sacctmgr show assoc user=$USER`, and set slurm.options.account.",
    "invalid qos": "See `sacctmgr show qos`, and set slurm.options.qos.",
    "generic resource": "See `sinfo -o '%P %G'` for the GPUs of each partition, and set slurm.gpus_per_node or "
    'slurm.options: {gres: "gpu:TYPE:N"}.',
    "node configuration is not available": "See `sinfo -N -o '%P %n %c %m %G'`: no node has what was asked for. Lower "
    "slurm.gpus_per_node, or slurm.options cpus-per-task or mem.",
    "more processors": "Lower slurm.tasks_per_node or slurm.options cpus-per-task.",
    "time limit": "See `sinfo -o '%P %l'` for the limits, and lower slurm.time.",
    "node count": "See `sinfo -s`, and lower slurm.nodes.",
    "unrecognized option": "Correct slurm.options; `man sbatch` lists the names.",
}
"""What sbatch says (in lower case), and what to do about it."""

_ADVICE_ELSEWHERE = "Run it on the cluster's login node; `runner submit --print` shows the script anywhere."


class NoClusterError(UsageError):
    """There is an sbatch, and no cluster behind it."""


def request(
    config: RunConfig,
    bundle: Path,
    run_folder: Path,
    overrides: Sequence[str] = (),
    sweep: tuple[Member, ...] = (),
) -> SbatchRequest:
    """Decides what the job asks for; every path becomes absolute."""
    slurm, run_folder = config.slurm, run_folder.absolute()
    ranks = ranks_on_node(slurm)
    cpus, reason = cpus_per_task(node_shapes(slurm.partition), ranks, slurm.gpus_per_node)
    sets = [word for override in overrides for word in ("--set", override)]
    paths = [str(config.path.absolute()), "--bundle", str(bundle.absolute())]
    paths += [] if sweep else ["--output", str(run_folder)]
    return SbatchRequest(
        name=config.name,
        run_folder=run_folder,
        working_folder=Path.cwd(),
        command=tuple(runner_command("train", *paths, *sets)),
        bin_folder=Path(sys.executable).parent,
        nodes=slurm.nodes,
        tasks_per_node=ranks,
        gpus_per_node=slurm.gpus_per_node,
        partition=slurm.partition,
        cpus_per_task=cpus,
        cpus_reason=reason,
        time=slurm.time,
        modules=slurm.modules,
        setup=slurm.setup,
        options=slurm.options,
        members=sweep,
    )


def node_shapes(partition: str | None) -> list[NodeShape]:
    """The nodes of a partition (None: the default one); empty where there is no Slurm to ask."""
    shown = ask("sinfo", "--noheader", "--Node", "--format=%P|%c|%m|%G", *_partition_option(partition))
    if shown is None or shown.returncode != 0:
        return []
    rows = [line.split("|", 3) for line in shown.stdout.splitlines() if line.count("|") >= 3]
    wanted = [row for row in rows if partition or row[0].endswith("*")]
    return [
        NodeShape(int(cpus), count_gpus(gres), int(memory) * 2**20 if memory.isdigit() else 0, types_of_gpus(gres))
        for _, cpus, memory, gres in wanted
        if cpus.isdigit()
    ]


def count_gpus(gres: str) -> int:
    """GPUs in Slurm's notation: `gpu:a800:4(S:0-1),nvme:1` has 4."""
    return sum(int(entry[-1]) if entry[-1].isdigit() else 1 for entry in _gpu_entries(gres))


def types_of_gpus(gres: str) -> tuple[str, ...]:
    """Types of GPU in Slurm's notation: `gpu:a800:4(S:0-1),nvme:1` has `a800`; `gpu:4` has none."""
    return tuple(entry[1] for entry in _gpu_entries(gres) if len(entry) > 1 and not entry[1].isdigit())


def _gpu_entries(gres: str) -> list[list[str]]:
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return [entry for entry in entries if entry[0] == "gpu"]


def device_of_job(config: RunConfig, processes: int | None, environ: Mapping[str, str]) -> Device | None:
    """The device of a rank of the job that the run file asks for; None where that cannot be known here.

    Args:
        processes: ranks on this machine instead, where there is no Slurm.
    """
    slurm = config.slurm
    shapes = node_shapes(slurm.partition)
    if processes is not None and not shapes and not slurm.gpus_per_node:
        return devices.here(processes, environ, own_torch=config.environment is None)
    return devices.of_job(slurm, shapes, ranks_on_node(slurm))


def ranks_on_node(slurm: SlurmConfig) -> int:
    """Ranks on each node: as asked for, one for each GPU, or one."""
    return slurm.tasks_per_node if isinstance(slurm.tasks_per_node, int) else slurm.gpus_per_node or 1


def cpus_per_task(shapes: Sequence[NodeShape], ranks: int, gpus: int) -> tuple[int | None, str]:
    """A rank's share of the CPUs of the smallest node that fits, and the reason for the script."""
    fitting = [shape for shape in shapes if shape.gpus >= gpus and shape.cpus >= ranks]
    if not fitting:
        return None, ""
    if gpus:
        # The share that goes with a GPU, so a job with one GPU of four leaves the CPUs of the other three alone.
        smallest = min(fitting, key=lambda shape: shape.cpus / shape.gpus)
        share = smallest.cpus * gpus // (smallest.gpus * ranks)
        return max(1, share), f"A rank's share: the smallest node has {smallest.cpus} CPUs and {smallest.gpus} GPUs."
    cpus = min(shape.cpus for shape in fitting)
    return cpus // ranks, f"A rank's share: the smallest node has {cpus} CPUs."


def submit(wanted: SbatchRequest) -> int:
    """Keeps the script in the run folder and submits it.

    Returns:
        The job's number.

    Raises:
        UsageError: no sbatch here, Slurm would refuse the job, or a job for this run folder is queued already.
        IncompleteError: Slurm's controller does not answer.
    """
    script = sbatch_script(wanted)
    _refuse_time(wanted)
    _refuse_second_job(wanted.script)
    # Slurm does not make the log's folder: a job without it fails without a word.
    wanted.log.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(wanted.script, script.encode())
    _sbatch("--test-only", str(wanted.script))
    said = _sbatch("--parsable", str(wanted.script)).stdout
    number = re.match(r"(\d+)", said)
    if not number:
        raise UsageError(f"sbatch did not say which job it made: {said.strip()!r}", "Look with `squeue --me`.")
    return int(number[1])


def check(wanted: SbatchRequest) -> str:
    """Lets Slurm look at the job without submitting it; returns a line on what was found.

    Raises:
        UsageError: Slurm would refuse the job, or leave it waiting for ever.
    """
    if shutil.which("sbatch") is None:
        return "Slurm request: not checked, there is no sbatch here"
    _refuse_time(wanted)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "submit.sbatch")
        script.write_text(sbatch_script(wanted), encoding="utf-8")
        try:
            _sbatch("--test-only", str(script))
        except NoClusterError as error:
            return f"Slurm request: not checked: {error.message}"
    shape = f"{human_count(wanted.nodes, 'node')} x {human_count(wanted.tasks_per_node, 'rank')}"
    return f"Slurm request: {shape}: sbatch --test-only accepts it"


def _refuse_time(wanted: SbatchRequest) -> None:
    """`--test-only` says nothing about the partition's limit; the job would stay in the queue for ever."""
    shown = ask("sinfo", "--noheader", "--format=%P|%l", *_partition_option(wanted.partition))
    for line in shown.stdout.splitlines() if wanted.time and shown and shown.returncode == 0 else []:
        partition, _, limit = line.partition("|")
        if not wanted.partition and not partition.endswith("*"):
            continue
        asked, allowed = time_limit_s(wanted.time or ""), time_limit_s(limit.strip())
        if allowed is not None and (asked is None or asked > allowed):
            raise UsageError(
                f"slurm.time: {wanted.time} is more than partition {partition.rstrip('*')} allows, {limit.strip()}",
                "Lower it: the job saves, is requeued and resumes as often as it takes.",
            )


def _partition_option(partition: str | None) -> list[str]:
    return [f"--partition={partition}"] if partition else []


def _refuse_second_job(script: Path) -> None:
    """Two jobs that write the same run folder would spoil each other's checkpoints."""
    shown = ask("squeue", "--noheader", "--me", "--format=%i|%T|%o")
    for line in shown.stdout.splitlines() if shown and shown.returncode == 0 else []:
        job, _, rest = line.partition("|")
        state, _, command = rest.partition("|")
        if command.strip() == str(script):
            raise UsageError(
                f"job {job} ({state.lower()}) already writes {script.parent}",
                f"Let it finish, or `scancel {job}` first; --output FOLDER starts another run.",
            )


def _sbatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = ask("sbatch", *arguments)
    if done is None:
        raise UsageError("there is no sbatch on this machine", _ADVICE_ELSEWHERE)
    if done.returncode == 0:
        return done
    said = " ".join(line.partition("error: ")[2] or line for line in done.stderr.splitlines()).strip()
    lowered = said.lower()
    if "unable to contact" in lowered or "socket timed out" in lowered or "connection refused" in lowered:
        raise IncompleteError(f"Slurm does not answer: {said}", "Try again; `scontrol ping` shows when it is back.")
    if "configuration source" in lowered:
        raise NoClusterError("sbatch is here, but this machine belongs to no Slurm cluster", _ADVICE_ELSEWHERE)
    remedy = next((advice for words, advice in REMEDIES.items() if words in lowered), "")
    raise UsageError(f"Slurm refuses the job: {said}", remedy or f"Correct `slurm:` in the run file ({arguments[-1]}).")
