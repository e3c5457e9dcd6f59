"""Measures how long an environment takes: to create it, and to import torch from it.

The materials are those of `scripts.lib.demo.environment_materials`: a bundle with Python, torch for
CPUs, transformers and airlift's requirements. Creation is measured on this machine's disk. Imports
are measured on that disk, and with a delay for each open, stat and so on below the environment, as
a busy shared file system's metadata server causes it (`slow_metadata.c`, preloaded).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target, table
from scripts.lib.bench.measure import BenchError, run
from scripts.lib.bench.options import ROOT
from scripts.lib.bench.peers import Peers
from scripts.lib.bench.workload import Candidate, Step, Workload, plain_environment
from scripts.lib.demo.environment_materials import (
    MaterialError,
    Wheels,
    environment_yml,
    make_channel,
    pip_requirements,
)

CACHE = ROOT / "output" / "scripts-demo-cache"
ASSET = "bench-env"
LEFT_OUT = ("deepspeed", "datasets", "peft", "tensorboard")
CREATE, PIP = "stage env create", "pip install --no-index"
NODE = "node's own disk"
DELAYS_US = (500, 2000)
IMPORT = "import torch; from transformers import AutoTokenizer, BertForMaskedLM"
CREATE_NOTE = (
    "The same environment from the same bundle: Python, torch for CPUs, transformers and airlift's "
    "requirements. `stage env create` also compares each file that it reads with the bundle's "
    "lock, and each file that it wrote with the tree digest. `pip` makes a venv of the installed "
    "Python and installs the bundle's wheels; it compares nothing, and installs no Python. Both "
    "compile the modules."
)
IMPORT_NOTE = (
    f"`{IMPORT}`, by the environment's python, from a warm page cache. Each rank of a job does "
    "this once. The shared folders are this disk with a delay before each open, stat, access, "
    "readlink and opendir of a path below the environment (a preloaded library, "
    "scripts/lib/bench/slow_metadata.c): the latency of a metadata server, idle and busy. Reads "
    "and the files that the dynamic loader opens are not delayed: a real file system is slower."
)


_VENV_AND_PIP = '"$0" -m venv "$1" && "$1/bin/pip" install -q --no-index --no-deps "$2"/*.whl'


@contextmanager
def environment_workloads(folder: Path, peers: Peers) -> Iterator[list[Workload]]:
    """Both workloads; the bundle is made when the context is entered.

    Raises:
        BenchError: the bundle cannot be made, or there is no C compiler.
    """
    bundle = _make_bundle(folder)
    asset = bundle / "data" / "envs" / ASSET
    yield [_creating(folder, bundle, asset), _importing(folder, asset)]


def _make_bundle(folder: Path) -> Path:
    laptop = folder / "laptop"
    laptop.mkdir()
    wanted, wheels = pip_requirements(), Wheels(CACHE / "wheels")
    try:
        wheels.fill(wanted, _run, print)
        channel = make_channel(laptop / "channel", print)
    except MaterialError as error:
        raise BenchError(str(error)) from None
    kept = tuple(line for line in wanted if not line.startswith(LEFT_OUT))
    (laptop / "environment.yml").write_text(environment_yml(channel, wheels.folder, kept))
    probe = subprocess.run(
        ["sh", str(ROOT / "stage/templates/env-probe.sh")], capture_output=True, text=True
    )
    (laptop / "cluster.yml").write_text(probe.stdout)
    entry = f"  {ASSET}:\n    environment: environment.yml\n    profile: cluster.yml\n"
    (laptop / "bench.yaml").write_text(f"format: 1\nname: bench\nassets:\n{entry}")
    stage = [sys.executable, "-m", "stage", "fetch", str(laptop / "bench.yaml")]
    settings = {"PYTHONPATH": str(ROOT), "AIRLIFT_STORE": "none"}
    command = [*stage, "-o", str(folder / "bundle")]
    if subprocess.run(command, env={**os.environ, **settings}).returncode != 0:
        raise BenchError("the bundle could not be made")
    return folder / "bundle"


def _run(*command: str) -> None:
    if subprocess.run([sys.executable, *command[1:]]).returncode != 0:
        raise BenchError(f"`{' '.join(command[:4])}` failed")


def _creating(folder: Path, bundle: Path, asset: Path) -> Workload:
    out, counts = folder / "out", folder / "counts"
    counts.mkdir()
    prefix = str(out / "env")
    create = (sys.executable, "-m", "stage", "env", "create", str(bundle), ASSET, prefix)
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    by_pip = ("sh", "-c", _VENV_AND_PIP, python, prefix, str(asset / "wheels"))
    candidates = [
        _counted(CREATE, counts, prefix, create),
        _counted(PIP, counts, prefix, by_pip),
    ]
    return Workload(
        name="env-create",
        title="Making an environment of a bundle",
        note=CREATE_NOTE,
        size=int(_facts(asset)["size"]),
        files=int(_facts(asset)["files"]),
        base=CREATE,
        candidates=candidates,
        targets=_no_targets,
        writes=out,
        afterwards=lambda: _counts(counts),
    )


def _counted(name: str, counts: Path, prefix: str, command: tuple[str, ...]) -> Candidate:
    """A candidate whose files are counted after its end, outside its time."""
    count = (
        'find "$0" -type f -o -type l | wc -l >"$1"; find "$0" -name "*.pyc" | wc -l >>"$1"; '
        'du -sk "$0" >>"$1"'
    )
    counting = ("sh", "-c", count, prefix, str(counts / name.replace("/", "-")))
    steps = (Step(command, name), Step(counting, None))
    return Candidate(steps, {"PYTHONPATH": str(ROOT), "HOME": str(counts)})


def _counts(counts: Path) -> str:
    rows = []
    for file in sorted(counts.iterdir()):
        if file.is_file():
            files, compiled, disk = file.read_text().split("\n")[:3]
            mib = int(disk.split()[0]) / 1024
            rows.append([file.name, f"{int(files):,}", f"{int(compiled):,}", f"{mib:,.0f}"])
    return table(["result", "files", "of which compiled modules", "MiB on disk"], rows)


def _importing(folder: Path, asset: Path) -> Workload:
    prefix, shim = folder / "env", folder / "slow_metadata.so"
    source = ROOT / "scripts/lib/bench/slow_metadata.c"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("the slow folder needs a C compiler: apt-get install gcc libc6-dev")
    plain = plain_environment()
    compiling = (compiler, "-O2", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl")
    run(compiling, plain, folder)
    run(("sh", str(asset / "bootstrap.sh"), str(prefix)), plain, folder)
    count, command = folder / "calls", (str(prefix / "bin" / "python"), "-c", IMPORT)
    preloaded = {"LD_PRELOAD": str(shim), "BENCH_PREFIX": str(prefix)}
    preloaded |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run(command, {**plain, **preloaded, "BENCH_COUNTS": str(count)}, folder)
    candidates = [Candidate.single(NODE, *command, **preloaded)]
    for delay in DELAYS_US:
        name, delayed = f"shared folder, {delay / 1000:g} ms per call", str(delay)
        slow = Candidate.single(name, *command, **preloaded, BENCH_DELAY_US=delayed)
        candidates.append(slow)
    return Workload(
        name="env-import",
        title="Importing torch and transformers",
        note=f"{IMPORT_NOTE} It makes {int(count.read_text()):,} such calls.",
        size=int(_facts(asset)["size"]),
        files=int(_facts(asset)["files"]),
        base=NODE,
        candidates=candidates,
        targets=_no_targets,
    )


def _facts(asset: Path) -> dict[str, int]:
    facts: dict[str, int] = json.loads((asset / "env.json").read_text())
    return facts


def _no_targets(rounds: Rounds) -> list[Target]:
    """There is no target."""
    return []
