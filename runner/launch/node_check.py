"""`runner check --on node`: the first minute of a GPU check, where the job will run.

Inside a job it runs on the job's first node. On a login node it submits a job of one node and five
minutes with the run file's `slurm:` (partition, GPUs, modules, setup) and waits for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import StageError, UsageError, human_count
from runner.gpu_check.on_node import items, measured, run_item
from runner.gpu_check.record import JSON, MARKDOWN, Item, Record, read
from runner.launch.submit import NoClusterError, ranks_on_node, request, try_script
from runner.plan import devices
from runner.ranks.environment import runner_command
from runner.slurm.commands import ask, clean, job_number
from runner.slurm.jobs import inside_job
from runner.slurm.script import sbatch_script
from runner.slurm.shell_variables import overriding

FOLDER = "node-check"
TIME = "00:05:00"

Say = Callable[[str], None]


def check_node(
    config: RunConfig,
    bundle: Path,
    run_folder: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
) -> None:
    """Checks a node of this run's kind, here or in a job.

    Args:
        config: the run file.
        bundle: its folder.
        run_folder: the results go to `node-check` inside it.
        overrides: the `--set` texts.
        environ: the environment variables.
        say: prints a line.

    Raises:
        StageError: an item failed; the message has its cause.
        UsageError: Slurm refuses the job.
    """
    folder = run_folder.absolute() / FOLDER
    if inside_job(environ) or shutil.which("sbatch") is None:
        found = check_here(config, folder, environ, say)
    else:
        try:
            found = _check_in_job(config, bundle, folder, overrides, say)
        except NoClusterError as error:
            say(f"{error.message}: checking this machine")
            found = check_here(config, folder, environ, say)
    failed = [item for item in found if item.status == "failed"]
    if failed:
        raise StageError(
            f"this node would fail a run: {failed[0].name}: {failed[0].note}",
            f"The record is in {folder / MARKDOWN}.",
            exit_code=1,
        )
    say(f"this node works; the record is in {folder / MARKDOWN}")


def check_here(config: RunConfig, folder: Path, environ: Mapping[str, str], say: Say) -> list[Item]:
    """Checks the node that this process runs on, and writes the record.

    Args:
        config: the run file.
        folder: of the record; what is in it is removed.
        environ: the environment variables.
        say: prints a line.
    """
    shutil.rmtree(folder, ignore_errors=True)
    machine = measured("software")
    record = Record(folder, machine)
    kind = "cuda" if machine["devices"] else "cpu"
    say(f"checking this node: {human_count(machine['devices'], 'GPU')}, {machine['device']}")

    def devices_asked() -> dict[str, Any]:
        ranks = ranks_on_node(config.slurm)
        own_torch = config.environment is None
        notes = devices.notes(config.slurm, ranks, environ, own_torch=own_torch)
        asked, here = config.slurm.gpus_per_node, machine["devices"]
        if asked > here:
            raise UsageError(
                f"slurm.gpus_per_node: {asked}, and torch {machine['torch']} sees "
                f"{human_count(here, 'GPU')} here.",
                "nvidia-smi; and see `torch` in the record: a build without CUDA sees none.",
            )
        return {"notes": "; ".join(notes)} if notes else {}

    for name, work in {"devices asked": devices_asked, **items(environ, kind)}.items():
        item = run_item(name, work)
        record.put(item)
        say(describe(item))
    return list(record.items.values())


def _check_in_job(
    config: RunConfig, bundle: Path, folder: Path, overrides: Sequence[str], say: Say
) -> list[Item]:
    # One level deeper than the results: Slurm's log and the script stay where the job starts.
    job_folder = folder.with_name(f"{FOLDER}-job")
    shutil.rmtree(job_folder, ignore_errors=True)
    sets = [argument for override in overrides for argument in ("--set", override)]
    command = runner_command(
        "check", str(config.path.absolute()), "--bundle", str(bundle.absolute()),
        "--output", str(folder.parent), "--on", "node", *sets,
    )  # fmt: skip
    wanted = replace(
        request(config, bundle, job_folder, overrides),
        name=f"{config.name}-{FOLDER}",
        command=tuple(command),
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=None,
        time=TIME,
    )
    wanted.log.parent.mkdir(parents=True)
    wanted.script.write_text(sbatch_script(wanted), encoding="utf-8")
    try_script(wanted.script)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier check
    folder.mkdir(parents=True)
    number, code = wait_for_job(wanted.script, "one node", say)
    log = Path(str(wanted.log).replace("%j", number))
    try:
        found = [Item(**entry) for entry in read(folder / JSON)["items"]]
    except UsageError:
        raise StageError(
            f"job {number} ended with {code} and left no record.",
            f"Its log: {log}"
            + ("" if log.exists() else " (not here: is the run folder on the nodes too?)"),
            exit_code=1,
        ) from None
    for item in found:
        say(describe(item))
    return found


def wait_for_job(script: Path, nodes: str, say: Say) -> tuple[str, int]:
    """Submits a job and waits for its end; Ctrl-C removes it from the queue.

    Args:
        script: on the disk.
        nodes: how many it asks for, in words.
        say: prints a line.

    Returns:
        Its number, and its exit code.

    Raises:
        UsageError: Slurm refuses it.
    """
    dropped = overriding(script.read_text(encoding="utf-8"), os.environ)
    with subprocess.Popen(
        ["sbatch", "--wait", "--parsable", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in clean(os.environ).items() if name not in dropped},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        number = next(filter(None, map(job_number, process.stdout)), "")
        if not number:
            raise UsageError(
                f"Slurm refuses the job: {process.stderr.read().strip()}",
                f"Correct `slurm:` in the run file ({script}).",
            )
        say(f"waiting for job {number}: {nodes}, five minutes at most; Ctrl-C cancels it")
        try:
            return number, process.wait()
        except BaseException:  # Ctrl-C, or a signal that ends this process
            ask("scancel", number)
            raise


def describe(item: Item) -> str:
    """One line about an item."""
    shown = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in item.values.items()
        if name not in ("devices", "links") or not isinstance(value, (list, str))
    )
    return f"  {item.name}: {item.note or shown.strip() or item.status}"
