"""`env-probe.sh` prints a profile that `stage` reads, with any shell and driver, and never hangs.

The node around it is made of small programs on PATH that answer as the real ones do.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from stage.environment.check.torch_builds import numbers
from stage.environment.spec.profile import Profile
from tests.support.node import SHELLS, Node
from tests.support.staging import run_here


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def profile_of(node: Node, shell: Sequence[str] = ("sh",), **environment: str) -> Profile:
    done = node.run("env-probe.sh", shell=shell, **environment)
    assert done.returncode == 0, done.stderr
    path = node.folder / "printed.yml"
    path.write_text(done.stdout)
    return Profile.load(path)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_any_shell_prints_the_whole_profile(node: Node, shell: Sequence[str]) -> None:
    node.add_gpu("NVIDIA A800-SXM4-80GB", "535.104.05", "8.0", "CUDA Version: 12.2")
    node.add("mpirun", 'echo "mpirun (Open MPI) 4.1.5"; echo; echo "Report bugs to"')
    profile = profile_of(node, shell, LOADEDMODULES="slurm/22:nvidia/cuda/12.2")
    assert profile == Profile(
        path=profile.path,
        name="a800",
        platform="linux-64",
        glibc="2.28",
        linux=".".join(os.uname().release.split(".")[:2]),
        cuda="12.2",
        compute_capability="8.0",
        gpu="NVIDIA A800-SXM4-80GB",
        mpi="openmpi 4.1.5",
        modules=("slurm/22", "nvidia/cuda/12.2"),
    )
    assert sorted(p.name for p in node.folder.iterdir()) == [
        "bin",
        "env-check.sh",
        "env-probe.sh",
        "printed.yml",
    ]


@pytest.mark.parametrize(
    ("name", "driver", "capability", "header", "cuda", "expected", "called"),
    [
        ("NVIDIA H200", "570.86.15", "9.0", "CUDA Version: 12.8", "12.8", "9.0", "h200"),
        ("Tesla V100-SXM2-32GB", "470.57.02", None, "CUDA Version: 11.4", "11.4", "7.0", "v100"),
        ("Tesla K80", "450.80.02", None, "CUDA Version: N/A", "11.0", "3.7", "k80"),
        ("NVIDIA GeForce RTX 3090", "495.46", None, "CUDA Version: 11.5", "11.5", "8.6", "rtx"),
        ("NVIDIA L40S", "525.60.13", "8.9", "CUDA Version: 12.0", "12.0", "8.9", "l40s"),
        ("NVIDIA B200", "580.65.06", "10.0", "CUDA Version: 13.0", "13.0", "10.0", "b200"),
        ("NVIDIA B200", "595.10", "10.0", "CUDA UMD Version: 13.2", "13.2", "10.0", "b200"),
        ("NVIDIA A800 80GB PCIe", "520.61.05", "8.0", "", "11.8", "8.0", "a800"),
    ],
)
def test_every_driver_says_it_in_its_own_way(
    node: Node,
    name: str,
    driver: str,
    capability: str | None,
    header: str,
    cuda: str,
    expected: str,
    called: str,
) -> None:
    node.add_gpu(name, driver, capability, header)
    profile = profile_of(node)
    assert (profile.cuda, profile.compute_capability, profile.gpu) == (cuda, expected, name)
    assert profile.name == called


def test_a_python_with_torch_says_what_it_provides_and_no_more(node: Node, tmp_path: Path) -> None:
    """Real distributions of this Python, and a site's folder before them."""
    site = tmp_path / "module"
    for name, more in (
        ("torchvision-0.22.0a0+nv25", "Requires-Dist: torch==2.7.0a0\n"),
        ("safe-1.0", "Requires-Dist: torch>=1; extra == 'torch'\n"),
        ("torchmetrics-1.0", "Requires-Dist: torch>=1\n"),
        ("Nvidia.NCCL_cu12-2.26", ""),
        ("numpy-1.26.4", ""),
    ):
        info = site / f"{name}.dist-info"
        info.mkdir(parents=True)
        name, version = name.split("-")
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
        (info / "METADATA").write_text(text)
        library = f"{name}/_C.so,,\n" if name in ("torchvision", "safe") else f"{name}/a.py,,\n"
        (info / "RECORD").write_text(library)
    node.add("python3", f'exec {sys.executable} "$@"')
    provided = profile_of(node, PYTHONPATH=str(site)).provides
    assert provided.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert provided.pop("torch") == version_of("torch")
    ours = {"torchvision": "0.22.0a0+nv25", "nvidia-nccl-cu12": "2.26", "numpy": "1.26.4"}
    assert {name: provided.get(name) for name in ours} == ours
    assert not {"safe", "torchmetrics", "transformers", "sympy", "click"} & provided.keys()


def test_a_command_that_never_answers_is_given_up(node: Node) -> None:
    """nvidia-smi hangs without its GPU, sinfo without its controller; with children that stay."""
    script = node.folder / "env-probe.sh"
    script.write_text(re.sub(r"(limited [a-z]+) \d+", r"\1 1", script.read_text()))
    for name in ("nvidia-smi", "sinfo", "mpirun"):
        node.add(name, "trap '' TERM\nsleep 300")
    profile = profile_of(node)
    assert (profile.cuda, profile.mpi) == (None, None)
    assert profile.glibc == "2.28"


def test_the_command_prints_this_machines_profile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real thing: nothing around it is made up."""
    run_here("env", "probe")
    (tmp_path / "p.yml").write_text(capfd.readouterr().out)
    profile = Profile.load(tmp_path / "p.yml")
    assert numbers(profile.linux) == numbers(os.uname().release)
    assert f"glibc {profile.glibc}" == os.confstr("CS_GNU_LIBC_VERSION")
