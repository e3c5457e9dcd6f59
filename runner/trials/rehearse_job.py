"""The rehearsal of a partition: a job is submitted, and what its nodes found is printed.

In the job are the launcher, in the batch script, and its ranks. One rank of each node looks at what
the node sees: bundle, run folder, environment, names, devices. Every node listens, and every other
one connects. The nodes find each other by files in the rehearsal's folder, so this also shows that
all of them see it. The names and addresses are those that a run's ranks would use.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from runner.child import in_child
from runner.config.run_config import RunConfig
from runner.disks import local_folder
from runner.from_stage import (
    StageError,
    UsageError,
    human_count,
    human_size,
    quoted,
    write_atomically,
)
from runner.inputs import EnvironmentInput
from runner.job import devices
from runner.job.access import (
    check_readable,
    nearest_folder,
)
from runner.job.command_run import CommandRun
from runner.job.devices import ask_driver
from runner.job.findings import Finding, attempt, errors_in, errors_of, fact_line, raise_errors
from runner.job.installed import check_installed, check_tools, missing_tools
from runner.job.run import Run
from runner.job.submit import ranks_on_node, try_script
from runner.job.training_run import TrainingRun
from runner.launch.network import (
    family,
    other_hosts,
    own_address_on_shared_network,
    this_host,
    with_port,
    wrong_interfaces,
)
from runner.launch.ranks import Rank, RankInfo, Start
from runner.launch.reach import HOW_TO_CHOOSE, try_to_connect
from runner.launch.resolved import Resolved, read_resolved
from runner.launch.supervise import start_work
from runner.launch.train import set_up
from runner.run_folder.heartbeat import read_failures
from runner.run_folder.layout import RunFolder, read_json
from runner.run_folder.logs import last_lines, readable
from runner.slurm.environment import SlurmJobEnvironment, host_names, overriding
from runner.slurm.jobs import ask, clean, details, job_number
from runner.slurm.script import SbatchRequest, sbatch_script
from runner.training.rank import end_rank, run_rank
from runner.trials.rehearse import Say, Stages, hidden_folder

TIME = "00:05:00"
TIME_OF_COMMAND = "00:04:00"
"""The signal comes a quarter of it before the end (`save_before_end_s`): after three minutes."""
LAST_LINES = 5


def rehearse_in_job(run: TrainingRun, environ: Mapping[str, str], stages: Stages) -> None:
    """Tries the nodes that the run asks for, in a job, or in the allocation around this process.

    Args:
        run: the user's.
        environ: the environment variables.
        stages: where the job and each node are noted.

    Raises:
        StageError: something would end a run there.
        UsageError: Slurm refuses the job, or there is no Slurm.
    """
    job = SlurmJobEnvironment.from_environ(environ)
    with hidden_folder(run.folder.root) as folder:
        hidden = replace(run, folder=RunFolder(folder))
        if job is not None:
            number, hosts = job.job_id, host_names(job.nodes)
            code, why = launch(hidden, environ), ""
        else:
            number, code = _submit(hidden, stages)
            hosts, why = _nodes_of(number)
        stages.end("job", f"{number} on {', '.join(hosts) or 'no node'}")
        found = _collect(folder, hosts)
        if found is None:
            raise _no_record(run, folder, number, code, why)
    for finding in sorted(found, key=lambda finding: not finding.is_line):
        stages.say(f"  {finding}" if finding.is_line else str(finding))
    raise_errors(found)


def rehearse_command(run: CommandRun, environ: Mapping[str, str], stages: Stages) -> None:
    """Starts a command on the nodes that its run file asks for, for three minutes at most.

    Slurm's signal before the time limit ends it then, as it ends any command.

    Args:
        run: the user's.
        environ: the environment variables.
        stages: where the job and the command's end are noted.

    Raises:
        StageError: the command ended with an error, or never began.
        UsageError: Slurm refuses the job; there is no Slurm; or this is inside a job.
    """
    if "SLURM_JOB_ID" in environ:
        raise UsageError(
            "the rehearsal of a command is a job of its own, and this is inside one.",
            f"Here, start the command itself: {run.command('train')}",
        )
    with hidden_folder(run.folder.root) as folder:
        # Ended by the signal, it is not to be requeued; and there is nothing to go on from.
        config = replace(run.config, resumes=False, on_resume=(), on_limit=None)
        hidden = replace(run, config=config, folder=RunFolder(folder))
        hidden.write_for_job()
        name = f"{config.name}-rehearsal"
        wanted = replace(hidden.request, name=name, time=TIME_OF_COMMAND)
        number, code = _submit_and_wait(wanted, stages)
        hosts, why = _nodes_of(number)
        stages.end("job", f"{number} on {', '.join(hosts) or 'no node'}")
        ended = hidden.earlier[-1] if hidden.earlier else {}
        if "kind" not in ended:
            raise _no_record(run, folder, number, code, why)
        for line in last_lines(folder / "logs" / f"slurm-{number}.out", LAST_LINES)[0]:
            stages.say(f"  {readable(line)}")
    if ended["kind"] not in ("done", "stopped"):
        cause = ended["cause"] or f"exit code {code}"
        raise StageError(f"the command ended: {cause}", ended["remedy"], exit_code=1)
    is_over = ended["kind"] == "done"
    stages.end("command", "it ended with exit code 0" if is_over else "alive after three minutes")


def _submit(run: TrainingRun, stages: Stages) -> tuple[int, int]:
    """Submits the job and waits for its end; returns its number and exit code.

    Raises:
        UsageError: `slurm.srun`: no Python of ours runs in the job outside of its ranks.
    """
    if run.config.slurm.srun:
        raise UsageError(
            f"{run.config.place('slurm.srun')}: with slurm.srun a rehearsal submits no job.",
            "In an allocation, start it by one srun with these words.",
        )
    wanted = run.request
    train = wanted.command.index("train")
    wanted = replace(
        wanted,
        name=f"{run.config.name}-rehearsal",
        command=(*wanted.command[:train], "rehearse", "--job", *wanted.command[train + 1 :]),
        time=TIME,
        setup=(*wanted.setup, f"export {FOLDER}={shlex.quote(str(run.folder.root))}"),
    )
    return _submit_and_wait(wanted, stages)


def _submit_and_wait(wanted: SbatchRequest, stages: Stages) -> tuple[int, int]:
    """Submits a job and waits for its end; returns its number and exit code."""
    wanted.log.parent.mkdir(parents=True)
    wanted.script.write_text(sbatch_script(wanted), encoding="utf-8")
    try_script(wanted.script)
    return _wait_for_job(wanted.script, human_count(wanted.nodes, "node"), stages.say)


def _wait_for_job(script: Path, nodes: str, say: Say) -> tuple[int, int]:
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
            return int(number), process.wait()
        except BaseException:  # Ctrl-C, or a signal that ends this process
            ask("scancel", number)
            raise


def _nodes_of(number: int) -> tuple[list[str], str]:
    """The nodes of a job that has ended, and Slurm's reason for its end."""
    fields = details(str(number))
    nodes = fields.get("NodeList", "")
    state, reason = fields.get("JobState", ""), fields.get("Reason", "None")
    why = f"{state}{f', {reason}' if reason != 'None' else ''}"
    return host_names(nodes) if nodes and nodes != "(null)" else [], why


def _collect(folder: Path, hosts: Sequence[str]) -> list[Finding] | None:
    """Reads what the nodes wrote; None: nothing."""
    records = [json.loads(path.read_bytes()) for path in sorted(folder.glob(f"*.{RECORD}"))]
    if not records:
        return None
    findings = []
    for record in records:
        findings += [_of_node(record["host"], entry) for entry in record["findings"]]
    seen = [record["host"] for record in records]
    findings += [
        Finding(
            "error",
            f"{host} left no record: it does not see {folder.parent}, or its part was ended.",
            "Choose an --output on a disk that all nodes share.",
            1,
        )
        for host in hosts
        if host not in seen
    ]
    if measured := read_json(folder / BANDWIDTH):
        findings.append(fact_line(_describe(measured)))
    else:
        findings += _why_no_bandwidth(folder, findings)
    return findings


def _of_node(host: str, entry: Mapping[str, Any]) -> Finding:
    found = Finding(**entry)
    if found.message.startswith(host) and not found.is_line:  # the message names the node already
        return found
    return replace(found, message=f"{host}: {found.message}")


def _describe(measured: Mapping[str, Any]) -> str:
    return (
        f"all-reduce of {measured['bytes'] / 1e6:.0f} MB over {measured['ranks']} ranks "
        f"({measured['backend']}): {measured['GB/s']:.2f} GB/s"
    )


def _why_no_bandwidth(folder: Path, known: Sequence[Finding]) -> list[Finding]:
    """What ended the all-reduce; nothing where a finding says already why it was not tried."""
    if any(finding.level == "error" for finding in known):
        return []
    failures = read_failures(folder / "logs")
    if not failures:
        return [Finding("error", "the ranks did not end their all-reduce in five minutes.", "", 1)]
    first = failures[0]
    text, remedy = first.message_and_remedy()
    return [Finding("error", f"{first.host}: {text.splitlines()[-1]}", remedy, first.code)]


def _no_record(run: Run, folder: Path, number: int, code: int, why: str) -> StageError:
    """The error of a job whose nodes wrote nothing: they do not see the folder, or the command."""
    log = folder / "logs" / f"slurm-{number}.out"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return UsageError(
            f"job {number} ended with {code} ({why}) and wrote nothing here, not even its log: its "
            f"nodes do not see {run.folder.root.parent}.",
            "Choose an --output on a disk that the nodes share: `df -T` shows which disk it is on.",
        )
    said = " | ".join(lines[-LAST_LINES:])
    return StageError(
        f"job {number} ended with {code} ({why}) before a node looked around: {said}",
        "Correct slurm.modules and slurm.setup in the run file; `runner check` tries them here.",
        exit_code=1,
    )


WAIT_S = 60.0
"""How long a node waits for the others: Slurm starts them one after the other."""
LOOK_EVERY_S = 0.2
ADDRESS, DONE = "address.json", "done"


def try_ports(
    folder: Path, host: str, address: str, hosts: Sequence[str]
) -> tuple[list[Finding], str]:
    """Listens on this node, and connects to all other nodes.

    Args:
        folder: on the shared disk.
        host: the scheduler's name of this node.
        address: the address on which it listens.
        hosts: all nodes.

    Returns:
        What was found; and a line on what works.
    """
    with socket.create_server((address, 0), family=family(address)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        own = {"host": host, "address": address, "port": server.getsockname()[1]}
        write_atomically(folder / f"{host}.{ADDRESS}", json.dumps(own).encode())
        found = [
            finding for other in hosts if other != host for finding in _try(folder, host, other)
        ]
        leave(folder, host)
        wait_for_all(folder, DONE, hosts)  # the others may still connect to this node
    line = f"{host} reaches {len(hosts) - 1 - len(found)} of {len(hosts) - 1} nodes"
    return found, line


def leave(folder: Path, host: str) -> None:
    """Notes that a node has tried all ways."""
    (folder / f"{host}.{DONE}").touch()


def wait_for_all(
    folder: Path,
    suffix: str,
    hosts: Sequence[str],
    wait_s: float = WAIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Waits for a file of each node, a minute at most; returns the nodes without one."""
    deadline = clock() + wait_s
    while True:
        # Listing the folder makes a network disk ask its server again.
        there = {path.name for path in folder.iterdir()}
        missing = [host for host in hosts if f"{host}.{suffix}" not in there]
        if not missing or clock() > deadline:
            return missing
        time.sleep(LOOK_EVERY_S)


def _try(folder: Path, host: str, other: str) -> list[Finding]:
    if wait_for_all(folder, ADDRESS, [other]):
        return [
            Finding(
                "error",
                f"{other} wrote nothing into {folder} that {host} sees.",
                "Choose an --output on a disk that all nodes share; see the job's log for "
                f"{other}'s own error.",
                1,
            )
        ]
    entry: dict[str, Any] = json.loads((folder / f"{other}.{ADDRESS}").read_bytes())
    why = try_to_connect(entry["address"], entry["port"])
    if not why:
        return []
    place = with_port(entry["address"], entry["port"])
    message = f"{host} cannot connect to {other} at {place}: {why}."
    return [Finding("error", message, HOW_TO_CHOOSE, 1)]


def _accept(server: socket.socket) -> None:
    with suppress(OSError):  # it is closed when all is done
        while True:
            server.accept()[0].close()


LEAST_LOCKED_MEMORY = 2**30
"""What InfiniBand sends lies in locked memory. Sites set no limit; the kernel's own is 8 MB."""
LEAST_FOR_CACHES = 2**30
"""One large kernel that torch.compile or DeepSpeed builds takes 100 MB; a job builds several."""
INFINIBAND = Path("/sys/class/infiniband")
ENV_CHECK_S = 60  # it imports torch, perhaps from a slow network disk


def look_at_node(run: TrainingRun, info: RankInfo, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Looks at this node, before torch is imported; tries its GPUs in a child process.

    Args:
        run: the run whose job this is.
        info: this rank's numbers.
        environ: the environment variables of a rank.
    """
    packages = run.packages.of_ranks
    yield from attempt(check_readable, run.to_read)
    yield from attempt(check_installed, run.config, run.inputs, packages, "training")
    if run.inputs.environment is not None:
        yield from env_check(run.inputs.environment)
    if not info.on_one_node:
        interfaces = [name for _, name in socket.if_nameindex()]
        yield from check_interfaces(environ, interfaces)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    yield from check_locked_memory(INFINIBAND, limit, environ)
    yield from check_caches(local_folder(environ, run.mounts)[0])
    yield from attempt(check_tools, run.config, missing_tools(run.config))
    yield from attempt(check_devices, run.config, environ)


def check_devices(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that torch sees the GPUs that the run asks for, and that each of them computes.

    Args:
        config: the run file.
        environ: the environment variables of a rank.

    Yields:
        Lines for the user; none where there is no GPU and nobody asked for one.

    Raises:
        StageError: a GPU does not compute, or torch has no code for it.
        UsageError: torch sees too few GPUs.
    """
    if not devices.accelerators_meant(config.slurm, environ) and not ask_driver()[0]:
        return
    ranks = ranks_on_node(config.slurm)
    own_torch = config.environment is None
    yield from map(fact_line, devices.notes(config.slurm, ranks, environ, own_torch=own_torch))
    number, name = in_child(_run_kernels, (), "a kernel on each GPU", "See the message above.")
    if (asked := config.slurm.gpus_per_node) > number:
        raise UsageError(
            f"slurm.gpus_per_node: {asked}, and torch sees {human_count(number, 'GPU')} here.",
            "Look at `nvidia-smi` on the node; a torch that was built without CUDA sees none.",
        )
    if number:
        yield fact_line(f"{human_count(number, 'GPU')} ({name}): each ran a kernel")


def _run_kernels() -> tuple[int, str]:
    from runner.trials.children import run_kernels

    return run_kernels()


def env_check(environment: EnvironmentInput) -> list[Finding]:
    """Runs the environment's own check on this node (`env-check.sh` in the bundle)."""
    script = environment.path / "env-check.sh"
    try:
        done = subprocess.run(
            ["sh", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENV_CHECK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{script}: not run: {error}"
        return [Finding("warning", what, f"sh {quoted(script)}, on a node")]
    return read_env_check(done.stdout, environment.asset)


def read_env_check(output: str, asset: str) -> list[Finding]:
    """Turns what env-check.sh prints into findings: `bad` and `note`, each with its advice. Pure.

    Args:
        output: of the script.
        asset: the environment's name.
    """
    found: list[Finding] = []
    for line in output.splitlines():
        word, _, text = line.partition(" ")
        if word in ("bad", "note"):
            said = f"environment {asset}: {text.strip()}"
            found.append(Finding("error", said, "", 1) if word == "bad" else Finding("note", said))
        elif line.lstrip().startswith("-> ") and found:
            last = found.pop()
            remedy = line.strip().removeprefix("-> ")
            found.append(Finding(last.level, last.message, remedy, last.exit_code))
    return found


def check_interfaces(environ: Mapping[str, str], there: Sequence[str]) -> list[Finding]:
    """Refuses interfaces that the user named and this node does not have. Pure.

    Args:
        environ: the environment variables of a rank.
        there: the node's interfaces.
    """
    return [
        Finding(
            "error",
            f"{name}={environ[name]}: this node has no interface {lacking}; it has "
            f"{', '.join(there)}.",
            f"unset {name} (slurm.setup, ~/.bashrc): the interface of the route is taken then.",
            2,
        )
        for name, lacking in wrong_interfaces(environ, there).items()
    ]


def check_caches(folder: Path) -> list[Finding]:
    """Finds a disk of the node that is too full for the caches of a job.

    Args:
        folder: of the job's caches; it need not exist.
    """
    above = nearest_folder(folder)
    free = shutil.disk_usage(above).free
    if free >= LEAST_FOR_CACHES:
        return []
    return [
        Finding(
            "warning",
            f"{above} has {human_size(free)} free on this node: compiler caches and temporary "
            "files go there, and end with `No space left on device`.",
            "Name a larger disk of the node by one line more in slurm.setup, `export "
            "TMPDIR=/FOLDER` (the site's documentation says which), or ask the site to clean this "
            "one.",
        )
    ]


def check_locked_memory(devices: Path, limit: int, environ: Mapping[str, str]) -> list[Finding]:
    """Finds a limit of locked memory that is too low for the InfiniBand that NCCL would use.

    Args:
        devices: the folder with the node's InfiniBand devices; it may be missing.
        limit: the hard limit, in bytes.
        environ: the environment variables of a rank.
    """
    has_any = devices.is_dir() and any(devices.iterdir())
    is_used = has_any and environ.get("NCCL_IB_DISABLE") != "1"
    if not is_used or limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED_MEMORY:
        return []
    return [
        Finding(
            "warning",
            f"this node has InfiniBand, and a process may lock {human_size(limit)} of memory "
            "(ulimit -Hl): NCCL ends with `ibv_reg_mr ... Cannot allocate memory`.",
            "Ask the site for `memlock unlimited` in jobs (slurmd's LimitMEMLOCK). Until then: "
            "export NCCL_IB_DISABLE=1 in slurm.setup, which is slower.",
        )
    ]


FOLDER = "AIRLIFT_REHEARSAL"
"""The folder of the rehearsal, in the environment of its job."""

BLOCKED, RECORD, BANDWIDTH = "blocked", "node.json", "all-reduce.json"
MEASURES_S = 240.0
"""How long a rank waits until its node's devices are tried."""


def be_its_launcher(load: Callable[[], TrainingRun], environ: Mapping[str, str]) -> int:
    """Does the work of the job's launcher, in the batch script.

    Args:
        load: reads the run file and the bundle.
        environ: the environment variables.

    Returns:
        The exit code.
    """
    folder, host = Path(environ[FOLDER]), this_host(environ)
    set_up(os.environ, lambda _line: None)
    if not folder.is_dir():
        raise _not_seen(host, folder)
    try:
        return launch(load(), environ)
    except StageError as error:  # what this node does not see
        _write(folder, host, errors_of(error))
        raise


def launch(run: TrainingRun, environ: Mapping[str, str]) -> int:
    """Starts the ranks of the rehearsal on all nodes of this job; returns the exit code.

    Args:
        run: the run; its folder is the rehearsal's.
    """
    run.folder.make()
    return start_work(Resolved.of(run), "nodes", Start.in_job(environ), environ).exit_code


def be_a_rank(rehearsal: RunFolder, environ: Mapping[str, str]) -> NoReturn:
    """Does the work of a rank: one rank per node looks at its node, then all add up once.

    Raises:
        UsageError: this node does not see the folder.
    """
    folder, host, info = rehearsal.root, this_host(environ), RankInfo.of(environ)
    if not rehearsal.resolved.is_file():
        raise _not_seen(host, folder)
    run = read_resolved(rehearsal).run
    job = SlurmJobEnvironment.from_environ(environ)
    hosts = host_names(job.nodes) if job else [host]
    if info.local_rank == 0:
        _look_at_node(run, folder, host, hosts, info, environ)
    wait_for_all(folder, RECORD, hosts, MEASURES_S)
    if any(folder.glob(f"*.{BLOCKED}")):
        end_rank(0)  # the ranks could only wait for each other

    def work(rank: Rank) -> None:
        from runner.trials.workers import all_reduce

        result = all_reduce(run.config, rank)
        if info.rank == 0:
            write_atomically(folder / BANDWIDTH, json.dumps(result).encode())

    run_rank(rehearsal, os.environ, work)


def _not_seen(host: str, folder: Path) -> UsageError:
    return UsageError(
        f"{host} does not see {folder.parent}.",
        "Choose an --output on a disk that all nodes share.",
    )


def _look_at_node(
    run: TrainingRun,
    folder: Path,
    host: str,
    hosts: Sequence[str],
    info: RankInfo,
    environ: Mapping[str, str],
) -> None:
    """Looks at this node and the ways to the others, and writes what is found."""
    found = list[Finding]()
    try:
        if len(hosts) > 1:
            found += _try_ways(folder, host, hosts, environ)
        found += look_at_node(run, info, environ)
    except Exception as error:  # noqa: BLE001 - the other nodes wait for the record of this one
        found += errors_of(StageError(f"{type(error).__name__}: {error}", exit_code=1))
    if errors_in(found):
        (folder / f"{host}.{BLOCKED}").touch()
    _write(folder, host, found)


def _try_ways(
    folder: Path, host: str, hosts: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Connects this node and the others, both ways, and yields what is found."""
    others = other_hosts(hosts, environ)
    own = own_address_on_shared_network(others)
    if own is not None:
        ways, line = try_ports(folder, host, own[0], hosts)
        yield from [*ways, fact_line(line)]
    else:
        leave(folder, host)
        what = f"no route leads from {host} to {', '.join(others)}."
        yield Finding("error", what, HOW_TO_CHOOSE, 1)
    wait_for_all(folder, DONE, hosts, WAIT_S)


def _write(folder: Path, host: str, found: Iterable[Finding]) -> None:
    document = {"host": host, "findings": [finding.to_json() for finding in found]}
    write_atomically(folder / f"{host}.{RECORD}", json.dumps(document).encode())
