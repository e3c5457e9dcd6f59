"""Python, glibc, CUDA and compilers that do not fit: E, C and X of the list."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stage.environment.check.check import Needs, verdicts
from stage.environment.spec.conda_lock import Package
from tests.first_job.harness import (
    Found,
    assert_found,
    check,
    programs,
    run_runner,
    torch_of,
    write_run,
)
from tests.stage.environment.check.test_check import conda, locked, profile, torch
from tests.stage.environment.check.test_node import ROOMY
from tests.stage.environment.check.test_node import check as env_check
from tests.support.node import Node

# ---- the laptop: what `stage env lock` and `stage fetch` say of a lock and a profile

NEWER = "https://example.org/pyarrow-26.0-cp310-cp310-manylinux_2_28_x86_64.whl"
# entry -> packages, profile, cause, remedy
LOCKED: dict[str, tuple[list[Package], str, str, str]] = {
    "E5": ([torch("2.7.1+cu118")], "v100-cuda11", "needs glibc 2.28; v100-cuda11 has 2.17", "2.6"),
    "E6": ([locked("pyarrow", "26.0", url=NEWER)], "v100-cuda11", "needs glibc 2.28", "older"),
    "C1": (
        [torch("2.13.0"), locked("cuda-toolkit", "13.0.3")],
        "a800",
        "needs a driver with CUDA 13.0",
        "torch 2.10 from PyPI",
    ),
    "C3": ([torch("2.11.0+cu128")], "v100", "has no code for Tesla V100", "torch 2.10 from PyPI"),
    "C5": ([torch("2.10.0+cpu")], "v100", "is a build without CUDA", "torch 2.10 from PyPI"),
    "C6": (
        [conda("pytorch", "2.7.1", "cpu_mkl_py311_h1_100")],
        "a800",
        "without CUDA",
        "`pytorch=*=cuda*`",
    ),
}


@pytest.mark.parametrize("entry", LOCKED)
def test_a_lock_that_cannot_run_on_the_cluster_is_refused_on_the_laptop(entry: str) -> None:
    packages, node, cause, remedy = LOCKED[entry]
    (verdict,) = [v for v in verdicts(Needs.of(packages), profile(node)) if v.refused]
    assert cause in verdict.problem and remedy in verdict.remedy


# ---- the login node or a GPU node: `stage env check`, before the environment is unpacked

# entry -> glibc of the node, what env.json says, what is printed
NODES: dict[str, tuple[str, dict[str, Any], str]] = {
    "E5": ("2.17", {"glibc": "2.28"}, "bad   glibc 2.17; the environment needs 2.28"),
    "E7": ("2.28", {"glibc": "2.29"}, "bad   glibc 2.28; the environment needs 2.29"),
    "C1": ("2.28", {"cuda": "13.0"}, "bad   CUDA 13.0 in the environment; the driver here"),
    "C2": ("2.28", {"cuda": "13.0"}, "has CUDA 12.2"),
    "C3": ("2.28", {"architectures": "9.0 10.0"}, "bad   torch 2.8.0 has no code for NVIDIA A800"),
    "C4": ("2.28", {"architectures": "3.7 7.0"}, "bad   torch 2.8.0 has no code for NVIDIA A800"),
}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node of the cluster: A800, driver 535, and room."""
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node")
    node.add_gpu("NVIDIA A800-SXM4-80GB", "535.104.05", "8.0", "CUDA Version: 12.2")
    node.add("df", ROOMY)
    return node


@pytest.mark.parametrize("entry", NODES)
def test_an_environment_that_cannot_run_is_refused_before_it_is_unpacked(
    node: Node, entry: str
) -> None:
    glibc, facts, said = NODES[entry]
    node.add("getconf", f'echo "glibc {glibc}"')
    code, output = env_check(node, **facts)
    assert (code, said in output, "      -> " in output) == (1, True, True), output


def test_an_environment_for_an_old_system_needs_no_installer(node: Node) -> None:
    node.add("getconf", 'echo "glibc 2.17"')
    code, output = env_check(node, glibc="2.17", cuda=None, architectures=None)
    assert (code, "ok    glibc 2.17" in output) == (0, True), output


def test_mpi4py_without_mpi_is_told(node: Node) -> None:
    (node.folder / "asset").mkdir()
    wheel = "mpi4py-4.1.0-cp311-cp311-manylinux_2_17_x86_64.whl"
    (node.folder / "asset/conda-lock.yml").write_text(f"  url: https://pypi.example/{wheel}\n")
    nowhere = {"LD_LIBRARY_PATH": str(node.folder / "mpi" / "lib")}
    code, output = env_check(node, environment=nowhere)
    assert code == 0 and ("module load an MPI" in output or "finds MPI: /usr" in output)


# ---- torch and the driver of this machine

GPT2 = {"task": "causal-lm", "model": {"asset": "gpt2"}}


ON_LOGIN = {
    "C5": ("2.10.0+cpu", Found(("torch 2.10.0+cpu is installed here", "CPUs"), "with CUDA", 0)),
}


@pytest.mark.parametrize("entry", ON_LOGIN)
def test_a_torch_without_cuda_is_told_before_the_queue(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    version, found = ON_LOGIN[entry]
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", version, "None"))
    assert_found(check(tmp_path, staged, **GPT2, slurm={"gpus_per_node": 4}), found)


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
IN_JOB = {"SLURM_GPUS_ON_NODE": "1"}
# entry -> what nvidia-smi says, variables, what the launcher says before it starts a rank
LAUNCHED: dict[str, tuple[str, dict[str, str], Found]] = {
    "C9": (MISMATCH, {}, Found((MISMATCH, "has a GPU, and it cannot be used"), "restart the")),
    "C10": ("", IN_JOB, Found(("has given this job 1 GPU", "no device of a GPU"), "--nv")),
    "C11": ("", IN_JOB, Found(("the ranks cannot use it",), "--nv")),
}


@pytest.mark.parametrize("entry", LAUNCHED)
def test_a_gpu_that_cannot_be_used_ends_the_launcher_and_not_a_rank(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    driver, variables, found = LAUNCHED[entry]
    monkeypatch.syspath_prepend(torch_of(tmp_path / "site", "2.10.0", "'12.8'"))
    write_run(tmp_path, **GPT2)
    smi = f"echo '{driver}'; exit 18" if driver else "echo No devices were found; exit 6"
    variables |= {"PATH": programs(tmp_path / "bin", **{"nvidia-smi": smi})}
    command = ("train", "tiny.yaml", "--bundle", str(staged), "--processes", "1", "--dry-run")
    assert_found(run_runner(tmp_path, *command, **variables), found)


# ---- compilers and headers

COMPILE = {**GPT2, "compile": True}
NVME = {**GPT2, "engine": {"zero": 3, "offload": "nvme", "nvme_path": "/tmp"}}
OLD = 'case "$*" in *c++17*) exit 1 ;; *) exit 0 ;; esac'
NO_HEADERS = 'case "$*" in *-I*) exit 1 ;; *) exit 0 ;; esac'
NO_LIBAIO = 'case "$*" in *-laio*) exit 1 ;; *) exit 0 ;; esac'
NO_AIO_WORDS = ("engine.offload: nvme compiles with libaio", "libaio-devel")
# entry -> keys of the run file, programs of the node, what `check` says
TOOLS: dict[str, tuple[dict[str, Any], dict[str, str], Found]] = {
    "X4": (COMPILE, {"g++": NO_HEADERS}, Found(("the headers of Python", "Python.h"), "modules")),
    "X6": (NVME, {"g++": "exit 0"}, Found(("compiles with ninja",), "engine.offload: cpu")),
    "X9": (COMPILE, {"g++": OLD}, Found(("knows C++17 (g++ does not)",), 'modules: ["gcc"]')),
    "X11": (NVME, {"g++": NO_LIBAIO, "ninja": ""}, Found(NO_AIO_WORDS, "engine.offload: cpu")),
}


@pytest.mark.parametrize("entry", TOOLS)
def test_what_a_compiler_lacks_is_found_before_a_rank_starts(
    staged: Path, tmp_path: Path, entry: str
) -> None:
    run, bodies, found = TOOLS[entry]
    write_run(tmp_path, **run)
    path = programs(tmp_path / "bin", **bodies).partition(":")[0]  # nothing else is on PATH
    command = ("check", "tiny.yaml", "--bundle", str(staged), "--processes", "2")
    assert_found(run_runner(tmp_path, *command, PATH=path, CXX="", CC=""), found)


def test_tools_of_the_login_node_are_a_warning_for_a_job(staged: Path, tmp_path: Path) -> None:
    """The nodes may have them; with modules they probably do, and nothing is said."""
    path = programs(tmp_path / "bin", **{"g++": OLD}).partition(":")[0]
    for slurm, code in (({"nodes": 1}, True), ({"modules": ["gcc"]}, False)):
        write_run(tmp_path, **COMPILE, slurm=slurm)
        command = ("check", "tiny.yaml", "--bundle", str(staged))
        said = run_runner(tmp_path, *command, PATH=path, CXX="", CC="")
        assert said.code == 0 and ("the job's nodes may lack it, too" in said.out) is code, said


# ---- avoided


def test_ninja_of_the_environment_comes_first_in_the_job(staged: Path, tmp_path: Path) -> None:
    write_run(tmp_path, **GPT2)
    said = run_runner(tmp_path, "submit", "tiny.yaml", "--bundle", str(staged), "--print")
    assert f'export PATH={Path(sys.executable).parent}:"$PATH"' in said.out
