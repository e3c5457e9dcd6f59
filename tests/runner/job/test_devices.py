"""The device of a rank is known before it starts. A run that cannot work there is refused then."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from runner.config.job_config import SlurmConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job import devices
from runner.job import host_memory as of_host
from runner.job.devices import GIB, Gpu
from runner.job.host_memory import host_memory
from runner.job.partition import NodeShape
from runner.job.shapes import Device
from tests.first_job.harness import programs
from tests.runner.conftest import Cluster
from tests.support.code import run_warm

A_MIB = 2**20


def test_the_driver_is_read() -> None:
    assert devices.read_driver(
        "NVIDIA A800-SXM4-80GB, 81920, 8.0, GPU-1, Disabled\n"
        "NVIDIA A800-SXM4-80GB, 81920, 8.0, GPU-3, Enabled\n"
        "Tesla V100-PCIE-16GB, 16160, 7.0, GPU-2, [N/A]\n"
    ) == [
        Gpu("NVIDIA A800-SXM4-80GB", 81920 * A_MIB, 8.0, "GPU-1"),
        Gpu("NVIDIA A800-SXM4-80GB", 0, 8.0, "GPU-3"),
        Gpu("Tesla V100-PCIE-16GB", 16160 * A_MIB, 7.0, "GPU-2"),
    ]


@pytest.mark.parametrize(
    ("name", "gigabytes", "capability"),
    [
        ("a800", 80, 8.0),
        ("A100-SXM4-40GB", 40, 8.0),
        ("nvidia_a100_1g.10gb", 10, 8.0),
        ("tesla_v100", 32, 7.0),
        ("rtx4090", 24, 8.9),
        ("NVIDIA H100 80GB HBM3", 80, 9.0),
        ("NVIDIA RTX 6000 Ada Generation", 48, 8.9),
        ("rtx_6000_ada", 48, 8.9),
        ("mi250x", 64, 9.0),
        ("AMD Instinct MI300X", 192, 9.4),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, gigabytes: int, capability: float) -> None:
    assert devices.gpu_named(name) == Gpu(name, gigabytes * GIB, capability)


@pytest.mark.parametrize("name", ["gpu", "mi999", "a1000", "nvlink", "rtx6000", ""])
def test_of_a_gpu_that_nobody_knows_nothing_is_said(name: str) -> None:
    assert devices.gpu_named(name) is None


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1]),
        ("1", [1]),
        (" 1, 0", [1, 0]),
        ("1,-1,0", [1]),  # as CUDA does: the list ends at what is none
        ("2,0", []),
        ("NoDevFiles", []),
        ("GPU-b", [1]),
        ("GPU-bb,GPU-aa", [1, 0]),
        ("GPU-8932f937,GPU-1", [0, 1]),  # of another machine
    ],
)
def test_the_gpus_that_may_be_used_are_those_looked_at(
    visible: str | None, seen: list[int]
) -> None:
    both = [Gpu("a100", 80 * GIB, 8.0, "GPU-aa"), Gpu("v100", 32 * GIB, 7.0, "GPU-bb")]
    assert devices.visible_of(both, visible) == [both[number] for number in seen]


@pytest.mark.parametrize("hidden", ["", " ", "-1", "NoDevFiles", "none"])
def test_who_hides_all_gpus_means_the_cpu(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": hidden, "SLURM_GPUS_ON_NODE": "4"}
    assert devices.hides_all(environ) and devices.accelerators_meant(SlurmConfig(), environ) == ""
    device = devices.here(2, environ, own_torch=False)
    assert device is not None and device.kind == "cpu"


V100S = [NodeShape(64, 4, 256 * GIB, ("v100",))]


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({"gres": "gpu:v100:4"}, []),
        ({"gpus-per-node": "v100:4"}, []),
        ({"constraint": "v100&nvlink"}, []),
        ({}, V100S),
    ],
)
def test_the_gpus_of_a_job_are_known_where_it_is_submitted(
    cluster: Cluster, options: dict[str, str], nodes: list[NodeShape]
) -> None:
    config = RunConfig.load(
        cluster.write(
            precision="auto", engine={"name": "ddp"}, slurm={"gpus_per_node": 4, "options": options}
        )
    )
    device = devices.of_job(config.slurm, nodes, 4)
    host = sum(node.memory for node in nodes) // 4
    assert device == Device("cuda", "v100", 32 * GIB, False, True, host)


@pytest.mark.parametrize(
    "options", [{"gpus-per-task": 1}, {"gres": "gpu:4"}, {"gres": "gpu"}, {"gpus": 4}]
)
def test_gpus_asked_for_by_number_alone_are_those_of_the_partition(
    options: dict[str, str | int | float | bool],
) -> None:
    nodes = [NodeShape(128, 0, 512 * GIB), *V100S]
    device = devices.of_job(SlurmConfig(options=options), nodes, 4)
    assert device == Device("cuda", "v100", 32 * GIB, False, True, 64 * GIB)
    assert devices.of_job(SlurmConfig(options=options), [], 4) is None


def test_a_job_on_cpus_has_the_memory_it_asks_for_or_its_nodes() -> None:
    nodes = [NodeShape(64, 0, 64 * GIB), NodeShape(64, 0, 128 * GIB)]
    assert devices.of_job(SlurmConfig(), nodes, 4) == Device.cpu(32 * GIB)
    for memory, expected in ((16 * GIB, 16 * GIB), (0, 128 * GIB)):
        device = devices.of_job(SlurmConfig(), nodes, 1, memory, "mem")
        assert device == Device("cpu", "CPU", expected, True, False, 0, "mem")
    assert devices.of_job(SlurmConfig(), [], 1) is None


PROCESS = {
    "proc/meminfo": "MemTotal: 90000 kB\nMemAvailable:   9000 kB\nHugePages_Free: 1\n",
    "proc/self/status": "Name:\tx y z\nVmSize:\t3 kB\nVmRSS:\t2 kB\nVmData:\t1 kB\n",
    # Version 1, version 2 with a limit of the parent, and a controller of something else.
    "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:hugetlb,memory:/job\n0::/user/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8000000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 700000\n"
    "active_file 300000\ncache 9\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/memory.max": "6000000\n",
    "sys/fs/cgroup/user/memory.current": "1000000\n",
    "sys/fs/memory.max": "1\n",
}


def test_memory_is_the_least_of_machine_cgroups_and_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < host_memory({}) <= of_host.machine_memory()
    for name, text in PROCESS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    limits, none = dict[int, int](), resource.RLIM_INFINITY
    monkeypatch.setattr(of_host, "Path", lambda first, *more: Path(f"{tmp_path}{first}", *more))
    monkeypatch.setattr(of_host, "machine_memory", lambda: 6000000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, none), none))
    each = {"SLURM_MEM_PER_CPU": "1", "SLURM_CPUS_ON_NODE": "4"}
    whole_node = ({"SLURM_MEM_PER_NODE": megabytes} for megabytes in ("1", "0", "99"))
    given = [{}, each, *whole_node, {**each, "SLURM_CPUS_ON_NODE": ""}]
    assert [*map(host_memory, given)] == [6000000, 4 * A_MIB, A_MIB, *[6000000] * 3]
    assert [of_host.is_limited(environ) for environ in given[:3]] == [False, True, True]
    # Of two ranks: half of what a cgroup has free, with its cached files; of Slurm's 1 MB.
    assert of_host.data_limit(2, {}) == 1024 + 2000000 * 9 // 10
    assert of_host.data_limit(2, given[2]) == 1024 + (A_MIB // 2 - 2048) * 9 // 10
    limits |= {resource.RLIMIT_AS: 3 * 1024 + 500, resource.RLIMIT_DATA: 1024 + 400}
    assert of_host.is_limited({}) and of_host.data_limit(2, {}) == 1024 + 360
    limits |= {resource.RLIMIT_AS: 1}
    assert of_host.data_limit(2, {}) == 1024, "never less than it has"


def test_deepspeed_takes_the_gpu_that_the_rank_has_where_each_task_sees_its_own_alone() -> None:
    """It goes by LOCAL_RANK, which is 3 here, and the only GPU is number 0."""
    done = run_warm("""
import os, torch
os.environ.update(LOCAL_RANK="3", DS_ACCELERATOR="cpu")
import deepspeed
deepspeed.init_distributed = lambda *backend, **options: None  # there is no GPU to join with
from runner.training.engines.deepspeed import _import_joined
_import_joined(torch.device("cuda", 0))
print(os.environ["LOCAL_RANK"])
""")
    assert done.stdout.split()[-1:] == ["0"], done.stderr


BROKEN = {
    "no kernel module": (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the driver",
    ),
    "after an update": (18, "Failed to initialize NVML: Driver/library version mismatch"),
}
FIND = """
import os, sys, torch
torch.cuda.is_available = lambda: False
torch.version.cuda = sys.argv[1] or None
from runner.from_stage import UsageError
from runner.config.job_config import SlurmConfig
from runner.training.components.device import find_device
try:
    print(find_device(0, 1, SlurmConfig())[1].kind)
except UsageError as error:
    print(error)
"""


def nvidia_smi(folder: Path, code: int, said: str) -> dict[str, str]:
    """An environment with such an nvidia-smi, outside Slurm."""
    programs(folder, **{"nvidia-smi": f"echo {said!r}\nexit {code}"})
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") and name != "CUDA_VISIBLE_DEVICES"
    }
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "case", ["no kernel module", pytest.param("after an update", marks=pytest.mark.slow)]
)
def test_a_broken_driver_is_refused_by_launcher_and_rank_unless_the_cpu_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """torch only says that it finds no GPU, and the run would take weeks on the CPU."""
    code, said = BROKEN[case]
    environ = nvidia_smi(tmp_path, code, said)
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(devices, "_torch_for_cpus", lambda: "")
    with pytest.raises(UsageError) as refused:
        devices.notes(SlurmConfig(), 1, environ)
    assert said in refused.value.message
    assert "export CUDA_VISIBLE_DEVICES=" in refused.value.remedy
    chosen = environ | {"CUDA_VISIBLE_DEVICES": ""}
    assert devices.notes(SlurmConfig(), 1, chosen) == []
    in_job = environ | {"SLURM_JOB_ID": "1"}  # which has none of its node's GPUs
    assert devices.notes(SlurmConfig(), 1, in_job) == []
    ranks = [(environ, "12.8"), (chosen, "12.8"), (in_job, "12.8"), (environ, "")]
    found = [run_warm(FIND, cuda, env=variables).stdout for variables, cuda in ranks]
    assert said in found[0] and "has a GPU, and it cannot be used" in found[0]
    assert found[1:] == ["cpu\n"] * 3, "a torch for CPUs alone was chosen too"


@pytest.mark.parametrize(
    ("code", "said"),
    [(6, "No devices were found"), (0, ""), (2, 'Field "compute_cap" is not a valid field')],
    ids=["no GPU", "an empty list", "a driver before 510"],
)
def test_a_machine_that_has_nvidia_smi_and_no_gpu_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    environ = nvidia_smi(tmp_path, code, said)
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(devices, "_torch_for_cpus", lambda: "")
    monkeypatch.setattr(devices, "NODES_OF_NVIDIA", ())
    assert devices.notes(SlurmConfig(), 1, environ) == []
    assert devices.unused_gpus(environ, rocm=False) == ""


def test_a_gpu_that_the_driver_lists_and_torch_does_not_find_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = nvidia_smi(tmp_path, 0, "Tesla V100-PCIE-16GB, 16160, 7.0, GPU-1, [N/A]")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert devices.unused_gpus(environ, rocm=False) == "nvidia-smi lists 1 GPU"
    node = tmp_path / "kfd"
    node.touch()
    monkeypatch.setattr(devices, "NODES_OF_AMD", (str(node).lstrip("/"),))
    assert devices.unused_gpus(environ, rocm=True) == f"{node} is there"


def test_where_a_job_may_get_either_gpu_the_better_one_counts() -> None:
    mixed = [NodeShape(64, 4, 0, ("v100",)), NodeShape(64, 4, 0, ("a100",)), NodeShape(8, 0)]
    device = devices.of_job(SlurmConfig(gpus_per_node=4), mixed, 4)
    assert device is not None
    assert (device.name, device.memory, device.has_bf16) == ("a100 or v100", 80 * GIB, True)
    unknown = [*mixed, NodeShape(64, 4, 0, ("mi999",))]
    assert devices.of_job(SlurmConfig(gpus_per_node=4), unknown, 4) is None
    assert devices.of_job(SlurmConfig(gpus_per_node=4), [], 4) is None
