"""What ranks are started with, and what each makes of it: command lines, variables, facts.

Two parts. *Starts*: the command lines and variables of every place that starts ranks, or something
that starts them. None of these runs: the recorder stands in place of `subprocess.Popen`. *Ranks*:
the variables of a launcher -> what a rank knows of its place, and the variables that it sets before
torch is imported. The network is one of two nodes, n1 and n2, that meet over `ib0`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from runner.cli import main as runner
from runner.job.training_run import TrainingRun
from runner.launch import network
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved
from runner.run_folder.layout import RunFolder
from runner.training.rank import become_rank
from runner.trials import apart
from tests.runner.conftest import RUN, _stage_bundle

ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
HELPER = "runner.child"
"""Prepares the data in a process of its own. It is no rank, and really runs."""
APART = "runner.trials.apart"
STARTS = ("srun ", *(f"runner {name}" for name in ("rank", "bench", "rehearse")),
          APART)  # fmt: skip
JOB = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "4",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1",
}  # fmt: skip
ONE_NODE = JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "2"}
STALE = {
    "RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_GPUS_PER_TASK": "1",
}


def _of_user(folder: Path) -> dict[str, str]:
    """A user's variables, in folders that are not there yet; nothing is on PATH."""
    names = {"PATH": "bin", "HOME": "home", "TMPDIR": "tmp", "XDG_STATE_HOME": "state"}
    return {"USER": "ada", **{name: str(folder / below) for name, below in names.items()}}


# ---- starts


class Recorder:
    """In place of `subprocess.Popen`: what starts ranks is kept, and `true` is started for it."""

    def __init__(self, before: Mapping[str, str]) -> None:
        self.found: list[dict[str, Any]] = []
        self._before = before

    def popen(self) -> type[subprocess.Popen[Any]]:
        recorder = self

        class Recorded(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, args: Any, *more: Any, **options: Any) -> None:
                argv = [args] if isinstance(args, str) else [str(word) for word in args]
                if recorder.keep(argv, options.get("env")):
                    # A rehearsal that "works" would load its export, with torch.
                    args = ["false" if APART in " ".join(argv) else "true"]
                    options["env"] = {"PATH": "/usr/bin:/bin"}
                super().__init__(args, *more, **options)

        return Recorded

    def keep(self, argv: list[str], env: Mapping[str, str] | None) -> bool:
        """Keeps a command that starts ranks; returns whether it is one."""
        text = " ".join(argv)
        if HELPER in text or not any(word in text for word in STARTS):
            return False
        after = os.environ if env is None else env
        changed = {name: after.get(name) for name in {*self._before, *after}}
        differs = {n: v for n, v in sorted(changed.items()) if v != self._before.get(n)}
        self.found.append({"argv": argv, "env": differs})
        return True


@contextmanager
def _node(host: str) -> Iterator[None]:
    """This process is on a node of two, with eight cores, that see each other over `ib0`."""
    own = ADDRESSES[host]

    def addresses_of(name: str) -> list[str]:
        return [ADDRESSES.get(name, name)] if name in ADDRESSES or name[:1].isdigit() else []

    with ExitStack() as stack:
        for target, name, value in (
            (network, "addresses_of", addresses_of),
            (network, "is_own", lambda address: address in (own, "127.0.0.1")),
            (network, "source_towards", lambda address: own),
            (network, "interface_of", lambda address: "ib0" if address == own else "lo"),
            (socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")]),
            (platform, "node", lambda: host),
            (os, "sched_getaffinity", lambda _pid: set(range(8))),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def starts(folder: Path, bundle: Path) -> list[dict[str, Any]]:
    """Each place with the variables that it was given, and the commands that it starts."""
    settings: dict[str, Any] = {
        **RUN,
        "steps": 2,
        "slurm": {"container": ["in-container", "image.sif"]},
    }
    (folder / "tiny.yaml").write_text(
        "".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items())
    )
    user = _of_user(folder)
    more = ("--set", "seed=7")
    at = ("tiny.yaml", "--bundle", str(bundle))
    found = list[dict[str, Any]]()

    def place(name: str, command: str, *options: str, **variables: str) -> list[dict[str, Any]]:
        before = user | variables
        recorder = Recorder(before)
        with (
            mock.patch.dict(os.environ, before, clear=True),
            mock.patch.object(subprocess, "Popen", recorder.popen()),
            mock.patch.object(sys, "argv", ["runner", command, *at, *options]),
            mock.patch.object(sys, "path", list(sys.path)),
            _node("n1"),
        ):
            here = Path.cwd()
            os.chdir(folder)
            try:
                done = CliRunner().invoke(runner, [command, *at, *options], catch_exceptions=False)
            finally:
                os.chdir(here)
        if not recorder.found:
            raise AssertionError(f"{name}: nothing was started:\n{done.output}")
        found.append({"place": name, "given": {**variables}, "starts": recorder.found})
        return recorder.found

    here = ("--processes", "2")
    place("train, ranks here", "train", *here, *more)
    place("train, a job of one node", "train", *more, **ONE_NODE)
    place("train, a job of two nodes", "train", *more, **JOB, **STALE)
    evaluate = ("--checkpoint", "none", *more)
    place("evaluate, ranks here", "evaluate", *here, *evaluate)
    place("evaluate, a job of one node", "evaluate", *evaluate, **ONE_NODE)
    bench = ("--strategies", "zero2", "--largest", "1", "--steps", "2", "--memory", "1.5", *more)
    place("bench, ranks here", "bench", *here, *bench)
    place("rehearse", "rehearse", *more)
    place("rehearse, in an allocation", "rehearse", "--job", *more, **JOB)
    with (
        mock.patch.dict(os.environ, user, clear=True),
    ):
        run = TrainingRun.load(folder / "tiny.yaml", bundle, folder / "output" / "tiny", ())
        recorder = Recorder(user)
        with mock.patch.object(subprocess, "Popen", recorder.popen()), _node("n1"):
            apart.launch(Resolved.of(run), "trial", Start(2))
        found.append(
            {"place": "the ranks of a launcher apart", "given": {}, "starts": recorder.found}
        )
    return found


# ---- ranks


def _step(rank: int, nodes: int) -> dict[str, str]:
    """The variables of one of four tasks of srun, in a job of one or two nodes."""
    hosts, each = ("n1", "4") if nodes == 1 else ("n[1-2]", "2(x2)")
    node = rank // (4 // nodes)
    return {
        "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": hosts,
        "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": each, "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % (4 // nodes)), "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"n{node + 1}",
    }  # fmt: skip


def _numbers(names: str, rank: int, nodes: int) -> dict[str, str]:
    """The four variables of a launcher of four ranks: rank, ranks, and both on this node."""
    local = 4 // nodes
    values = (rank, 4, rank % local, local)
    return {name: str(value) for name, value in zip(names.split(), values, strict=True)}


TORCHRUN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
OPEN_MPI = " ".join(
    f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
MPICH = "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
MVAPICH = OPEN_MPI.replace("OMPI", "MV2")
PALS = "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE"
OF_OPEN_MPI = {"PMIX_NAMESPACE": "prterun-n1-4711@1"}
OF_US = {"AIRLIFT_RANK": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4"}


def _launchers() -> dict[str, list[dict[str, str]]]:
    """Launcher -> the variables of the first and the last of its four ranks."""
    found: dict[str, list[dict[str, str]]] = {}
    for rank in (0, 3):
        given = OF_US | {"AIRLIFT_MEETING_FILE": "/meeting/ranks", "GLOO_SOCKET_IFNAME": "lo"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40781"}
        cases = {"ranks here": given | _numbers(TORCHRUN, rank, 1)}
        for nodes, name in ((1, "one node"), (2, "two nodes")):
            address = "127.0.0.1" if nodes == 1 else ADDRESSES["n1"]
            at = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
            step = _step(rank, nodes)
            open_mpi = OF_OPEN_MPI | _numbers(OPEN_MPI, rank, nodes)
            torchrun = {"TORCHELASTIC_RUN_ID": "x"} | _numbers(TORCHRUN, rank, nodes)
            cases |= {
                f"our srun, {name}": OF_US | at | step,
                f"srun by hand, {name}": step,
                f"torchrun, {name}": at | torchrun,
                f"Open MPI, {name}": open_mpi | (at if nodes == 2 else {}),
                f"MPICH, {name}": at | _numbers(MPICH, rank, nodes),
                f"MVAPICH2, {name}": at | _numbers(MVAPICH, rank, nodes),
                # Of `mpiexec` on Polaris and Aurora.
                f"PALS, {name}": at | {"PMI_RANK": str(rank)} | _numbers(PALS, rank, nodes),
            }
        # mpirun starts its helpers with srun, one on each node; the ranks inherit their variables.
        helper = _step(0, 2) | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
        helper |= {"SLURMD_NODENAME": f"n{rank // 2 + 1}"}
        cases |= {
            "our srun from a shell of salloc, two nodes": OF_US | {"MASTER_PORT": "29500"} | step,
            "srun by hand that binds GPUs, two nodes": step | {"SLURM_GPUS_PER_TASK": "1"},
            "Open MPI in a job of Slurm, two nodes": helper | open_mpi,
        }
        for launcher, variables in cases.items():
            found.setdefault(launcher, []).append(variables)
    return found


def places(folder: Path) -> list[dict[str, Any]]:
    """Launcher -> what each of its ranks knows, and the variables that it sets."""
    found = []
    for launcher, ranks in _launchers().items():
        for first, given in zip((True, False), ranks, strict=True):
            environ = _of_user(folder) | given
            host = "n1" if first or "two nodes" not in launcher else "n2"
            with mock.patch.dict(os.environ, environ, clear=True), _node(host):
                role = "launcher" if Start.of(os.environ) else "rank"
                place = become_rank(RunFolder(folder / "run"), dict(os.environ)).info
                sets = {n: v for n, v in sorted(os.environ.items()) if environ.get(n) != v}
            facts = {
                "rank": place.rank, "world_size": place.world_size, "local_rank": place.local_rank,
                "local_world_size": place.local_world_size, "master": place.master,
                "port": place.port, "peers": list(place.peers),
            }  # fmt: skip
            found.append({"launcher": launcher, "role": role, **facts, "sets": sets})
    return found


# ---- the text


def _stable(text: str, folder: Path, bundle: Path) -> str:
    """Replaces what differs between machines and runs."""
    python = Path(sys.executable)
    for pattern, word in (
        (r"import sys; sys\.path\[:\] = .*?run_module\('([\w.]+)'[^\"]*", r"<isolated \1>"),
        (r'"-B", |"-X", "utf8", ', ""),
        (re.escape(f"{folder}/tmp/airlift-{os.getuid()}"), "<caches>"),
        (re.escape(str(bundle)), "<bundle>"),
        (re.escape(str(folder)), "<folder>"),
        (re.escape(str(python.parent / "runner")), "<bin>/runner"),
        (re.escape(str(python)), "<python>"),
        (r'"[^"]*/airlift-\w{8}/ranks"', '"<meeting>/ranks"'),
        (rf"-{os.getpid()}\b", "-<pid>"),
        (r"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),  # torch before 2.8
    ):
        text = re.sub(pattern, word, text)
    return text


def record_with(folder: Path, bundle: Path) -> str:
    """The golden; one start or one rank in a line.

    Args:
        folder: an empty one.
        bundle: that of the runner's tests.
    """
    lines = []
    for place in starts(folder, bundle):
        lines.append(json.dumps({"place": place["place"], "given": place["given"]}))
        for start in place["starts"]:
            port = start["env"].get("MASTER_PORT")
            line = json.dumps(start)
            lines.append(line.replace(port, "<port>") if port else line)
    # In another process: a rank raises its limits, and guards its connections.
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        lines += [json.dumps(place) for place in process.submit(places, folder).result()]
    return _stable("[\n" + ",\n".join(lines) + "\n]\n", folder, bundle)


def record(folder: Path) -> str:
    """The golden, with a bundle of its own."""
    (folder / "laptop").mkdir()
    (folder / "work").mkdir()
    _stage_bundle(folder / "laptop")
    return record_with(folder / "work", folder / "laptop" / "bundle")
