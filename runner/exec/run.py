"""`runner exec`: a user's own script, unmodified and offline, with the Hub names that it uses.

Two things replace the Hub (docs/adr/0011): a cache of links into the bundle, which
`from_pretrained` and `snapshot_download` read without a copy, and `stage serve` on loopback, which
answers what a cache cannot (the list of files, the splits of a dataset). Then this process
*becomes* the script: exit code, signals and streams are the script's own.
`runner.exec.server_process` ends the server when the script has ended.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.disks import (
    cache_variables,
    job_folder,
    local_folder,
    own_folder,
    read_mounts,
    user_variables,
)
from runner.errors import (
    UsageError,
    human_count,
    print_line,
    read_start,
    suggest,
    write_atomically,
)
from runner.exec import last_words
from runner.exec.hub_cache import write_hub_cache
from runner.exec.server_process import serve_beside
from runner.inputs import (
    HUB_IN_CHILDREN,
    check_known_damage,
    check_names_and_sizes,
    check_site,
    open_hub,
    running_tree,
)
from runner.isolation import isolate, note_for_script
from runner.launch.place import is_mpi_task, variables_between_nodes
from runner.slurm.environment import SlurmJobEnvironment

MULTI_NODE_LAUNCHERS = frozenset(
    {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "pdsh", "clush"}
)
"""Commands that start processes on other nodes, which cannot reach this node's loopback."""

LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "bash", "sh"})
"""Commands that set the variables of ranks themselves, or may."""

REMOVED_VARIABLES = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_EVALUATE_OFFLINE",
    "TRANSFORMERS_CACHE",
)
"""Variables that would stop libraries from using the server, or old libraries from the cache."""

LAST_WORDS = Path(last_words.__file__)
NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of flock(2) on a file system without locks."""
NEVER_CLEANED = "exec.unlocked"
"""A file beside the caches: some script uses them without a lock."""


def run(command: Sequence[str], bundle: Path, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `command`, for which the bundle is the Hub. Does not return.

    Raises:
        UsageError: the program does not exist, the command would start processes on other nodes, or
            run on one of several; another user owns the folder of the caches; or the site's torch,
            on which this environment was made, is another one by now.
        DamageError: the bundle is known to be damaged, or its names or sizes are wrong.
    """
    program = _program(command, environ)
    check_site()
    _check_one_node(command, environ)
    _check_bundle(bundle.resolve(), environ)
    of_script = [*sys.path]
    isolate(dict(environ), lambda line: None)  # the server takes nothing from PYTHONPATH
    hub = open_hub(bundle, _say)
    base = own_folder(job_folder(environ))
    compiled, avoided = local_folder(environ, read_mounts())
    own_folder(compiled)
    lock = _in_use(base)
    folder = base / "exec" / hub.bundle_id[:12]
    serve_beside(hub.serve, _cleaner(base, lock, environ))
    sys.path[:] = of_script
    write_hub_cache(hub.repositories, folder / "hub")
    between, notes = variables_between_nodes(environ)
    variables = environment(environ, hub.address, folder, compiled) | between
    variables["AIRLIFT_BUNDLE"] = str(bundle.resolve())
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    for source, name in ((HUB_IN_CHILDREN, "sitecustomize"), (LAST_WORDS, last_words.NAME)):
        write_atomically(python / f"{name}.py", source.read_bytes())
    in_prefix = Path(program).resolve().is_relative_to(Path(sys.prefix).resolve())
    if in_prefix and running_tree() is not None:
        # An environment from a bundle contains all packages that it needs.
        variables.setdefault("PYTHONNOUSERSITE", "1")
    # A repository has several names.
    counts = Counter(kind for kind, _ in {(r.kind, tuple(r.snapshots)) for r in hub.repositories})
    parts = [human_count(counts["models"], "model"), human_count(counts["datasets"], "dataset")]
    parts += [human_count(counts["spaces"], "metric")] * (counts["spaces"] > 0)
    about = (
        f"bundle {hub.bundle_id[:12]} is the Hub at {hub.address} ({', '.join(parts)}); "
        f"caches: {folder}"
    )
    if environ.get("SLURM_PROCID", "0") == "0":
        own = {name: variables[name] for name in ("PYTHONNOUSERSITE",) if name in variables}
        said = (
            note_for_script({**environ, **own}),
            about,
            avoided,
            _note_on_loggers(environ),
            note_on_tasks(command, environ),
            _note_on_line_ends(command),
            *notes,
        )
        for note in filter(None, said):
            _say(note)
    os.execve(program, list(command), variables)


def _say(text: str) -> None:
    print_line(f"runner exec: {text}", err=True)


def environment(
    environ: Mapping[str, str], address: str, folder: Path, compiled: Path
) -> dict[str, str]:
    """The script's variables: ours, the bundle as the Hub, and caches on this node's disk. Pure.

    Args:
        address: the URL of the server.
        folder: the folder of this bundle's caches, and of `runner.exec.last_words`. If
            HF_DATASETS_CACHE is set, the datasets cache is a folder in that instead: Arrow copies
            are as large as the data, and a node's own disk may be small.
        compiled: the folder of compiler caches.
    """
    variables = {name: value for name, value in environ.items() if name not in REMOVED_VARIABLES}
    variables |= {**cache_variables(variables, compiled), **user_variables(variables)}
    theirs = environ.get("HF_DATASETS_CACHE")
    datasets = Path(theirs) / f"airlift-{folder.name}" if theirs else folder / "datasets"
    quiet = {
        name: value for name, value in offline.VARIABLES.items() if not name.endswith("_OFFLINE")
    }
    direct = {name: _with_loopback(environ.get(name, "")) for name in ("no_proxy", "NO_PROXY")}
    return {
        **variables,
        **quiet,
        **direct,
        "HF_ENDPOINT": address,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(folder / "hub"),  # its name before huggingface_hub 0.17
        "HF_DATASETS_CACHE": str(datasets),
        "HF_EVALUATE_CACHE": environ.get("HF_EVALUATE_CACHE") or str(folder / "evaluate"),
        "HF_MODULES_CACHE": environ.get("HF_MODULES_CACHE") or str(folder / "modules"),
        "HF_HUB_DISABLE_XET": "1",
        "WANDB_MODE": environ.get("WANDB_MODE") or "offline",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(folder / "python"), environ.get("PYTHONPATH")))
        ),
        # Otherwise `load_dataset("csv", ...)` first connects to a host on the internet.
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }


def _note_on_loggers(environ: Mapping[str, str]) -> str:
    """One line where wandb is installed, and would otherwise wait for its server for hours."""
    if environ.get("WANDB_MODE") or importlib.util.find_spec("wandb") is None:
        return ""
    return (
        "WANDB_MODE=offline, because a compute node has no internet: `wandb sync` uploads the run "
        "later (to change it: export WANDB_MODE=online)"
    )


def note_on_tasks(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """One line where srun started several tasks and nothing tells a script of the others.

    Trainer and accelerate then train the whole model once per task, without an error.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks in ("", "1") or "WORLD_SIZE" in environ or _MEETS.search(" ".join(command)):
        return ""
    name = Path(command[0]).name
    alone = "a script that does not read Slurm's own variables trains alone in each task"
    if name in _ON_NODES:
        if environ.get("SLURM_STEP_NUM_NODES", "1") == "1":
            return ""
        alone = f"`{name}` without the address of the first node trains alone on each node"
    elif name in LAUNCHERS:
        return ""
    return (
        f"srun started {tasks} tasks, and RANK and WORLD_SIZE are not set: {alone} "
        f"(if so: {on_each_node(command)})"
    )


_MEETS = re.compile(r"--(rdzv|node|machine|master|main_process_ip)")
"""Words with which the launchers of several nodes find each other."""

_EACH = "${SLURM_GPUS_ON_NODE:-1}"
_TORCHRUN = (
    "--nnodes=$SLURM_NNODES --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:29500 "
    "--rdzv-id=$SLURM_JOB_ID"
)
_ON_NODES = {
    "torchrun": _TORCHRUN,
    "accelerate": "--num_machines $SLURM_NNODES --machine_rank $SLURM_NODEID "
    f"--num_processes $((SLURM_NNODES * {_EACH})) --main_process_ip $MASTER_ADDR "
    "--main_process_port 29500 --deepspeed_multinode_launcher standard",
    "deepspeed": "",
}
"""Launcher -> its words for several nodes; empty: another launcher takes its place."""


def on_each_node(command: Sequence[str]) -> str:
    """The line that trains once on all nodes of a job, from one that would train on one. Pure."""
    first, *words = command
    name = Path(first).name
    script = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
    knows = _MEETS.search(" ".join(words)) or not (name in _ON_NODES or name.startswith("python"))
    if script is not None and not knows:
        before = shlex.join([first, *(word for word in words[:script] if word != "--standalone")])
        if not _ON_NODES.get(name):  # its options are not torchrun's
            name, before = "torchrun", f"torchrun --nproc-per-node={_EACH}"
        first, words = "sh", ["-c", f"{before} {_ON_NODES[name]} {shlex.join(words[script:])}"]
    theirs = shlex.join([first, *words])
    return f"srun --ntasks-per-node=1 runner exec --bundle B -- {theirs}"


def _note_on_line_ends(command: Sequence[str]) -> str:
    """One line on a shell script with the line ends of Windows, in which commands end in `\\r`."""
    if Path(command[0]).name not in ("bash", "sh"):
        return ""
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    try:
        start = read_start(Path(script), 2**16)
    except OSError:  # also a pipe, as in `bash <(...)`: what we read, bash would not
        return ""
    if b"\r\n" not in start:
        return ""
    return f"{script} has the line ends of Windows: sed -i 's/\\r$//' {shlex.quote(script)}"


def _with_loopback(hosts: str) -> str:
    """Adds loopback to a no_proxy list: else the site's proxy would be asked for our server."""
    have = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*have, *(host for host in ("127.0.0.1", "localhost") if host not in have)])


def _program(command: Sequence[str], environ: Mapping[str, str]) -> str:
    found = shutil.which(command[0], path=environ.get("PATH"))
    if found is not None:
        _check_can_start(Path(found))
    elif "/" in command[0] and Path(command[0]).is_file() and not command[0].endswith(".py"):
        raise UsageError(
            f"{command[0]} is there, and may not be executed.",
            f"chmod +x {shlex.quote(command[0])}; or name what reads it: -- bash {command[0]}",
        )
    if found is None:
        raise UsageError(
            f"{command[0]}: no such program on PATH.",
            suggest(
                command[0],
                ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash"),
                f"runner exec --bundle B -- python {command[0]}"
                if command[0].endswith(".py")
                else "runner exec --bundle B -- python their_script.py ...",
            ),
        )
    return found


def _check_can_start(program: Path) -> None:
    """Refuses a script that no kernel starts. Its own error is "No such file or directory".

    Raises:
        UsageError: the line ends of Windows, an interpreter that is not here, or no first line.
    """
    try:
        start = read_start(program, 256)
    except OSError:  # it may be executed, and not read
        return
    first = start.partition(b"\n")[0]
    if b"\0" in start or not start:  # a program of the machine
        return
    if not start.startswith(b"#!"):
        raise UsageError(
            f"{program} does not say what reads it: it does not begin with `#!`.",
            f"-- bash {program}",
        )
    if first.endswith(b"\r"):
        raise UsageError(
            f"{program} has the line ends of Windows, so the system looks for a program "
            f"`{first[2:].strip().decode(errors='replace')}\\r`.",
            f"sed -i 's/\\r$//' {shlex.quote(str(program))}",
        )
    words = first[2:].split()
    if words and not Path(os.fsdecode(words[0])).exists():
        raise UsageError(
            f"{program} asks for {os.fsdecode(words[0])} in its first line, which is not here.",
            f"Name what reads it: -- python {program}, or -- bash {program}",
        )


def _check_one_node(command: Sequence[str], environ: Mapping[str, str]) -> None:
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None or job.num_nodes == 1:
        return
    name = Path(command[0]).name
    if name in MULTI_NODE_LAUNCHERS:
        raise UsageError(
            f"`{name}` starts processes on {job.num_nodes} nodes; the bundle would be served on "
            "this one alone.",
            f"The other way round, so that each node serves itself: {name} ... runner exec "
            "--bundle B -- python ...",
        )
    if job.step is None and not is_mpi_task(environ):
        raise UsageError(
            f"this job has {job.num_nodes} nodes, and outside srun `{name}` would run on this one "
            "alone.",
            f"Start it on each node: {on_each_node(command)} (a script that reads Slurm's own "
            f"variables: srun and one task per GPU). For one node only: srun --nodes=1 --ntasks=1 "
            f"runner exec --bundle B -- {shlex.join(command)}",
        )


def _check_bundle(bundle: Path, environ: Mapping[str, str]) -> None:
    """Checks that the bundle is not damaged, as far as names and sizes show it.

    In a Slurm step one task compares names and sizes for all, because that is many `stat` calls.

    Raises:
        DamageError: it is damaged; names the damaged files.
    """
    check_known_damage(bundle, environ)
    if environ.get("SLURM_PROCID", "0") == "0":
        check_names_and_sizes(bundle)


def _in_use(base: Path) -> int:
    """Marks the caches as used, as long as the returned descriptor is open in any process.

    On a disk without locks (Lustre mounted without flock, NFS without lockd) it is unknown who uses
    them; then the file `NEVER_CLEANED` is written, and they are never removed.
    """
    descriptor = os.open(base / "exec.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        note = base / NEVER_CLEANED
        if not note.exists():
            note.touch()
            _say(
                f"{base} takes no locks ({error.strerror}), so its caches stay there after the "
                "job; with TMPDIR on the node's own disk they are removed"
            )
    return descriptor


def _cleaner(base: Path, lock: int, environ: Mapping[str, str]) -> Callable[[], None]:
    """Returns the cleanup: the last script of a job on this node removes the job's caches.

    Outside a job the caches stay for the next script.
    """

    def clean() -> None:
        if "SLURM_JOB_ID" not in environ:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another script of this job uses them
            return
        if not (base / NEVER_CLEANED).exists():
            shutil.rmtree(base / "exec", ignore_errors=True)

    return clean
